"""A method of the user's own: its settings, weights and state, what survives a kill, and wrong answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import peel
from helpers.folders import read
from helpers.small import SHORT, Counting, Small, few_digits, same_weights, small_run, taught
from peel.cli.main import main
from peel.errors import ConfigError
from peel.methods import Problem, Work

pytestmark = pytest.mark.usefixtures("one_thread")

EXTENDING = Path(__file__).parents[2] / "docs" / "extending.md"

#: A method that trains a network, has a state and draws random numbers. KILL=name:number ends it.
OWN = '''
import os, signal
from dataclasses import dataclass
import torch
import peel
from peel.surgery import slim


def stop_at(name, number):
    if os.environ.get("KILL") == f"{name}:{number}":
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Found:
    widths: dict[str, int]
    draws: list[float]


class State:
    def __init__(self):
        self.draws = []

    def state_dict(self):
        return {"draws": list(self.draws)}

    def load_state_dict(self, state):
        self.draws = list(state["draws"])


@dataclass(frozen=True)
class Mine(peel.Method):
    """Draws numbers, trains a network and answers with it."""

    count: int = 4
    """How many numbers are drawn."""
    share: float = 0.5

    needs = peel.Needs(training="loss")

    def solve(self, problem, work):
        state = State()
        for number in work.steps("draws", self.count, state):
            stop_at("steps", number)
            state.draws.append(torch.rand(1).item())
        stop_at("between", 0)
        found = work.once("found", Found, lambda: Found(dict(problem.constraint.uniform), state.draws))
        network = slim(problem.model, found.widths, graph=problem.graph).requires_grad_(True)
        network = work.train("mine", network, problem.task.objective())
        stop_at("end", 0)
        rows = tuple(enumerate(found.draws))
        table = peel.Table("Numbers drawn", ("number", "value"), rows, chart="lines")
        return peel.Answer(found.widths, network=network, tables=(table,), notes=("Mine is done.",))
'''

PROGRAM = """
import sys
import peel
from helpers.small import Small, few_digits
import torch
torch.set_num_threads(1)
short = {"epochs": 2, "batch_size": 64}
peel.prune(Small(), few_digits(), weights="train", init="scratch", method="own.py:Mine", train=short,
           methods={"mine": {"count": 5}}, backbone={"epochs": 1}, bench_seconds=0, output=sys.argv[1],
           checkpoint_seconds=0.0)
"""


def start(place: Path, output: str, kill: str = "") -> int:
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(peel.__file__).parents[1])])
    variables = {**os.environ, "KILL": kill, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", PROGRAM, output], cwd=place, env=variables, check=False)
    return done.returncode


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the method that nothing interrupts."""
    place = tmp_path_factory.mktemp("own")
    (place / "own.py").write_text(OWN)
    assert start(place, "whole") == 0
    return place


def network_of(place: Path, run: str) -> Any:
    return peel.load(place / run / "slim", model=Small())


def test_settings_table_notes_and_weights_arrive(whole: Path) -> None:
    plan = peel.Plan.from_json((whole / "whole" / "plan.json").read_bytes())
    assert plan.name == "Mine"
    assert plan.method == {"count": 5, "share": 0.5}
    assert len(plan.tables[0].rows) == 5
    page = (whole / "whole" / "report.html").read_text()
    assert all(words in page for words in ("Numbers drawn", "Mine is done.", "How Mine came to the widths"))
    lines = (whole / "whole" / "metrics.jsonl").read_text()
    assert lines.count('"stage": "mine"') == 1
    mine, final = (peel.load(whole / "whole" / name, model=Small()) for name in ("stages/mine", "slim"))
    change = (mine.conv2.weight - final.conv2.weight).norm() / mine.conv2.weight.norm()
    assert 0 < change < 0.7, "the final training started from the weights of the method"


