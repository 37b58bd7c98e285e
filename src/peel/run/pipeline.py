"""The stages of a run in their order, and the table that they end in."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from ..cost.widths import Widths
from ..data.datasets import Split, held_out_size
from ..errors import BudgetError, ConfigError, CorruptFileError, DataError, PeelError, RunError
from ..methods.peel import HELD_OUT, Plan, check_feasible, equal_share_plan, make_plan, stage_of_round
from ..methods.problem import Problem
from ..methods.settings import Method
from ..steps.distillation import Distillation, InPlace, in_place_pair
from ..surgery import attach_record, record_of, slim
from ..train.distributed import World
from ..train.history import Metrics
from ..train.loop import evaluate
from ..train.objective import CrossEntropy, Objective
from ..train.recipe import Recipe
from ..train.state import part_size
from ..train.teacher_cache import CachedTeacher, LogitCache, make_logit_cache
from ..utils.rng import derive_seed, seed_everything
from .estimate import seconds_per_mac, work_of
from .folder import RunFolder
from .result import Result
from .resume import forced_notes
from .stage_record import StageRecord, read_object
from .teacher import Teacher, find_teacher, weights_hash
from .trainer import Trainer

__all__ = ["STEPS", "Pipeline"]

STEPS: dict[str, str] = {
    "original": "train the original, or take the trained one that was named: the teacher",
    "backbone": "train the over-pruned backbone (steps 1 and 2)",
    "plan": "group and reallocate (steps 3 and 4)",
    "uniform": "train the uniform network of the same budget, to compare with",
    "peel": "train the slim network (step 5)",
}


log = logging.getLogger("peel")


@dataclass
class Pipeline:
    """The stages of one run."""

    problem: Problem
    method: Method
    recipe: Recipe
    steps: Sequence[str]
    named_teacher: nn.Module | str | Path
    given: Widths | None
    trainer: Trainer
    teacher_settings: dict[str, Any]
    """What a teacher that is trained at a path of its own is told apart by."""
    environment: dict[str, Any]
    force: bool
    """Whether a folder is gone on with although settings changed."""

    workspace: RunFolder | None = None
    taken: Teacher | None = None
    teacher_file: str = "stages/original.json"
    teacher_folder: Path | None = None
    answers: LogitCache | None = None
    """What the teacher said so far, where it is remembered."""
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def world(self) -> World:
        return self.problem.engine.world

    def check(self) -> None:
        """Refuse what cannot work, before anything is written or trained."""
        problem, method = self.problem, self.method
        finals = [name for name in ("uniform", "peel") if name in self.steps]
        if (
            self.given is None
            and not {"backbone", "plan"} <= set(self.steps)
            and (finals or "plan" in self.steps)
        ):
            raise ConfigError(
                f"the steps {', '.join(self.steps)} need a plan: add backbone and plan to them, or give widths of your own with plan."
            )
        needs_teacher = bool(finals) and method.distill == "teacher"
        if needs_teacher or "original" in self.steps:
            self.taken = find_teacher(self.named_teacher, problem)
            if self.taken is not None:
                self.teacher_file, self.teacher_folder = self.taken.file, self.taken.folder
        if needs_teacher and "original" not in self.steps and self.taken is None:
            raise ConfigError(
                'distillation needs the teacher: add "original" to the steps, name a trained teacher, or set distill="none".'
            )
        if self.given is not None and problem.cost(self.given) > problem.budget:
            raise BudgetError(
                f"the given plan costs {problem.cost(self.given):,} {problem.resource}, more than the budget of {problem.budget:,}. "
                f"Give the budget that it was made for, or budget={problem.cost(self.given)}."
            )
        trains = bool(finals) or ("original" in self.steps and self.taken is None)
        whole = problem.data.train.size
        for is_used, recipe, size in (
            (trains, self.recipe, whole),
            (
                self.searches,
                problem.search,
                whole - held_out_size(whole, HELD_OUT) if method.criterion == "legr" else whole,
            ),
        ):
            if is_used:
                part_size(recipe, problem.engine)
            if is_used and recipe.batch_size > size:
                raise DataError(
                    f"a batch of {recipe.batch_size} images is larger than the training set of {size}. "
                    f"Choose a batch size of at most {size}."
                )
        problem.uniform()
        if self.given is None and "backbone" in self.steps:
            check_feasible(problem, method)

    @property
    def searches(self) -> bool:
        """Whether a backbone is trained."""
        return (
            self.given is None
            and "backbone" in self.steps
            and self.method.policy in ("importance", "winner-take-all")
        )

    # The order of things

    def run(self) -> Result:
        self.trainer.reporter.plan_stages(self._work())
        if self.taken is not None:
            self._settle_teacher(self.taken.model)
        original = (
            self._original()
            if "original" in self.steps
            else self.taken.model
            if self.taken is not None
            else None
        )
        if original is not None and self.taken is None:
            self._settle_teacher(original)
        plan = self._plan()
        if plan is not None:
            told = [
                item["note"]
                for item in plan.document.get("rounds", [])
                if "note" in item and not item.get("distinct", True)
            ]
            self.notes += dict.fromkeys(told)
            self._compare_with_uniform(plan.widths)
        slimmed = None
        if plan is not None and "uniform" in self.steps:
            self._final("uniform", self.problem.uniform(), original)
        if plan is not None and "peel" in self.steps:
            slimmed = self._final("peel", plan.widths, original)
        return self._end(plan, slimmed)

    def _end(self, plan: Plan | None, slimmed: nn.Module | None) -> Result:
        document = plan.document if plan is not None else None
        history = {stage: record.history for stage, record in self.trainer.records.items()}
        earlier = self._earlier_result()
        found = {**{row["name"]: row for row in earlier["rows"]}, **self.rows}
        rows = [found[name] for name in ("original", "uniform", "peel") if name in found]
        told = [note for record in self.trainer.records.values() for note in record.notes]
        if len(rows) > len(self.rows):
            told += earlier["notes"]
        self.notes = list(dict.fromkeys([*self.notes, *told, *self._forced_notes()]))
        for note in self.notes:
            self.trainer.reporter.note(note)
        if self.workspace is not None:
            if slimmed is not None:
                # That of its training, which may not be that of now.
                fed = self.trainer.records["peel"].input or self.problem.data.described()
                attach_record(slimmed, replace(record_of(slimmed), input=fed))
                self.workspace.save_model("slim", slimmed)
            search = self._search()
            result = {
                "format": "peel-result",
                "version": 1,
                "rows": rows,
                "budget": self.problem.budget,
                "resource": self.problem.resource,
                "seed": self.problem.seed,
                "search": search,
                "wall_seconds": sum(row["seconds"] for row in rows) + search["seconds"],
                "notes": self.notes,
            }
            self.workspace.write_json("result.json", result)
        return Result(
            slimmed, document, history, rows, self.notes, self.workspace.folder if self.workspace else None
        )

    def _earlier_result(self) -> dict[str, Any]:
        """What an earlier start has left that did other steps: they are not done again, and not lost."""
        try:
            found = (
                self.workspace.read_json("result.json")
                if self.workspace is not None and self.workspace.has("result.json")
                else {}
            )
        except PeelError as error:
            log.warning("%s What other steps have scored is not taken over.", error)
            found = {}
        return {"rows": found.get("rows", []), "notes": found.get("notes", [])}

    def _settle_teacher(self, teacher: nn.Module) -> None:
        if self.workspace is not None:
            self.workspace.check_teacher(weights_hash(teacher), force=self.force)

    def _forced_notes(self) -> list[str]:
        """What was changed on the way of this run, and of that of its teacher."""
        own = forced_notes(self.workspace.read_json("settings.json")) if self.workspace is not None else []
        elsewhere = self.teacher_folder / "settings.json" if self.teacher_folder is not None else None
        if elsewhere is None or not elsewhere.is_file():
            return own
        try:
            settings = read_object(elsewhere, "--teacher")
            theirs = forced_notes(settings) if settings.get("format") == "peel-run" else []
        except PeelError as error:
            # Not at the end of a run, when all that is left to do is to say so.
            theirs = [str(error)]
        return [*own, *(f"Of the teacher: {note}" for note in theirs)]

    def _checked(self, widths: dict[str, Any]) -> Widths:
        """The widths of a plan that an earlier start has kept."""
        try:
            return self.problem.graph.check(widths)
        except PeelError as error:
            raise CorruptFileError(
                f"plan.json is damaged: {error} Restore it from a copy, or start anew with another --output."
            ) from error

    def _compare_with_uniform(self, widths: Widths) -> None:
        uniform, cost = self.problem.uniform(), self.problem.cost
        moved = max(abs(widths[tie] / uniform[tie] - 1) for tie in uniform)
        if moved < 0.02:
            self.notes.append(
                f"The plan is the uniform network but for rounding: no width differs by more than {moved:.1%}."
            )
        elif self.given is not None and cost(widths) < 0.97 * cost(uniform):
            self.notes.append(
                f"The plan that was given costs {cost(widths):,} {self.problem.resource}, the uniform network beside it {cost(uniform):,}: "
                f"they are not of the same budget. Give --budget {cost(widths)} to compare them."
            )

    # Stages

    def _original(self) -> nn.Module:
        """The trained original: the teacher and the first row of the table."""
        if self.taken is not None:
            return self._taken(self.taken)
        if self.named_teacher == "train":
            return self._trained_original()
        assert isinstance(self.named_teacher, str | Path)
        if not self.world.is_main_process:
            return self._trained_original()
        if self.workspace is not None and (known := self.workspace.teacher_hash()) is not None:
            raise RunError(
                f"there is no teacher at {self.named_teacher}, and the run in {self.workspace.folder} was begun with one: its weights have "
                f"the hash {known}. Name the place where it lies now."
            )
        with RunFolder(self.named_teacher, "--teacher") as shared:
            settings = {
                "format": "peel-run",
                "version": 1,
                "command": "the teacher of another run",
                "given": {},
            }
            shared.open_or_resume(
                {**settings, "resolved": self.teacher_settings}, self.environment, force=self.force
            )
            self.teacher_file = str(Path(self.named_teacher) / "stages" / "original.json")
            self.teacher_folder = Path(self.named_teacher)
            with self.trainer.keeping_in(shared):
                return self._trained_original()

    def _trained_original(self) -> nn.Module:
        seed_everything(derive_seed("init", "original", self.problem.seed))
        fresh = slim(self.problem.model, self.problem.graph.widths, graph=self.problem.graph).requires_grad_(
            True
        )
        objective = CrossEntropy(self.recipe.label_smoothing)
        trained = self.trainer.train("original", fresh, objective, self.recipe, self.problem.data.train)
        return self._row("original", trained, self.problem.graph.widths)

    def _taken(self, teacher: Teacher) -> nn.Module:
        """A teacher that is trained already is only evaluated."""
        self.trainer.reporter.stage("original", "evaluating the teacher")
        self.problem.engine.prepare(teacher.model)
        scored = evaluate(teacher.model, self.problem.data.test, self.problem.engine)
        self.trainer.records["original"] = teacher.record or StageRecord([], 0)
        self._add_row("original", self.problem.graph.widths, scored)
        return teacher.model

    def _plan(self) -> Plan | None:
        """The plan, which all processes have come to alike; what counts is that of the first."""
        plan = self._found_plan()
        self.world.check_equal(
            "the plan", json.dumps(dict(plan.widths) if plan is not None else None, sort_keys=True)
        )
        shared: Plan | None = self.world.broadcast(plan)
        return shared

    def _found_plan(self) -> Plan | None:
        if self.given is not None:
            return self._given_plan(self.given)
        is_there = self.workspace is not None and self.workspace.has("plan.json")
        if self.world.broadcast(is_there):
            document = self.world.broadcast(
                self.workspace.read_json("plan.json") if self.workspace is not None else None
            )
            self._recall_search()
            return Plan(self._checked(document["widths"]), document)
        if "backbone" not in self.steps:
            return None
        plan = make_plan(self.problem, self.method, self.trainer.train)
        if "plan" not in self.steps:
            return None
        if self.workspace is not None:
            self.workspace.write_json("plan.json", plan.document)
        return plan

    def _given_plan(self, widths: Widths) -> Plan:
        graph, uniform = self.problem.graph, self.problem.uniform()
        networks = {"original": graph.widths, "uniform": uniform, "peel": widths}
        described = {name: self.problem.described(chosen) for name, chosen in networks.items()}
        document = {
            "format": "peel-plan",
            "version": 1,
            "resource": self.problem.resource,
            "budget": self.problem.budget,
            "groups": {group: list(ties) for group, ties in graph.groups.items()},
            "rounds": [],
            "original": described["original"],
            "uniform": described["uniform"],
            **described["peel"],
            "macs_by_group": {name: graph.macs_by_group(chosen) for name, chosen in networks.items()},
        }
        if self.workspace is not None:
            self.workspace.write_json("plan.json", document)
        return Plan(widths, document)

    def _recall_search(self) -> None:
        """The records of a search that an earlier start of this run finished."""
        for stage in self._search_stages():
            self.trainer.recall(stage)

    def _search_stages(self) -> list[str]:
        return [stage_of_round(number) for number in range(self.method.rounds)]

    def _search(self) -> dict[str, float]:
        """What the search has cost."""
        records = [
            self.trainer.records[stage] for stage in self._search_stages() if stage in self.trainer.records
        ]
        return {
            "seconds": sum(record.seconds for record in records),
            "image_passes": sum(record.image_passes for record in records),
        }

    def _final(self, name: str, widths: Widths, teacher: nn.Module | None) -> nn.Module:
        """Step 5: a network of these widths, trained from scratch with the recipe that all share."""
        problem, method = self.problem, self.method
        seed_everything(derive_seed("init", name, problem.seed))
        objective: Objective = CrossEntropy(self.recipe.label_smoothing)
        weight = method.kd_weight
        if method.distill == "in-place":
            network: nn.Module = in_place_pair(problem.model, problem.graph, widths)
            objective = InPlace(
                objective, 1.0 if weight is None else weight, method.hard_weight, method.temperature
            )
        else:
            network = slim(problem.model, widths, graph=problem.graph).requires_grad_(True)
            if method.distill == "teacher":
                assert teacher is not None
                problem.engine.prepare(teacher).eval().requires_grad_(False)
                objective = Distillation(
                    objective, teacher, 0.1 if weight is None else weight, method.temperature
                )
        images = (
            self._taught(objective.teacher) if isinstance(objective, Distillation) else problem.data.train
        )
        trained = self.trainer.train(name, network, objective, self.recipe, images)
        if isinstance(images, CachedTeacher) and self.world.is_main_process:
            images.answers.save()
        return self._row(name, trained, widths)

    def _taught(self, teacher: nn.Module) -> Split:
        """The training images, with the teacher's answers where it is worth to remember them: all students share them."""
        problem = self.problem
        images, augment, classes = problem.data.train, self.recipe.augment, len(problem.data.classes)
        if self.answers is None and problem.engine.cache_teacher:
            code = " ".join([*problem.graph.operators, *problem.graph.constants])
            self.answers = make_logit_cache(
                teacher, images, augment, classes, problem.engine, self.teacher_folder, code
            )
        return images if self.answers is None else CachedTeacher(images, self.answers)

    def _row(self, name: str, network: nn.Module, widths: Widths) -> nn.Module:
        last = self.trainer.records[name].history[-1].test
        assert last is not None
        self._add_row(name, widths, Metrics(**last))
        return network

    def _add_row(self, name: str, widths: Widths, scores: Metrics) -> None:
        graph, record = self.problem.graph, self.trainer.records[name]
        self.rows[name] = {
            "name": name,
            **asdict(scores),
            "macs": graph.macs(widths),
            "params": graph.params(widths),
            "seconds": record.seconds,
            "image_passes": record.image_passes,
            "file": "slim.json"
            if name == "peel"
            else self.teacher_file
            if name == "original"
            else f"stages/{name}.json",
        }

    # Time

    def _work(self) -> list[tuple[str, float]]:
        trained = [name for name in self.steps if name != "original" or self.taken is None]
        return work_of(self.problem, self.method, self.recipe, trained, searches=self.searches)

    def estimate(self) -> Result:
        """The plan with neutral importance, and how long it would take."""
        plan = (
            equal_share_plan(self.problem, self.method)
            if self.given is None
            else self._given_plan(self.given)
        )
        each = seconds_per_mac(self.problem, self.recipe)
        return Result(
            None, plan.document, {}, [], [], None, {name: work * each for name, work in self._work()}
        )
