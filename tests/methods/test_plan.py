"""The plan goes to JSON and back, and what is not a plan is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import peel
from helpers.small import WIDTHS, small_run
from peel.methods.peel import rounds_of
from peel.run.result import Result


def test_a_plan_of_a_run_survives_json(finished: tuple[Path, Result]) -> None:
    folder, result = finished
    assert result.plan is not None
    assert peel.Plan.from_json(result.plan.to_json()) == result.plan
    assert peel.Plan.from_json((folder / "plan.json").read_bytes()) == result.plan


def test_the_numbers_of_a_plan_agree(finished: tuple[Path, Result]) -> None:
    plan = finished[1].plan
    assert plan is not None
    assert plan.values["pool"] == plan.budget - plan.others["backbone"].cost
    assert plan.slim.cost <= plan.budget
    assert rounds_of(plan)[-1].widths == plan.slim.widths == dict(plan.widths)
    assert rounds_of(plan)[-1].unspent == plan.budget - plan.slim.cost
    for network in plan.networks.values():
        assert sum(network.macs_by_group.values()) == network.macs


def test_given_widths_make_a_plan_without_backbone(one_thread: None) -> None:
    plan = small_run(plan=WIDTHS, budget="100%", dry_run=True).plan
    assert plan is not None
    assert (plan.others, plan.values, rounds_of(plan)) == ({}, {}, ())
    assert dict(plan.widths) == WIDTHS


@pytest.mark.parametrize(
    "change",
    [
        {"slim": None},
        {"budget": "many"},
        {"version": 1},
        {"format": "other"},
        {"tables": [{"title": "a", "columns": ["b"], "rows": [[1, 2]]}]},
        {"others": {"backbone": 3}},
    ],
    ids=str,
)
def test_what_is_not_a_plan_is_refused(finished: tuple[Path, Result], change: dict[str, object]) -> None:
    plan = finished[1].plan
    assert plan is not None
    document = {**json.loads(plan.to_json()), **change}
    with pytest.raises(peel.CorruptFileError):
        peel.Plan.from_json(json.dumps(document).encode())
