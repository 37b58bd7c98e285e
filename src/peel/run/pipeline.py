"""The stages of a run in order, and the table at their end."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..cost.widths import Widths
from ..data.datasets import Split, held_out_size
from ..errors import BudgetError, ConfigError
from ..methods.method import Method
from ..methods.peel import HELD_OUT, Peel, stage_of_round
from ..methods.plan import Plan, assemble_plan
from ..methods.problem import Problem
from ..methods.start import Start, Starter
from ..steps.criteria import find_criterion
from ..steps.distillation import Distillation, InPlace, in_place_pair
from ..surgery import slim
from ..train.distributed import World
from ..train.history import Metrics
from ..train.objective import Objective
from ..train.recipe import Recipe
from ..train.state import local_batch_size
from ..train.teacher_cache import CachedTeacher, LogitCache, make_logit_cache
from ..utils.rng import derive_seed, seed_everything
from .config import Config, RecipeOverrides
from .estimate import estimate_work, seconds_per_mac
from .folder import RunFolder
from .latency import budget_notes, with_latency
from .result import Result, Row, StageRecord, kept_note, lost_by_training
from .resume import RunState, refuse_changes
from .speed import Bench, measure_speed, stored_speed, with_speed
from .teacher import Teacher, chance_notes, check_accuracy, find_teacher, untrained_notes, weights_hash
from .trainer import Trainer


@dataclass
class Pipeline:
    """The stages of one run."""

    problem: Problem
    config: Config
    recipe: Recipe
    trainer: Trainer
    identity: dict[str, Any]
    weights: nn.Module | Mapping[str, Tensor] | str = "train"
    new_classifier: bool = False
    """The model has pretrained weights but for its classifier: the original is trained from them."""
    given_widths: Widths | None = None
    """A plan of the user's own."""
    method: Method = field(default_factory=Peel)

    folder: RunFolder | None = None
    state: RunState | None = None
    loaded_teacher: Teacher | None = None
    teacher_metrics: Metrics | None = None
    teacher_file: str = "stages/original.safetensors"
    logit_cache: LogitCache | None = None
    starts: dict[str, Start] = field(default_factory=dict)
    """The networks that are ready to be trained, where weights are inherited."""
    trained: dict[str, nn.Module] = field(default_factory=dict)
    """The networks that this start trained or loaded."""
    rows: dict[str, Row] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    told: set[str] = field(default_factory=set)
    """The notes that were shown."""

    @property
    def world(self) -> World:
        return self.problem.engine.world

    @property
    def is_searched(self) -> bool:
        """Whether the method makes the plan."""
        stages, needs_backbone = self.config.stages, self.method.trains_backbone(self.config)
        return self.given_widths is None and ("backbone" if needs_backbone else "plan") in stages

    @property
    def trains_original(self) -> bool:
        return "original" in self.config.stages and self.loaded_teacher is None

    @property
    def trains_backbone(self) -> bool:
        return self.is_searched and self.method.trains_backbone(self.config)

    @property
    def networks(self) -> list[str]:
        """The slim networks that the stages train: the uniform one, and that of the method."""
        wanted = {"uniform": "uniform", "final": self.config.method_name}
        return list(dict.fromkeys(wanted[stage] for stage in self.config.stages if stage in wanted))

    def check(self) -> None:
        """Refuse what cannot work, before anything is written or trained."""
        problem, config, stages = self.problem, self.config, self.config.stages
        needed = ("backbone", "plan") if self.method.trains_backbone(config) else ("plan",)
        missing = [stage for stage in needed if stage not in stages]
        if self.given_widths is None and missing and (self.networks or "plan" in stages):
            needs = f"the stages {', '.join(stages)} need a plan"
            raise ConfigError(f"{needs}: add {' and '.join(missing)}, or set plan=widths.")
        if config.inherits and config.distill == "in-place":
            raise ConfigError('in-place distillation trains from scratch: set init="scratch", or distill.')
        self._load_teacher()
        self._check_epochs()
        self._check_given_plan()
        self._check_batch_sizes()
        uniform = problem.constraint.uniform
        self._check_networks(uniform if "uniform" in stages else None, self.given_widths)
        if self.is_searched:
            self.method.check(self.problem, config)

    def _check_epochs(self) -> None:
        """Networks that are cut from trained weights need no training; others do."""
        if self.recipe.epochs == 0 and (self.trains_original or (self.networks and not self.config.inherits)):
            raise ConfigError("without epochs (0) nothing is trained from scratch: give trained --weights.")
        if self.trains_backbone and self.problem.backbone_recipe.epochs == 0:
            raise ConfigError("the backbone needs at least one epoch: set --backbone.epochs.")

    def _check_given_plan(self) -> None:
        problem, widths = self.problem, self.given_widths
        if widths is None:
            return
        constraint = problem.constraint
        if excess := replace(constraint, grow=True).excess(widths):
            way_out = (
                f"Set budget={constraint.cost(widths)}"
                if constraint.cost(widths) > constraint.budget
                else "Raise it"
            )
            raise BudgetError(f"the given plan {excess}. {way_out}.")

    def _load_teacher(self) -> None:
        """Load the trained original, if it is given and something needs it."""
        config, stages = self.config, self.config.stages
        needs = ""
        if self.given_widths is None and self.method.needs_trained and "plan" in stages:
            needs = f"the method {config.method}"
        elif config.inherits and (self.networks or "backbone" in stages):
            needs = 'init="inherit"'
        elif self.networks and config.distill == "teacher":
            needs = "distillation"
        if needs or "original" in stages:
            self.loaded_teacher = None if self.new_classifier else find_teacher(self.weights, self.problem)
        if self.loaded_teacher is not None:
            self.teacher_file = self.loaded_teacher.file
            self.problem = replace(self.problem, trained=self.loaded_teacher.model)
        elif needs and "original" not in stages:
            way_out = ', or set distill="none"' if needs == "distillation" else ""
            way_out += ", or take --method peel" if needs.startswith("the method") else ""
            raise ConfigError(
                f'{needs} needs the trained original: add "original" to the stages, or name its weights '
                f"(--weights){way_out}."
            )

    def _check_networks(self, *several: Widths | None) -> None:
        """Build networks of these widths: `slim` refuses one whose code does not do what was predicted."""
        for widths in filter(None, several):
            slim(self.problem.model, widths, graph=self.problem.graph)

    def _check_batch_sizes(self) -> None:
        problem, size = self.problem, self.problem.data.train.size
        own = self.method.criterion if isinstance(self.method, Peel) else None
        criterion = find_criterion(self.config.criterion if own is None else own)
        needs_held_out = getattr(criterion, "needs_held_out", False)
        left = size - held_out_size(size, HELD_OUT) if needs_held_out else size
        trainings = [(self.recipe, size)] if self.networks else []
        if self.trains_original:
            trainings.append((self.recipe, self._original_images().size))
        if self.trains_backbone:
            trainings.append((problem.backbone_recipe, left))
        for recipe, images in trainings:
            local_batch_size(recipe, problem.engine)
            recipe.steps_per_epoch(images)

    def evaluate_teacher(self) -> None:
        """Evaluate a loaded teacher before anything is written or trained: one that fails stops the run."""
        if self.loaded_teacher is None:
            return
        self.trainer.begin_stage("original", prefix="evaluating ")
        self.teacher_metrics = self.problem.evaluate(self.problem.engine.prepare(self.loaded_teacher.model))
        is_chosen = self.config.mean is not None or self.config.std is not None
        if self.teacher_metrics.top1 is None:
            return
        if self.problem.data.is_own:
            self.notes += chance_notes(self.loaded_teacher, self.teacher_metrics.top1, self.problem)
        else:
            check_accuracy(self.loaded_teacher, self.teacher_metrics.top1, self.problem, is_chosen)

    def run(self) -> Result:
        work = self._work(self._expected_plan())
        for callback in self.trainer.callbacks:
            callback.on_run_begin(work)
        if self.trains_backbone and self.problem.task.train_fn is not None:
            self.notes.append("train_fn trains the backbone without an L1 term on the scales of norm layers.")
        stages, trains_backbone = self.config.stages, self.method.trains_backbone(self.config)
        if "backbone" in stages and "plan" not in stages and not trains_backbone:
            self.notes.append(f"The method {self.config.method} trains no backbone.")
        self.notes += [*self._notes_on_original(), *self._notes_on_method()]
        self._tell(self.notes)
        self.problem = replace(self.problem, trained=self._original())
        plan = self._plan()
        slimmed = None
        if plan is not None:
            self._check_networks(plan.widths)
            told = (item.note for item in plan.rounds if item.note and not item.distinct)
            self.notes += dict.fromkeys(told)
            self.notes += [item.rounding_note for item in plan.rounds[-1:] if item.rounding_note]
            self._compare_with_uniform(plan)
            self._tell(self.notes)
            widths = dict.fromkeys(self.networks, self.problem.constraint.uniform)
            widths |= {plan.name: plan.widths} if plan.name in widths else {}
            self._make_remaining_starts(widths, plan)
            for name in widths:
                network = self._train_final(name, widths[name], plan)
                slimmed = network if name == plan.name else slimmed
        return self._finish(plan, slimmed)

    def estimate(self) -> Result:
        """A preview of the plan, and how long the run would take."""
        plan, pace = self._expected_plan(), seconds_per_mac(self.problem, self.recipe)
        times = {name: work * pace for name, work in self._work(plan)}
        notes = [*self.notes, *self._notes_on_original(), *self._notes_on_method()]
        if plan.name not in ("uniform", "given") and not plan.rounds and plan.widths == plan.uniform.widths:
            notes.append(f"The widths of {plan.name} are not known yet: those of uniform stand for them.")
        return Result(None, plan, {}, [], notes, None, times)

    def _notes_on_original(self) -> list[str]:
        """What to know of an original that the run trains."""
        left_out = self.problem.data.train.size - self._original_images().size if self.trains_original else 0
        if not left_out or self.problem.task.train_fn is not None:
            return []
        judges = f"the {left_out} training images that the method {self.config.method} judges networks by"
        return [f"The original is trained without {judges}."]

    def _notes_on_method(self) -> list[str]:
        """What is told of the method before training, unless an earlier start has finished the plan."""
        is_planned = self.folder is not None and self.folder.has("plan.json")
        if not self.is_searched or is_planned:
            return []
        notes = self.method.notes(self.problem)
        if self.config.backbone != RecipeOverrides() and not self.trains_backbone:
            notes.append(f"The method {self.config.method} trains no backbone: --backbone has no effect.")
        return notes

    def _expected_plan(self) -> Plan:
        """What is known of the plan before training."""
        if self.given_widths is not None:
            return self._given_plan(self.given_widths)
        if self.is_searched:
            return self.method.preview(self.problem, self.config)
        return assemble_plan(self.problem, self.problem.constraint.uniform)

    def _given_plan(self, widths: Widths) -> Plan:
        return replace(assemble_plan(self.problem, widths), name=self.config.method_name)

    def _work(self, plan: Plan) -> list[tuple[str, float]]:
        trained = list(self.networks)
        if self.trains_original:
            trained.append("original")
        if self.trains_backbone:
            trained.append("backbone")
        search = self.method.search_macs(self.problem) if self.is_searched else 0.0
        return estimate_work(self.problem, self.config, self.recipe, plan, trained, search)

    # The original

    def _original(self) -> nn.Module | None:
        """The trained original, which is the teacher, and its row of the table."""
        original: nn.Module | None = None
        if self.loaded_teacher is not None:
            original = self.loaded_teacher.model
            self._check_teacher(original)
            if "original" in self.config.stages:
                self.trainer.records["original"] = self.loaded_teacher.record or StageRecord([], 0)
                self._add_row("original", self.problem.graph.widths, self.teacher_metrics)
        elif "original" in self.config.stages:
            original = self._train_original()
            self._check_teacher(original)
            self._tell(self._notes_on_accuracy())
        return original

    def _train_original(self) -> nn.Module:
        seed_everything(derive_seed("init", "original", self.problem.seed))
        graph = self.problem.graph
        network = slim(
            self.problem.model,
            graph.widths,
            graph=graph,
            weights="inherit" if self.new_classifier else "fresh",
        ).requires_grad_(True)
        objective = self.problem.task.objective(self.recipe.label_smoothing)
        return self._train("original", Start(network), objective, graph.widths, self._original_images())

    def _original_images(self) -> Split:
        """The images that the original is trained with."""
        is_planned = self.given_widths is None
        return self.method.original_images(self.problem) if is_planned else self.problem.data.train

    def _notes_on_accuracy(self) -> list[str]:
        """Where an original that the run has trained is no better than a guess."""
        row = self.rows.get("original")
        if row is None or self.loaded_teacher is not None:
            return []
        return untrained_notes(row.top1, self.problem)

    def _check_teacher(self, teacher: nn.Module) -> None:
        """Refuse a teacher whose weights changed since the last start."""
        if self.folder is None or self.state is None:
            return
        now = weights_hash(teacher)
        before = self.state.teacher_hash or now
        if before != now:
            refuse_changes(self.folder, {"hash of the teacher's weights": (before, now)})
        self.state.teacher_hash = now
        self.folder.write_json("state.json", asdict(self.state))

    # The plan

    def _plan(self) -> Plan | None:
        """All processes must arrive at the same plan; that of the main process counts."""
        plan = self._make_plan()
        self.world.check_equal("the plan", json.dumps(dict(plan.widths) if plan is not None else None))
        return self.world.broadcast(plan)

    def _make_plan(self) -> Plan | None:
        if self.given_widths is not None:
            plan = self._given_plan(self.given_widths)
        elif self.world.broadcast(self.folder is not None and self.folder.has("plan.json")):
            return self.world.broadcast(self._stored_plan())
        elif not self.is_searched:
            return None
        else:
            began = time.perf_counter()
            plan = self._compared(self.method.plan(self.problem, self.config, self.trainer.train))
            if passes := self.method.search_macs(self.problem) / self.problem.graph.macs():
                self.trainer.record_plan(time.perf_counter() - began, round(passes))
            if "plan" not in self.config.stages:
                return None
        if self.folder is not None:
            self.folder.write_bytes("plan.json", plan.to_json())
        return plan

    def _compared(self, plan: Plan) -> Plan:
        """The plan with the losses of its network and of uniform after the repair, where both are made.

        A method that yields to uniform takes the better one.
        """
        problem, yields = self.problem, self.method.yields_to_uniform
        widths = {"uniform": Widths(plan.uniform.widths), plan.name: plan.widths}
        is_needed = yields or len(self.networks) == 2
        if problem.held_out is None or plan.widths == plan.uniform.widths or not is_needed:
            return plan
        self._make_starts(widths, plan)
        losses = {name: self.starts[name].loss for name in widths}
        plan = replace(plan, repaired_losses={n: loss for n, loss in losses.items() if loss is not None})
        if yields and plan.repaired_losses["uniform"] < plan.repaired_losses[plan.name]:
            del self.starts[plan.name]
            plan = replace(plan, slim=plan.uniform, yields_to_uniform=True)
        return plan

    def _stored_plan(self) -> Plan | None:
        if self.folder is None:
            return None

        def parse(data: bytes) -> Plan:
            plan = Plan.from_json(data)
            self.problem.graph.check(plan.widths)
            return plan

        plan = self.folder.read("plan.json", parse)
        for stage in self._search_stages():
            self.trainer.load_record(stage)
        return plan

    def _search_stages(self) -> list[str]:
        return [*(stage_of_round(number) for number in range(self.config.rounds)), "plan"]

    def _search_cost(self) -> dict[str, float]:
        """What the plan took."""
        finished = self.trainer.records
        records = [finished[stage] for stage in self._search_stages() if stage in finished]
        return {
            "seconds": sum(record.seconds for record in records),
            "image_passes": sum(record.image_passes for record in records),
        }

    def _compare_with_uniform(self, plan: Plan) -> None:
        if self.config.method == "uniform":
            return
        widths, uniform = plan.widths, Widths(plan.uniform.widths)
        cost, resource = self.problem.constraint.cost, self.problem.constraint.resource
        difference = max(abs(widths[tie] / uniform[tie] - 1) for tie in uniform)
        if plan.yields_to_uniform:
            self.notes.append(f"The plan is the uniform network: {_compare_losses(plan, self.problem)}")
        elif difference == 0:
            self.notes.append(f"The plan is the uniform network.{_why_uniform(plan)}")
        elif difference < 0.02:
            self.notes.append(
                f"The plan is nearly the uniform network: widths differ by at most {difference:.1%}."
            )
        elif self.given_widths is not None and cost(widths) < 0.97 * cost(uniform):
            self.notes.append(
                f"The given plan costs {cost(widths):,} {resource}, the uniform network {cost(uniform):,}: "
                f"their budgets differ. Set budget={cost(widths)} to compare them."
            )
        losses = plan.repaired_losses
        if not plan.yields_to_uniform and losses and losses["uniform"] < losses[plan.name]:
            self.notes.append(f"Uniform widths may be better: {_compare_losses(plan, self.problem)}")

    # Final trainings

    def _train_final(self, name: str, widths: Widths, plan: Plan) -> nn.Module:
        """Step 5: a network of these widths, trained with the recipe that all share."""
        problem, config = self.problem, self.config
        if self._is_trained_uniform(name, plan):
            self.trained[name] = self.trainer.share_stage("uniform", name, self.trained["uniform"])
            self._add_row(name, widths)
            return self.trained[name]
        seed_everything(derive_seed("init", "final", problem.seed))  # paired: the same for all
        objective: Objective = problem.task.objective(self.recipe.label_smoothing)
        logits = problem.task.is_classification
        if config.distill == "in-place":
            pair = in_place_pair(problem.model, problem.graph, widths)
            objective = InPlace(objective, **self._terms(), logits=logits)
            return self._train(name, Start(pair), objective, widths)
        start = self._start(name, widths)
        if config.distill == "none" or self.recipe.epochs == 0:
            return self._train(name, start, objective, widths)
        teacher = problem.trained
        assert teacher is not None
        problem.engine.prepare(teacher).eval().requires_grad_(False)
        objective = Distillation(objective, teacher, **self._terms(), logits=logits)
        return self._train(name, start, objective, widths, self._with_teacher_logits(teacher))

    def _is_trained_uniform(self, name: str, plan: Plan) -> bool:
        """Whether a second training would only repeat that of the uniform network."""
        if name != plan.name or name == "uniform" or "uniform" not in self.trained:
            return False
        return _repeats_uniform(plan, self.problem) and not self.trainer.is_finished(name)

    def _terms(self) -> dict[str, float]:
        """What the loss consists of, as `resolve_distillation` has set it."""
        config = self.config
        assert config.kd_weight is not None
        assert config.temperature is not None
        assert config.hard_weight is not None
        weight, temperature, hard_weight = config.kd_weight, config.temperature, config.hard_weight
        return {"weight": weight, "temperature": temperature, "hard_weight": hard_weight}

    def _start(self, name: str, widths: Widths) -> Start:
        problem = self.problem
        if not problem.inherits or self.trainer.is_finished(name):
            return Start(slim(problem.model, widths, graph=problem.graph).requires_grad_(True))
        return self.starts.pop(name)

    def _make_remaining_starts(self, networks: Mapping[str, Widths], plan: Plan) -> None:
        if not self.problem.inherits:
            return
        wanted = {n: widths for n, widths in networks.items() if not self.trainer.is_finished(n)}
        if plan.yields_to_uniform and plan.name in wanted:
            if "uniform" in networks:
                del wanted[plan.name]
            elif "uniform" in self.starts:
                self.starts[plan.name] = self.starts.pop("uniform")
        if wanted.keys() - self.starts:
            self._make_starts(wanted, plan)

    def _make_starts(self, networks: Mapping[str, Widths], plan: Plan) -> None:
        """Cut and repair networks, before any is trained: the original then runs once for all of them."""
        problem = self.problem
        assert problem.trained is not None
        problem.engine.prepare(problem.trained)
        starter = Starter(problem)
        for name, widths in networks.items():
            if name in self.starts:
                continue
            seed_everything(derive_seed("init", "final", problem.seed))
            is_uniform = name == "uniform" or plan.yields_to_uniform
            chosen = self.world.broadcast(None if is_uniform else self.method.scores(problem))
            scores: dict[str, float] = {}
            network = starter.network(widths, chosen, partial(self._watch, name, scores))
            self.starts[name] = Start(network, scores, problem.held_out_loss(network))

    def _watch(self, name: str, scores: dict[str, float], step: str, network: nn.Module) -> None:
        """Evaluate a network after a step of surgery, where it is a row of the table."""
        if name not in self.networks:
            return
        # Its own name: the training of this network comes later.
        self.trainer.begin_stage(f"{name}-start", prefix="evaluating ", suffix=f", {step}")
        score = self.problem.evaluate(network).score
        if score is not None:
            scores[step] = score

    def _train(
        self, name: str, start: Start, objective: Objective, widths: Widths, images: Split | None = None
    ) -> nn.Module:
        images = self.problem.data.train if images is None else images
        trained = self.trainer.train(name, start.network, objective, self.recipe, images, start=start)
        self.trained[name] = trained
        self._add_row(name, widths)
        return trained

    def _with_teacher_logits(self, teacher: nn.Module) -> Split:
        """The training images, with cached logits of the teacher where a cache is worth it."""
        problem, images = self.problem, self.problem.data.train
        if self.logit_cache is None and problem.engine.cache_teacher and not problem.data.is_own:
            classes = len(problem.data.classes)
            self.logit_cache = make_logit_cache(teacher, images, self.recipe.augment, classes, problem.engine)
        return images if self.logit_cache is None else CachedTeacher(images, self.logit_cache)

    def _add_row(self, name: str, widths: Widths, metrics: Metrics | None = None) -> None:
        """`metrics` are by default those of the last epoch."""
        graph, record = self.problem.graph, self.trainer.records[name]
        files = {self.config.method_name: "slim.safetensors", "original": self.teacher_file}
        last = (record.history[-1].test if record.history else None) or {}
        known = record.kept_metrics or last if metrics is None else metrics.to_dict()
        self.rows[name] = Row(
            name,
            **known,
            fine_tuned=last.get("metric", last.get("top1")) if record.kept_metrics else None,
            macs=graph.macs(widths),
            params=graph.params(widths),
            memory=graph.activation_bytes(widths),
            seconds=record.seconds,
            image_passes=record.image_passes,
            file=files.get(name, f"stages/{name}.safetensors"),
            before_training=record.before_training,
        )

    # The end

    def _finish(self, plan: Plan | None, slimmed: nn.Module | None) -> Result:
        networks = {"original": self.problem.graph.widths, "uniform": self.problem.constraint.uniform}
        if plan is not None:
            networks[plan.name] = plan.widths
            self.notes += budget_notes(self.problem, plan.widths)
        for name, widths in networks.items():
            if name not in self.rows and self.folder is not None and self.folder.stage_record(name):
                # A stage that an earlier start finished, and that this one leaves out.
                self.trainer.load_record(name)
                self._add_row(name, widths)
        order = dict.fromkeys(("original", "uniform", self.config.method_name))
        rows = [self.rows[name] for name in order if name in self.rows]
        self.notes += [*self._notes_on_accuracy(), *lost_by_training(rows, self.problem.data.test.size)]
        records = {row.name: self.trainer.records[row.name] for row in rows}
        self.notes += [kept_note(name, record) for name, record in records.items() if record.held_out_losses]
        bench: Bench | None = None
        if self.world.is_main_process:
            rows, missed = with_latency(self.problem, rows, networks)
            self.notes += missed
            bench = self._bench({row.name: networks[row.name] for row in rows})
            rows = with_speed(rows, bench)
        found = [note for record in self.trainer.records.values() for note in record.notes]
        self.notes = list(dict.fromkeys([*self.notes, *found]))
        self._tell(self.notes)
        if self.folder is not None:
            self._write_result(self.folder, rows, slimmed, bench)
        seconds = self._search_cost()["seconds"]
        history = {stage: record.history for stage, record in self.trainer.records.items()}
        place = self.folder.folder if self.folder is not None else None
        return Result(slimmed, plan, history, rows, self.notes, place, bench=bench, search_seconds=seconds)

    def _bench(self, networks: Mapping[str, Widths]) -> Bench | None:
        """Time the networks of the table against the original, unless an earlier start has done so."""
        problem, seconds = self.problem, self.config.bench_seconds
        slims = {name: widths for name, widths in networks.items() if name != "original"}
        macs = {"original": problem.graph.macs()} | {n: problem.graph.macs(w) for n, w in slims.items()}
        stored = stored_speed(self.folder, macs)
        if stored is not None or not slims or not seconds:
            return stored
        self.trainer.begin_stage("bench", prefix="timing ")
        models = {"original": problem.model if problem.trained is None else problem.trained}
        for name, widths in slims.items():
            is_here = name in self.trained
            models[name] = self.trained[name] if is_here else slim(problem.model, widths, graph=problem.graph)
        return measure_speed(problem, models, macs, seconds, self.config.threads)

    def _tell(self, notes: list[str]) -> None:
        """Show each note once: at the start, before the final trainings, or at the end."""
        for note in notes:
            for callback in () if note in self.told else self.trainer.callbacks:
                callback.on_note(note)
            self.told.add(note)

    def _write_result(
        self, folder: RunFolder, rows: list[Row], slimmed: nn.Module | None, bench: Bench | None
    ) -> None:
        if slimmed is not None:
            folder.save_model("slim", slimmed)
        search, constraint = self._search_cost(), self.problem.constraint
        result = {
            "format": "peel-result",
            "version": 2,
            "rows": [asdict(row) for row in rows],
            "budget": constraint.budget,
            "resource": constraint.resource,
            **({"limits": constraint.other_limits} if constraint.other_limits else {}),
            "seed": self.problem.seed,
            "metric": self.problem.task.metric_name,
            "search": search,
            "wall_seconds": sum(row.seconds for row in rows) + search["seconds"],
            "notes": self.notes,
            "bench": bench,
        }
        folder.write_json("result.json", result)