@pytest.mark.slow
@pytest.mark.parametrize("kill", ["steps:3", "between:0", "end:0"])
def test_a_killed_method_goes_on_to_the_same_bits(kill: str, whole: Path) -> None:
    name = kill.replace(":", "-")
    assert start(whole, name, kill) == -signal.SIGKILL
    assert start(whole, name) == 0
    assert same_weights(network_of(whole, name), network_of(whole, "whole"))
    tables = [read(whole / run / "plan.json")["tables"] for run in (name, "whole")]
    assert tables[0] == tables[1], "the numbers that were drawn"


def test_a_killed_search_goes_on_where_it_was(whole: Path) -> None:
    assert start(whole, "killed", "steps:3") == -signal.SIGKILL
    assert start(whole, "killed", "steps:1") == 0, "the steps before are not done again"
    assert same_weights(network_of(whole, "killed"), network_of(whole, "whole"))


def test_the_documented_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = EXTENDING.read_text()
    code = text[text.index("# my_method.py") :].partition("```")[0]
    (tmp_path / "my_method.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    flags = "--method my_method.py:RandomSearch --random-search.tries 3 --resource params --budget 60%"
    short = "--train.epochs 1 --train.batch-size 256 --bench-seconds 0 --quiet --output run"
    model = ["helpers.small:Small", "--data", "digits"]
    assert main(["run", *model, *flags.split(), *short.split()]) == 0
    plan = read(tmp_path / "run" / "plan.json")
    assert plan["method"] == {"tries": 3}
    assert plan["slim"]["params"] <= plan["budget"]
    assert len(plan["tables"][0]["rows"]) == 3
    assert "Networks tried" in (tmp_path / "run" / "report.html").read_text()


# Wrong answers


@dataclass(frozen=True)
class Wrong(peel.Method):
    """Right in the rehearsal, and wrong later."""

    kind: str

    def solve(self, problem: Problem, work: Work) -> Any:
        uniform = problem.constraint.uniform
        if work.is_rehearsal:
            return peel.Answer(uniform)
        if self.kind == "raises":
            raise ValueError("I give up")
        if self.kind == "none":
            return None
        if self.kind == "twice the budget":
            return peel.Answer(problem.graph.widths)
        if self.kind == "a broken tie":
            return peel.Answer({**uniform, "conv1": 0})
        network = peel.slim(problem.model, uniform, graph=problem.graph)
        with torch.no_grad():
            network.get_parameter("conv2.weight")[0] = torch.nan
        return peel.Answer(uniform, network=network)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("none", ConfigError, "the method Wrong must return a peel.Answer, not NoneType"),
        (
            "twice the budget",
            ConfigError,
            r"the network of the method Wrong uses .*% of the limit of macs",
        ),
        ("a broken tie", ConfigError, "the widths of the method Wrong: conv1.*at least 1, not 0"),
        ("NaN", ConfigError, r"method Wrong has weights that are not finite \(conv2.weight\)"),
        ("raises", ConfigError, r"the method Wrong raised ValueError: I give up \(.*test_method.py:\d+\)"),
    ],
)
def test_a_wrong_answer_is_refused_before_anything_is_trained_on_it(
    kind: str, error: type[Exception], words: str
) -> None:
    counting = Counting()
    with pytest.raises(error, match=words):
        small_run(method=Wrong(kind), callbacks=[counting])
    assert set(counting.steps) <= {"original"}


@dataclass(frozen=True)
class Early(peel.Method):
    """Wrong from the start."""

    def solve(self, problem: Problem, work: Work) -> peel.Answer:
        return peel.Answer(problem.graph.widths)


def test_what_a_rehearsal_finds_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    counting = Counting()
    with pytest.raises(ConfigError, match="of the limit of macs"):
        small_run(method=Early(), callbacks=[counting], output=tmp_path / "run")
    assert counting.steps == {}
    assert not (tmp_path / "run").exists()


