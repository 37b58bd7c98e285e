"""One run: the jobs of a method and of the uniform network, and the table at their end."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

from torch import nn

from ..cost.widths import Widths
from ..errors import ConfigError, CorruptFileError, PeelError, RunError
from ..methods.check import checked
from ..methods.method import Answer, Given, Method, Uniform
from ..methods.plan import Plan, assemble_plan, read_widths
from ..methods.registry import spec_of
from ..methods.rehearsal import rehearse
from ..methods.work import Spent
from ..surgery import slim
from ..surgery.serialization import save
from ..train.state import local_batch_size
from .bench import (
    Bench,
    budget_notes,
    latency_verdicts,
    measure_speed,
    stored_speed,
    with_predicted_latency,
    with_speed,
)
from .config import MACHINE, Config, RecipeOverrides
from .estimate import estimate_work, seconds_per_mac
from .jobs import Arm, Cell, Job, Limits, Original, Solve, Start, Train, cells_of, original_of
from .loaded import Loaded, setup_of
from .original import find_original, given_hash
from .result import Record, Result, Row, kept_note, lost_by_training
from .store import RunFolder, Store, names_of_run, row_of
from .subject import State, check_state, environment_of, write_state
from .worker import evaluate_given, work

log = logging.getLogger("peel")


class Run:
    """The jobs of one run and their results. `config` has the settings as given."""

    def __init__(self, loaded: Loaded, folder: RunFolder | None, config: Config, command: str) -> None:
        self.loaded, self.folder, self.given_config, self.command = loaded, folder, config, command
        self.config = loaded.config
        self.method = loaded.method
        self.widths: Widths | None = None
        if self.config.plan is not None:
            self.widths = read_widths(self.config.plan, loaded.graph, "plan")
            self.method = Given(dict(self.widths))

    # Jobs

    def _load_original(self) -> None:
        """Load the trained original, if it is given and something needs it."""
        config, loaded = self.config, self.loaded
        needs = ""
        if self.method.needs.original and "plan" in config.stages:
            needs = f"the method {config.method}"
        elif config.inherits and (self._trains_networks or "plan" in config.stages):
            needs = f'init="{config.init if config.init != "auto" else "inherit"}"'
        elif self._trains_networks and config.distill == "teacher":
            needs = "distillation"
        if needs or "original" in config.stages:
            loaded.given = None if loaded.new_classifier else find_original(loaded.weights, loaded)
        if needs and loaded.given is None and "original" not in config.stages:
            way_out = ', or set distill="none"' if needs == "distillation" else ""
            way_out += ", or take --method peel" if needs.startswith("the method") else ""
            raise ConfigError(
                f'{needs} needs the trained original: add "original" to the stages, or name its weights '
                f"(--weights){way_out}."
            )

    @property
    def _trains_networks(self) -> bool:
        return bool({"uniform", "final"} & set(self.config.stages))

    @cached_property
    def setup(self) -> Any:
        given = self.loaded.given
        return setup_of(self.loaded, given_hash(given))

    @cached_property
    def cells(self) -> dict[str, Cell]:
        """Row -> its jobs: of the uniform network, and of the method."""
        loaded, config = self.loaded, self.config
        limits = Limits.of(loaded.constraint)
        arms = [self._arm("uniform", "uniform", Uniform())]
        if self.widths is not None:
            # Widths of the user's own may be above the original in other resources, and ties are not frozen.
            own = replace(limits, grow=True, freeze=())
            arm = self._arm("given", "given", self.method)
            return {
                "uniform": cells_of(arms, [limits], [loaded.seed], self.setup)[0],
                "given": cells_of([arm], [own], [loaded.seed], self.setup)[0],
            }
        if config.method != "uniform":
            arms.append(self._arm(config.method_name, config.method, self.method))
        cells = cells_of(arms, [limits], [loaded.seed], self.setup)
        return {cell.arm.label: cell for cell in cells}

    @staticmethod
    def _arm(label: str, reference: str, method: Method) -> Arm:
        return Arm(
            label, spec_of(method, reference), method.needs.original, trains=bool(method.needs.training)
        )

    @property
    def cell(self) -> Cell:
        """Of the method."""
        return self.cells[self.config.method_name]

    @cached_property
    def methods(self) -> dict[str, Method]:
        return {self.cells["uniform"].solve.key: Uniform(), self.cell.solve.key: self.method}

    @cached_property
    def original(self) -> Original:
        return original_of(self.setup, self.loaded.seed)

    @cached_property
    def rows(self) -> list[str]:
        """The slim networks that the stages train: the uniform one, and that of the method."""
        wanted = {"uniform": "uniform", "final": self.config.method_name}
        return list(dict.fromkeys(wanted[stage] for stage in self.config.stages if stage in wanted))

    @property
    def _has_plan(self) -> bool:
        return "plan" in self.config.stages or self.widths is not None

    @cached_property
    def jobs(self) -> list[Job]:
        """What the stages ask for, in order."""
        jobs: list[Job] = []
        if "original" in self.config.stages or self.loaded.given is not None:
            jobs.append(self.original)
        if self._has_plan:
            jobs.append(self.cell.solve)
        cells = [self.cells[row] for row in self.rows]
        jobs += [cell.solve for cell in cells]
        jobs += [cell.start for cell in cells if cell.start is not None]
        jobs += [cell.train for cell in cells]
        return list({job.key: job for job in jobs}.values())

    @cached_property
    def store(self) -> Store:
        loaded = self.loaded
        return Store(
            loaded.model, loaded.graph, loaded.world, names_of_run(self.cell.solve), folder=self.folder
        )

    # Checks before anything is written or trained

    def check(self) -> None:
        config, stages = self.config, self.config.stages
        if not self._has_plan and self.rows:
            raise ConfigError(f"the stages {', '.join(stages)} need a plan: add plan, or set plan=widths.")
        self._load_original()
        if config.inherits and config.distill == "in-place":
            raise ConfigError('in-place distillation trains from scratch: set init="scratch", or distill.')
        if self.method.needs.training == "step" and self.loaded.task.train_fn is not None:
            raise ConfigError(
                f"the method {config.method} has training steps of its own, which train_fn cannot do. Leave "
                "train_fn out, or choose another method."
            )
        self._check_recipes()
        if "uniform" in stages:
            slim(self.loaded.model, self.loaded.constraint.uniform, graph=self.loaded.graph)
        self.previews  # noqa: B018  # methods find their errors now
        settings = {name: job.settings() for name, job in self._named_jobs().items()}
        agreed = {"subject": self.loaded.subject, "jobs": settings}
        self.loaded.world.check_equal("a setting", json.dumps(agreed, sort_keys=True, default=str))

    def _check_recipes(self) -> None:
        loaded, config = self.loaded, self.config
        final, search = loaded.recipes.final, loaded.recipes.search
        trains_original = "original" in config.stages and loaded.given is None
        if final.epochs == 0 and (trains_original or (self.rows and not config.inherits)):
            raise ConfigError("without epochs (0) nothing is trained from scratch: give trained --weights.")
        trains = bool(self.method.needs.training) and self._has_plan
        if trains and search.epochs == 0:
            raise ConfigError("the backbone needs at least one epoch: set --backbone.epochs.")
        recipes = [final] if self.rows or trains_original else []
        for recipe in [*recipes, *([search] if trains else [])]:
            local_batch_size(recipe, loaded.engine)
            recipe.steps_per_epoch(loaded.data.train.size)

    @cached_property
    def previews(self) -> dict[str, tuple[Answer, Spent]]:
        """Key of a `Solve` job -> what a rehearsal of the method answers, and what it asked for."""
        found = {}
        for job in self.jobs:
            if isinstance(job, Solve) and self.store.record(job) is None:
                method, problem = self.methods[job.key], self.loaded.problem(job, self._given_original(job))
                name = row_of(job)
                answer, rehearsal = rehearse(method, problem, self.loaded.engine, name)
                found[job.key] = checked(answer, problem, method, name)[0], rehearsal.spent
        return found

    def _given_original(self, job: Solve) -> nn.Module | None:
        return None if job.original is None or self.loaded.given is None else self.loaded.given.model

    def _named_jobs(self) -> dict[str, Job]:
        named = {self.store.names(job): job for job in self.jobs if not isinstance(job, Start)}
        return {name: job for name, job in named.items() if name}

    # The run

    def estimate(self) -> Result:
        """A preview of the plan, and how long the run would take."""
        plan, pace = self._preview(), seconds_per_mac(self.loaded, self.loaded.recipes.final)
        times = {name: amount * pace for name, amount in self._work()}
        notes = [*self.loaded.notes, *self._method_notes()]
        is_uniform = plan.widths == plan.uniform.widths and not plan.others
        is_explained = any(note.startswith("The plan is") for note in notes)
        if plan.name not in ("uniform", "given") and is_uniform and not is_explained:
            notes.append(f"The widths of {plan.name} are not known yet: those of uniform stand for them.")
        return Result(None, plan, {}, [], list(dict.fromkeys(notes)), None, times)

    def _preview(self) -> Plan:
        """What is known of the plan before training."""
        solve = self.cell.solve
        problem = self.loaded.problem(solve)
        if solve.key not in self.previews:
            return assemble_plan(problem, Answer(problem.constraint.uniform), "uniform", {})
        answer, _ = self.previews[solve.key]
        return assemble_plan(problem, answer, self.config.method_name, solve.method.settings)

    def _method_notes(self) -> list[str]:
        """What is told of the method before training, unless an earlier start has finished the plan."""
        notes = [note for answer, _ in self.previews.values() for note in answer.notes]
        is_solved = self.cell.solve.key in self.previews and not self.method.needs.training
        if is_solved and self.config.backbone != RecipeOverrides():
            notes.append(f"The method {self.config.method} trains no backbone: --backbone has no effect.")
        return notes

    def _work(self) -> list[tuple[str, float]]:
        macs = {}
        for job in self.jobs:
            if isinstance(job, Solve):
                widths = self.previews[job.key][0].widths if job.key in self.previews else None
                widths = self.store.answer(job)[0].widths if widths is None else widths
                macs[job.key] = self.loaded.graph.macs(widths)
        names = {job.key: self.store.names(job) for job in self.jobs}
        spent = {key: preview[1] for key, preview in self.previews.items()}
        record = self.store.record(self.cell.solve)
        if record is not None:
            # Their work counts as done when they are told to be finished.
            amount = float(self.loaded.graph.macs())
            spent[self.cell.solve.key] = Spent(trained=dict.fromkeys(record.trainings, amount))
        return estimate_work(self.jobs, self.loaded, names, spent, macs)

    def run(self) -> Result:
        folder = self.folder
        if folder is None:
            return self._run()
        environment = environment_of(self.loaded.engine)
        jobs = self._named_jobs()
        state = State(
            self.command,
            {**self.loaded.subject, "folder": "of a run"},
            {name: value for name, value in self.config.to_dict().items() if name not in MACHINE},
            {name: json.loads(json.dumps(job.settings())) for name, job in jobs.items()},
            {name: job.key for name, job in jobs.items()},
        )
        check_state(folder, state, environment)
        self._evaluate_given()
        write_state(folder, state, environment, self.given_config)
        folder.path("error.json").unlink(missing_ok=True)
        try:
            return self._run()
        except (Exception, SystemExit) as error:
            message = str(error) if isinstance(error, PeelError) else f"{type(error).__name__}: {error}"
            with contextlib.suppress(RunError):  # the disk may be full
                folder.write_json("error.json", {"format": "peel-error", "version": 2, "error": message})
            raise
        finally:
            _write_report(folder)

    def _evaluate_given(self) -> None:
        """A given original that fails on the data stops the run before anything is written."""
        if self.loaded.given is not None and self.store.record(self.original) is None:
            self.loaded.caches["given"] = evaluate_given(self.original, self.loaded)

    def _run(self) -> Result:
        loaded, store = self.loaded, self.store
        self._evaluate_given()
        if "given" in loaded.caches:
            store.put(self.original, loaded.caches.pop("given"))
        amounts = self._work()
        for callback in loaded.callbacks:
            callback.on_run_begin(amounts)
        loaded.notes += self._method_notes()
        loaded.tell(loaded.notes)
        before = [job for job in self.jobs if not isinstance(job, Train)]
        work(before, loaded, store, self.methods)
        # Also where this start leaves the plan out.
        plan = None if store.record(self.cell.solve) is None else store.answer(self.cell.solve)[1]
        if plan is not None:
            loaded.notes += [*plan.notes, *self._notes_on(plan)]
            loaded.tell(loaded.notes)
        work([job for job in self.jobs if isinstance(job, Train)], loaded, store, self.methods)
        return self._finish(plan)

    def _notes_on(self, plan: Plan) -> list[str]:
        """How the plan compares with the uniform network."""
        if plan.name == "uniform" or any(note.startswith("The plan is") for note in plan.notes):
            return []
        widths, uniform = plan.widths, Widths(plan.uniform.widths)
        constraint = self.loaded.constraint
        notes = []
        difference = max(abs(widths[tie] / uniform[tie] - 1) for tie in uniform)
        if difference == 0:
            notes.append("The plan is the uniform network.")
        elif difference < 0.02:
            notes.append(
                f"The plan is nearly the uniform network: widths differ by at most {difference:.1%}."
            )
        elif self.widths is not None and constraint.cost(widths) < 0.97 * constraint.cost(uniform):
            costs = [constraint.cost(some) for some in (widths, uniform)]
            notes.append(
                f"The given plan costs {costs[0]:,} {constraint.resource}, the uniform network {costs[1]:,}: "
                f"their budgets differ. Set budget={costs[0]} to compare them."
            )
        return [*notes, *self._notes_on_losses(plan.name)]

    def _notes_on_losses(self, name: str) -> list[str]:
        """Where the uniform network has the lower loss after the repair."""
        losses = {}
        for row in ("uniform", name):
            start = self.cells[row].start
            record = None if start is None or row not in self.rows else self.store.record(start)
            if record is not None and record.held_out_loss is not None:
                losses[row] = record.held_out_loss
        if len(losses) < 2 or losses["uniform"] >= losses[name]:
            return []
        images = "" if self.loaded.held_out is None else f" {self.loaded.held_out.size:,}"
        return [
            f"Uniform widths may be better: after the repair its loss on{images} held-out training images is "
            f"{losses['uniform']:.3g}, that of the widths by {name} {losses[name]:.3g}."
        ]

    # The end

    def _finish(self, plan: Plan | None) -> Result:
        loaded, store = self.loaded, self.store
        notes = loaded.notes
        networks = {"original": loaded.graph.widths, "uniform": loaded.constraint.uniform}
        if plan is not None:
            networks[plan.name] = plan.widths
            notes += budget_notes(loaded, plan.widths)
        records = self._records()
        rows = [self._row(name, networks[name], records[name]) for name in networks if name in records]
        notes += lost_by_training(rows, loaded.data.test.size)
        notes += [
            kept_note(name, records[name])
            for name in networks
            if name in records and records[name].held_out_losses
        ]
        bench: Bench | None = None
        if loaded.world.is_main_process:
            rows = with_predicted_latency(rows, networks, loaded.graph)
            bench = self._bench({row.name: networks[row.name] for row in rows})
            rows = with_speed(rows, bench, loaded)
            notes += latency_verdicts(rows, loaded, bench)
        notes += [note for record in records.values() for note in record.notes]
        loaded.notes = list(dict.fromkeys(notes))
        loaded.tell(loaded.notes)
        slimmed = None
        if plan is not None and store.record(self.cell.train) is not None and plan.name in self.rows:
            slimmed = store.network(self.cell.train, plan.widths)
        seconds = sum(records[name].seconds for name in self._search_stages(records))
        if self.folder is not None:
            self._write_result(self.folder, rows, slimmed, bench, records)
        history = {name: record.history for name, record in records.items() if record.history}
        place = self.folder.folder if self.folder is not None else None
        return Result(slimmed, plan, history, rows, loaded.notes, place, bench=bench, search_seconds=seconds)

    def _records(self) -> dict[str, Record]:
        """Stage -> record, of all that is done: also of stages that this start leaves out."""
        found: dict[str, Record] = {}
        jobs: dict[str, Job] = {"original": self.original, "plan": self.cell.solve}
        jobs |= {row: cell.train for row, cell in self.cells.items()}
        for name, job in jobs.items():
            is_shown = name != "original" or "original" in self.config.stages or self.loaded.given is None
            record = self.store.record(job) if is_shown else None
            if record is None:
                continue
            for training in record.trainings:
                if (own := self.store.find(training, f"{job.key}-{training}")) is not None:
                    found[training] = own
            found[name] = record
        return found

    @staticmethod
    def _search_stages(records: Mapping[str, Record]) -> list[str]:
        if "plan" not in records:
            return []
        return [*records["plan"].trainings, "plan"]

    def _row(self, name: str, widths: Mapping[str, int], record: Record) -> Row:
        graph, given = self.loaded.graph, self.loaded.given
        files = {self.config.method_name: "slim.safetensors"}
        if given is not None:
            files["original"] = given.file
        last = (record.history[-1].test if record.history else None) or {}
        return Row(
            name,
            **(record.kept_metrics or record.metrics or last),
            fine_tuned=last.get("metric", last.get("top1")) if record.kept_metrics else None,
            macs=graph.macs(widths),
            params=graph.params(widths),
            memory=graph.activation_bytes(widths),
            seconds=record.seconds,
            image_passes=record.image_passes,
            file=files.get(name, f"stages/{name}.safetensors"),
            before_training=record.before_training,
        )

    def _bench(self, networks: Mapping[str, Widths]) -> Bench | None:
        """Time the networks of the table against the original, unless an earlier start has done so."""
        loaded, seconds = self.loaded, self.config.bench_seconds
        slims = {name: widths for name, widths in networks.items() if name != "original"}
        macs = {"original": loaded.graph.macs()} | {n: loaded.graph.macs(w) for n, w in slims.items()}
        stored = stored_speed(self.folder, macs)
        if stored is not None or not slims or not seconds:
            return stored
        loaded.begin_stage("bench", "timing the networks")
        models = {"original": loaded.model}
        for name, widths in slims.items():
            models[name] = slim(loaded.model, widths, graph=loaded.graph)
        return measure_speed(loaded, models, macs, seconds)

    def _write_result(
        self,
        folder: RunFolder,
        rows: list[Row],
        slimmed: nn.Module | None,
        bench: Bench | None,
        records: Mapping[str, Record],
    ) -> None:
        if slimmed is not None:
            save(slimmed, folder.path("slim"))
        constraint, search = self.loaded.constraint, self._search_stages(records)
        seconds = sum(records[name].seconds for name in search)
        result = {
            "format": "peel-result",
            "version": 2,
            "rows": [asdict(row) for row in rows],
            "budget": constraint.budget,
            "resource": constraint.resource,
            **({"limits": constraint.other_limits} if constraint.other_limits else {}),
            "seed": self.loaded.seed,
            "metric": self.loaded.task.metric_name,
            "search": {
                "seconds": seconds,
                "image_passes": sum(records[name].image_passes for name in search),
            },
            "wall_seconds": sum(row.seconds for row in rows) + seconds,
            "notes": self.loaded.notes,
            "bench": bench,
        }
        folder.write_json("result.json", result)


def _write_report(folder: RunFolder) -> None:
    """The page of the run so far. A failure here never fails the run."""
    from ..report import RunRecord, render

    ended_by = sys.exception()
    try:
        page = render(RunRecord.read(folder.folder))
        folder.write_bytes("report.html", page.encode(errors="backslashreplace"))
    except Exception as error:
        if not isinstance(ended_by, CorruptFileError):  # else the run's own error has named the file
            reason = error if isinstance(error, PeelError) else repr(error)
            log.warning("report.html was not written: %s", reason)
