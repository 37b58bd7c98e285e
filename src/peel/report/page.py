"""`render`: the page of a run from its `RunRecord`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ..cost.budget import format_bytes, format_cost, format_count, format_latency
from ..errors import PeelError
from ..methods.plan import Plan
from ..utils.text import flatten, format_duration
from .charts import curves_chart, groups_chart, importance_chart, label, table_chart, widths_chart
from .record import RunRecord
from .speed import COLUMNS, speed_cells, speed_sentences, speed_tile
from .summary import search_sentence

if TYPE_CHECKING:
    from jinja2 import Template

RESOURCE_NAMES = {
    "macs": "MACs",
    "params": "parameters",
    "memory": "bytes of activations of one image",
    "latency": "ns of a batch",
}
NONE = "–"


@dataclass(frozen=True)
class _Cells:
    """Cells as text; the first columns hold words, the others numbers."""

    columns: Sequence[str]
    cells: Sequence[Sequence[str]]
    words: int = 1


@cache
def _template() -> Template:
    try:
        import matplotlib  # noqa: F401
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise PeelError(f"the page needs {error.name}: pip install 'peel-pruning[report]'") from error

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["svg"] = Markup  # charts escape the names that they show
    return environment.from_string(files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8"))


def render(record: RunRecord) -> str:
    """The page as one HTML text. For an unfinished run it says what is missing."""
    template = _template()
    stages, rows, scores = _stages(record), _rows(record), _scores(record)
    bench = (record.result or {}).get("bench") or {}
    seconds = (record.result or {}).get("search", {}).get("seconds", 0.0)
    return template.render(
        title=_title(record),
        facts=_facts(record),
        missing=_missing(record, stages),
        notes=(record.result or {}).get("notes", []),
        tiles=_tiles(rows, _slim_name(record), scores, bench),
        outcome=_outcome_table(rows, scores, bench),
        speed=_speed(rows, bench),
        comparison=_comparison(record, rows, scores),
        search=search_sentence(seconds) if seconds else "",
        plan=_plan(record.plan) if record.plan is not None else None,
        lines=_lines(record),
        importance=_importance(stages),
        training=_training(stages, rows, scores[0]) if stages else None,
        command=record.state.get("command", ""),
        given=_settings_table(record.config),
        resolved=_settings_table({**record.state.get("settings", {}), **record.state.get("subject", {})}),
        environment=_settings_table(record.environment),
    )


@dataclass(frozen=True)
class _Score:
    """What networks are judged by: an accuracy, a metric of the user's own, else the loss."""

    key: str
    name: str

    @property
    def is_fraction(self) -> bool:
        return self.key in ("top1", "top5")

    def show(self, value: float) -> str:
        return _percent(value) if self.is_fraction else _short(value)

    def gain(self, row: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
        """The difference of two networks; None where one is unknown."""
        if row.get(self.key) is None or other.get(self.key) is None:
            return None
        difference = row[self.key] - other[self.key]
        text = f"{100 * difference:+.2f} points" if self.is_fraction else f"{difference:+.4g}"
        return text.replace("-", "−")


def _scores(record: RunRecord) -> list[_Score]:
    metric = record.state.get("subject", {}).get("task", {}).get("metric")
    if metric:
        return [_Score("metric", metric.rpartition(".")[2])]
    rows = (record.result or {}).get("rows", [])
    if rows and all(row["top1"] is None for row in rows):
        return [_Score("loss", "loss")]
    return [_Score("top1", "top-1"), _Score("top5", "top-5")]


def _stages(record: RunRecord) -> dict[str, list[dict[str, Any]]]:
    """The epochs of each stage in order; where a resumed run repeats an epoch, the later line counts."""
    stages: dict[str, dict[int, dict[str, Any]]] = {}
    for line in record.metrics:
        stages.setdefault(line["stage"], {})[line["epoch"]] = line
    return {stage: [epochs[epoch] for epoch in sorted(epochs)] for stage, epochs in stages.items()}


def _rows(record: RunRecord) -> dict[str, dict[str, Any]]:
    """What is known of each network: its costs once there is a plan, its accuracy once there is a result."""
    networks = record.plan.networks if record.plan is not None else {}
    rows = {
        name: {
            "macs": network.macs,
            "params": network.params,
            "memory": network.memory,
            "predicted_latency": network.latency,
        }
        for name, network in networks.items()
        if name != "backbone"
    }
    for row in (record.result or {}).get("rows", []):
        rows[row["name"]] = {**rows.get(row["name"], {}), **row}
    return rows


def _slim_name(record: RunRecord) -> str:
    """The row of the slim network."""
    if record.plan is not None:
        return record.plan.name
    # The config has the method as given, which may be auto.
    return str(record.state.get("settings", {}).get("method", "peel")).rpartition(":")[2]


def _lines(record: RunRecord) -> list[str]:
    """The networks that the chart of the widths shows as lines."""
    names = [f"the {name}" for name in record.plan.others] if record.plan is not None else []
    return names if _slim_name(record) == "uniform" else [*names, "the uniform network"]


def _budget(record: RunRecord) -> str:
    """The budget as a count of its resource, or as given where there is no plan yet."""
    plan = record.plan
    if plan is None:
        given, resource = record.config.get("budget", "?"), record.config.get("resource", "macs")
        return f"{given} ({RESOURCE_NAMES.get(resource, '')})"
    if plan.limits or plan.resource == "latency":
        allowed = {plan.resource: plan.budget, **plan.limits}
        return ", ".join(format_cost(amount, name) for name, amount in allowed.items())
    return f"{format_count(plan.budget)} {RESOURCE_NAMES.get(plan.resource, plan.resource)}"


def _title(record: RunRecord) -> str:
    config = record.config
    return f"{config.get('model', 'A model')} on {config.get('data', 'data')}, budget {_budget(record)}"


def _facts(record: RunRecord) -> list[str]:
    facts = [f"seed {record.config['seed']}"] if "seed" in record.config else []
    if "device" in record.environment:
        facts.append(record.environment["device"])
    shape = record.state.get("subject", {}).get("data", {}).get("shape")
    if shape:
        facts.append(f"images of {' x '.join(map(str, shape))}")
    if record.result and "wall_seconds" in record.result:
        facts.append(f"finished in {format_duration(record.result['wall_seconds'])}")
    if "peel" in record.environment:
        facts.append(f"peel {record.environment['peel']}")
    return facts


def _missing(record: RunRecord, stages: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    missing = [f"An error ended the run: {record.error}"] if record.error is not None else []
    if record.plan is None:
        missing.append("There is no plan yet (plan.json), so costs, widths and groups are missing.")
    if not stages:
        missing.append("No epoch is finished yet (metrics.jsonl), so the curves are missing.")
    for stage, epochs in stages.items():
        done, total = epochs[-1]["epoch"], epochs[-1]["epochs"]
        if done < total:
            missing.append(f"The stage {label(stage)} is at epoch {done} of {total}.")
    if record.result is None:
        missing.append("There is no result yet (result.json), so the accuracies are missing.")
    return missing


def _tiles(
    rows: Mapping[str, Mapping[str, Any]],
    name_of_slim: str,
    scores: Sequence[_Score],
    bench: Mapping[str, Any],
) -> list[tuple[str, str, str]]:
    """The few figures that a reader looks for first: name, value, remark."""
    original, uniform, slim = (rows.get(name, {}) for name in ("original", "uniform", name_of_slim))
    tiles = []
    for name, key in (("MACs", "macs"), ("Parameters", "params"), ("Activations, one image", "memory")):
        if key in original and key in slim:
            remark = f"{_percent(slim[key] / max(1, original[key]), 1)} of the original"
            count = format_bytes if key == "memory" else format_count
            tiles.append((name, f"{count(original[key])} → {count(slim[key])}", remark))
    tiles += filter(None, [speed_tile(name_of_slim, bench)])
    score = scores[0]
    if (loss := score.gain(slim, original)) is not None:
        values = f"{score.show(original[score.key])} → {score.show(slim[score.key])}"
        tiles.append((score.name.capitalize(), values, loss))
    if slim is not uniform and (gain := score.gain(slim, uniform)) is not None:
        tiles.append((f"{label(name_of_slim)} against uniform", gain, "one seed: no evidence by itself"))
    return tiles


def _outcome_table(
    rows: Mapping[str, Mapping[str, Any]], scores: Sequence[_Score], bench: Mapping[str, Any]
) -> _Cells | None:
    if not rows:
        return None
    original = rows.get("original", {})

    def cost(row: Mapping[str, Any], key: str) -> str:
        return _cell(row, key, lambda count: f"{count:,} ({_percent_of(count, original.get(key))})")

    shown = [score for score in scores if any(row.get(score.key) is not None for row in rows.values())]
    steps = list(next((row["before_training"] for row in rows.values() if row.get("before_training")), ()))
    latencies = {"predicted_latency": "latency (predicted)", "latency": "latency (measured)"}
    times = [key for key in latencies if any(row.get(key) is not None for row in rows.values())]
    cells = [
        [
            "uniform, same budget" if name == "uniform" else label(name),
            *(_cell(row.get("before_training", {}), step, scores[0].show) for step in steps),
            *(_cell(row, score.key, score.show) for score in shown),
            *(cost(row, key) for key in ("macs", "params", "memory")),
            *(_cell(row, key, format_latency) for key in times),
            *(text or NONE for text in (speed_cells(name, bench) if bench else ())),
            _cell(row, "seconds", format_duration),
            _cell(row, "image_passes", format_count),
            row.get("file") or NONE,
        ]
        for name, row in rows.items()
    ]
    costs = ["MACs (of original)", "params", "bytes (one image)", *(latencies[key] for key in times)]
    costs += COLUMNS if bench else ()
    columns = [*(score.name for score in shown), *costs, "time", "image passes", "saved as"]
    return _Cells(["network", *steps, *columns], cells)


def _speed(rows: Mapping[str, Mapping[str, Any]], bench: Mapping[str, Any]) -> list[str]:
    if not bench:
        return []
    has_latency = any(row.get("predicted_latency") is not None for row in rows.values())
    ratio = "“Over MACs” is the speed-up divided by the reduction of MACs: 1 where time falls as MACs do."
    return [*speed_sentences(bench, has_latency), *([] if "error" in bench else [ratio])]


def _comparison(record: RunRecord, rows: Mapping[str, Mapping[str, Any]], scores: Sequence[_Score]) -> str:
    name_of_slim = _slim_name(record)
    slim, uniform = rows.get(name_of_slim, {}), rows.get("uniform", {})
    if name_of_slim == "uniform":
        return "The method is the uniform network itself."
    if record.plan and record.plan.widths == record.plan.uniform.widths and slim.get("seconds") == 0:
        return "The plan is the uniform network, which was trained once."
    gains = [f"{gain} {score.name}" for score in scores if (gain := score.gain(slim, uniform))]
    if not gains:
        return f"{label(name_of_slim)} and the uniform network can be compared once both are trained."
    return (
        f"{label(name_of_slim)} minus uniform: {', '.join(gains)}, from one training each (seed "
        f"{record.config.get('seed')}). "
        f"The difference of one seed is no evidence in either direction: repeat it with other seeds."
    )


def _plan(plan: Plan) -> dict[str, Any]:
    macs = {name: network.macs_by_group for name, network in plan.networks.items()}
    return {
        "widths_svg": widths_chart(
            {name: network.widths for name, network in plan.networks.items()}, plan.groups
        ),
        "widths_table": _widths_table(plan),
        "budget": _budget_sentences(plan),
        "groups_svg": groups_chart(macs),
        "name": label(plan.name),
        "tables": [
            {"table": table, "svg": table_chart(table, f"method-{number}") if table.chart else ""}
            for number, table in enumerate(plan.tables)
        ],
        "macs_table": _macs_table(macs),
    }


def _widths_table(plan: Plan) -> _Cells:
    widths = {name: network.widths for name, network in plan.networks.items()}
    before, after = plan.original.widths, plan.slim.widths
    rows = [
        [
            tie,
            group,
            *(str(of_tie[tie]) for of_tie in widths.values()),
            _percent_of(after[tie], before[tie]),
        ]
        for group, ties in plan.groups.items()
        for tie in ties
    ]
    columns = ["tie", "group", *map(label, widths), f"{label(plan.name)} of original"]
    return _Cells(columns, rows, words=2)


def _macs_table(macs: Mapping[str, Mapping[str, int]]) -> _Cells:
    def cell(of_group: Mapping[str, int], group: str) -> str:
        count = of_group.get(group, 0)
        return f"{count:,} ({_percent_of(count, sum(of_group.values()))})"

    groups = dict.fromkeys(group for of_group in macs.values() for group in of_group)
    rows = [[group, *(cell(of_group, group) for of_group in macs.values())] for group in groups]
    return _Cells(["group", *map(label, macs)], rows)


def _budget_sentences(plan: Plan) -> str:
    unit = RESOURCE_NAMES.get(plan.resource, plan.resource)
    used = f"The budget is {plan.budget:,} {unit}; the plan uses {_percent(plan.slim.cost / plan.budget, 2)}."
    before, after = plan.original.widths, plan.slim.widths
    if wider := sum(after[tie] > before[tie] for tie in after):
        used += f" {wider} of {len(after)} widths are above the original."
    pool = plan.values.get("pool")
    if not isinstance(pool, int) or "backbone" not in plan.others:
        return used
    return f"{used} The backbone costs {plan.others['backbone'].cost:,}, and leaves a pool of {pool:,}."


def _importance(stages: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any] | None:
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for stage, epochs in stages.items():
        for line in epochs:
            for group, value in line.get("importance", {}).items():
                curves.setdefault(stage, {}).setdefault(group, []).append((line["epoch"], _number(value)))
    if not curves:
        return None
    rows = [
        [group, stage, _short(curve[0][1]), _short(curve[-1][1]), _percent_of(curve[-1][1], curve[0][1])]
        for stage, of_group in curves.items()
        for group, curve in of_group.items()
    ]
    table = _Cells(["group", "stage", "first epoch", "last epoch", "last of first"], rows, words=2)
    return {"svg": importance_chart(curves), "table": table}


def _training(
    stages: Mapping[str, list[dict[str, Any]]], rows: Mapping[str, Mapping[str, Any]], score: _Score
) -> dict[str, Any]:
    title = f"test {score.name} (%)" if score.is_fraction else f"test {score.name}"
    curves = _score_curves(stages, rows, score)
    scale = 100 if score.is_fraction else 1
    panels = {
        name: {
            stage: [(line["epoch"], _number((line.get(part) or {}).get("loss"))) for line in epochs]
            for stage, epochs in stages.items()
        }
        for name, part in (("training loss", "train"), ("test loss", "test"))
    }
    panels[title] = {
        stage: [(epoch, scale * _number(value)) for epoch, value in curve.items()]
        for stage, curve in curves.items()
    }
    names = ["training loss", f"training {score.name}", "test loss", f"test {score.name}"]
    columns = ["stage", "loss terms", "epochs", *dict.fromkeys(names), "images/s", "time"]
    last = [_training_row(stage, epochs, score) for stage, epochs in stages.items()]
    return {
        "svg": curves_chart(panels),
        "table": _Cells(columns, last, words=2),
        "score": score.name,
        "has_start": any(0 in curve for curve in curves.values()),
        "epochs": _epochs_table(curves, score),
    }


Curves = dict[str, dict[int, float | None]]
"""Stage -> epoch -> score."""


def _score_curves(
    stages: Mapping[str, list[dict[str, Any]]], rows: Mapping[str, Mapping[str, Any]], score: _Score
) -> Curves:
    """The score on test images. Epoch 0: after the last step of surgery, where there was one."""
    curves: Curves = {}
    for stage, epochs in stages.items():
        steps = list(rows.get(stage, {}).get("before_training", {}).values())
        curves[stage] = dict(enumerate(steps[-1:]))
        curves[stage] |= {line["epoch"]: (line.get("test") or {}).get(score.key) for line in epochs}
    return curves


def _epochs_table(curves: Curves, score: _Score) -> _Cells:
    rows = [
        [str(epoch), *(_cell(curve, epoch, score.show) for curve in curves.values())]
        for epoch in sorted({epoch for curve in curves.values() for epoch in curve})
    ]
    return _Cells(["epoch", *map(label, curves)], rows)


def _training_row(stage: str, epochs: Sequence[Mapping[str, Any]], score: _Score) -> list[str]:
    last = epochs[-1]
    train, test = last.get("train", {}), last.get("test") or {}
    terms = [f"{name} {_short(value)}" for name, value in train.items() if name not in ("loss", "top1")]
    metrics: list[tuple[Mapping[str, Any], str, Callable[[float], str]]] = [
        (train, "loss", _short),
        (train, score.key, score.show),
        (test, "loss", _short),
        (test, score.key, score.show),
    ]
    if score.key == "loss":
        metrics = metrics[::2]
    return [
        label(stage),
        ", ".join(terms) or NONE,
        f"{last['epoch']} of {last['epochs']}",
        *(_cell(row, key, words) for row, key, words in metrics),
        _cell(last, "images_per_second", "{:,.0f}".format),
        format_duration(sum(line.get("seconds", 0) for line in epochs)),
    ]


def _settings_table(settings: Mapping[str, Any]) -> _Cells:
    rows = [
        [name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)]
        for name, value in flatten(settings).items()
    ]
    return _Cells(("setting", "value"), rows, words=2)


def _cell(row: Mapping[Any, Any], key: Any, words: Callable[[Any], str]) -> str:
    return NONE if row.get(key) is None else words(row[key])


def _percent_of(part: float | None, whole: float | None) -> str:
    return NONE if part is None or not whole else _percent(part / whole, 1)


def _percent(fraction: float, digits: int = 2) -> str:
    return f"{100 * fraction:.{digits}f} %"


def _short(value: float) -> str:
    return f"{value:.4g}"


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