def test_values_that_cannot_be_stored_are_refused() -> None:
    class Unstored(peel.Method):
        def solve(self, problem: Problem, work: Work) -> peel.Answer:
            if not work.is_rehearsal:
                work.once("noise", Tensor, lambda: torch.zeros(3))
            return peel.Answer(problem.constraint.uniform)

    with pytest.raises(ConfigError, match=r"work.once\('noise', ...\).*plain values"):
        small_run(method=Unstored())


# What is computed how often


def test_nothing_is_computed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peel.cost.constraint import Constraint
    from peel.data import datasets
    from peel.methods import calibration
    from peel.run import loading

    counts: dict[str, int] = {}

    def counted(owner: Any, name: str) -> None:
        known = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return known(*arguments, **named)

        monkeypatch.setattr(owner, name, call)

    counted(loading.Constraint, "of")
    counted(loading, "hold_out")
    for name in ("measure_sensitivity", "explain_scores", "Repairer", "calibration_batches"):
        counted(calibration, name)
    assert loading.Constraint is Constraint
    assert datasets.hold_out is not loading.hold_out
    settings = {"weights": taught(), "init": "auto", "method": "sensitivity", "data": few_digits(600, 300)}
    small_run(**settings, output=tmp_path / "run")
    assert counts == {
        "of": 1,
        "hold_out": 1,
        "measure_sensitivity": 1,
        "explain_scores": 1,
        "Repairer": 1,
        "calibration_batches": 1,
    }
    counts.clear()
    counting = Counting()
    small_run(**settings, output=tmp_path / "run", callbacks=[counting])
    assert counts == {"of": 1, "hold_out": 1}, "a finished run"
    assert counting.steps == {}
    assert SHORT["method"] == "peel"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("chart", r"the table 'T' of the method Careless has the chart 'pie'"),
        ("rows", r"the table 'T' of the method Careless has a row of 1 cells"),
        ("NaN", "the values and tables of the method Careless must be plain and finite"),
        ("twice", r"work.train\('one', ...\) is called twice"),
        ("slash", r"work.train\('a/b', ...\): a name has letters"),
        ("stage", r"work.train\('uniform', ...\): a name"),
        ("original", r"needs = peel.Needs\(original=True\)"),
    ],
)
def test_careless_methods_are_refused_in_the_rehearsal(kind: str, words: str, tmp_path: Path) -> None:
    class Careless(peel.Method):
        needs = peel.Needs(training="loss")

        def solve(self, problem: Problem, work: Work) -> peel.Answer:
            uniform, chart, rows, values = problem.constraint.uniform, "", ((1, 2),), {}
            net, objective = work.start(uniform), problem.task.objective()
            names = {"twice": ["one", "one"], "slash": ["a/b"], "stage": ["uniform"]}
            for name in names.get(kind, []):
                work.train(name, net, objective)
            if kind == "original":
                work.repaired(uniform)
            if kind == "chart":
                chart = "pie"
            if kind == "rows":
                rows = ((1,),)  # type: ignore[assignment]
            if kind == "NaN":
                values = {"loss": float("nan")}
            table: Any = peel.Table("T", ("a", "b"), rows, chart=chart)  # type: ignore[arg-type]
            return peel.Answer(uniform, tables=(table,), values=values)

    with pytest.raises(ConfigError, match=words):
        small_run(method=Careless(), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_edited_method_that_is_given_in_python_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    code = "import peel\nclass Mine{0}(peel.Method):\n    def solve(self, problem, work):\n"
    code += "        return peel.Answer(problem.constraint.uniform)\n"
    (tmp_path / "mine_first.py").write_text(code.format(""))
    monkeypatch.syspath_prepend(str(tmp_path))
    import mine_first  # type: ignore[import-not-found]

    settings: dict[str, Any] = {"stages": ["plan"], "output": tmp_path / "run"}
    small_run(method=mine_first.Mine(), **settings)
    small_run(method=mine_first.Mine(), **settings)
    (tmp_path / "mine_first.py").write_text(code.format("") + "# edited\n")
    with pytest.raises(peel.RunError, match="file of the method"):
        small_run(method=mine_first.Mine(), **settings)
