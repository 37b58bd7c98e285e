"""Criteria by name, as objects of the user's own, and from the user's files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import peel
from helpers.criteria import importance, make_inputs
from helpers.nets import Chain
from peel.steps.criteria import CRITERIA, CriterionInput, LayerScores, find_criterion, measure_layers
from peel.steps.criteria.legr import Legr

pytestmark = pytest.mark.usefixtures("one_thread")

GROUPS = {"first": ["conv1"], "second": ["conv2"]}

OWN = """
import torch
from peel.steps.criteria import LayerScores

class Constant:
    def measure(self, inputs):
        widths = enumerate(inputs.graph.widths.items())
        return [LayerScores(tie, tie, torch.full((n,), i + 1.0)) for i, (tie, n) in widths]

class NeedsArgument(Constant):
    def __init__(self, value):
        pass

class NoMeasure:
    pass

class Failing:
    def measure(self, inputs):
        return inputs.graph.nothing

instance = Constant()
"""


class Own:
    """Returns the given scores."""

    def __init__(self, *scores: object) -> None:
        self.scores = list(scores)

    def measure(self, inputs: CriterionInput) -> list[LayerScores]:
        assert not inputs.model.training
        return self.scores  # type: ignore[return-value]


def scores(*values: float, tie: str = "conv1") -> LayerScores:
    return LayerScores(tie, "layer", torch.tensor(values))


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_criteria.py").write_text(OWN)
    return tmp_path / "own_criteria.py"


def test_every_criterion_is_found_by_name_and_described() -> None:
    for name, kind in CRITERIA.items():
        assert type(find_criterion(name)) is kind
        assert kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}(")  # written, not generated
    assert find_criterion("legr", evaluations=3) == Legr(evaluations=3)
    assert {name for name, kind in CRITERIA.items() if not getattr(kind, "each_epoch", True)} == {
        "legr",
        "reconstruction",
    }
    assert {name for name, kind in CRITERIA.items() if getattr(kind, "needs_held_out", False)} == {"legr"}


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    known = "bn, weight, legr, reconstruction, gradient, taylor"
    with pytest.raises(peel.ConfigError, match=rf"Did you mean gradient\? Known are {known}; .*file.py:Name"):
        find_criterion("gradients")


def test_an_object_is_used_as_it_is() -> None:
    own = Own(scores(*[1.0] * 8), scores(3.0, tie="conv2"))
    assert find_criterion(own) is own
    inputs = make_inputs(Chain().train(), GROUPS)
    assert importance(own, inputs).groups == {"first": 1.0, "second": 3.0}
    assert inputs.model.training


@pytest.mark.parametrize("name", ["Constant", "instance"])
@pytest.mark.parametrize("place", ["own_criteria.py", "own_criteria", "absolute"])
def test_a_criterion_comes_from_a_file_or_a_module(own_file: Path, place: str, name: str) -> None:
    reference = f"{own_file if place == 'absolute' else place}:{name}"
    found = importance(find_criterion(reference), make_inputs(Chain(), GROUPS))
    assert found.groups == {"first": 1.0, "second": 2.0}


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("own_criteria.py:Constants", "own_criteria.py has no 'Constants'. Did you mean Constant"),
        ("own_criteria.py:NoMeasure", "no method `measure"),
        ("own_criteria.py:NeedsArgument", "cannot be created: TypeError: .*'value'"),
        ("nothing.py:Constant", "there is no file nothing.py"),
        ("no_module.inside:Constant", "there is no module 'no_module'"),
        ("broken.py:Constant", "broken.py cannot be imported: ZeroDivisionError: division by zero"),
        (":Constant", "is not a reference"),
        (3, "no method `measure"),
    ],
)
def test_a_wrong_reference_is_refused(own_file: Path, reference: object, message: str) -> None:
    own_file.with_name("broken.py").write_text("1 / 0")
    with pytest.raises(peel.ConfigError, match=message):
        find_criterion(reference)


def test_an_error_in_the_users_criterion_is_shown_with_its_line(own_file: Path) -> None:
    criterion = find_criterion("own_criteria.py:Failing")
    with pytest.raises(
        peel.ConfigError, match=r"Failing raised AttributeError: .*'nothing' \(.*own_criteria.py:19\)"
    ):
        measure_layers(criterion, make_inputs(Chain()))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("scores", "Own must return a list of LayerScores"),
        (
            scores(*[1.0] * 8, tie="conv"),
            "Own, layer layer: no free tie is called 'conv'. Did you mean conv",
        ),
        (scores(*[1.0] * 7), "Own, layer layer: .* each of the 8 channels of conv1, or one for the tie"),
        (LayerScores("conv1", "layer", torch.ones(8, 1)), "each of the 8 channels"),
        (LayerScores("conv1", "layer", [1.0] * 8), "each of the 8 channels"),  # type: ignore[arg-type]
        (scores(), "each of the 8 channels"),
        (scores(float("nan")), "Own, layer layer: some values are not finite"),
    ],
)
def test_wrong_scores_are_refused_with_the_criterion_and_the_layer(found: object, message: str) -> None:
    with pytest.raises(peel.ConfigError, match=message):
        measure_layers(Own(found), make_inputs(Chain()))


def test_scores_of_an_untrained_network_need_not_be_finite() -> None:
    (found,) = measure_layers(Own(scores(float("inf"))), make_inputs(Chain()), is_trained=False)
    assert found.values.isinf().all()