def _repeats_uniform(plan: Plan, problem: Problem) -> bool:
    """Where weights are inherited, a method may keep other channels at the same widths."""
    return plan.yields_to_uniform or (plan.widths == problem.constraint.uniform and not problem.inherits)


def _compare_losses(plan: Plan, problem: Problem) -> str:
    """The losses after the repair of uniform and of the method's network."""
    uniform, own = plan.repaired_losses["uniform"], plan.repaired_losses[plan.name]
    images = "" if problem.held_out is None else f" {problem.held_out.size:,}"
    return (
        f"after the repair its loss on{images} held-out training images is {uniform:.3g}, that of the widths "
        f"by {plan.name} {own:.3g}."
    )


def _why_uniform(plan: Plan) -> str:
    """Why a reallocation ends in the uniform network, after a blank; empty where the method gave a reason."""
    last = plan.rounds[-1] if plan.rounds else None
    if last is not None and len(plan.groups) == 1:
        return " All layers are in one group, so it gets the whole pool."
    if last is None or not last.distinct:
        return ""
    moved = max(abs(last.ideal_widths[tie] / plan.uniform.widths[tie] - 1) for tie in last.ideal_widths)
    return (
        f" Before rounding, its widths differ from the uniform ones by at most {moved:.1%}: "
        "divisor=1 keeps that."
    )
