"""Does the jobs that are missing in a store, in their order."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ..cost.widths import Widths
from ..data.datasets import Split
from ..methods.calibration import Calibration
from ..methods.check import checked, named_errors
from ..methods.method import Answer, Method
from ..methods.plan import assemble_plan
from ..methods.work import Goal, Work
from ..steps.distillation import Distillation, InPlace, in_place_pair
from ..surgery import info_of, slim
from ..train.callbacks import Callback
from ..train.history import EpochRecord
from ..train.objective import Objective
from ..train.recipe import Recipe
from ..train.teacher_cache import CachedTeacher, LogitCache, make_logit_cache
from ..utils.rng import derive_seed, seed_everything
from .jobs import Job, Original, Solve, Start, Train
from .loaded import Loaded
from .original import chance_notes, check_accuracy, untrained_notes
from .result import Record
from .store import MethodFiles, Store, row_of
from .training import Training, finished, train_network

DESCRIPTIONS = {
    "original": "the original",
    "backbone": "the over-pruned backbone",
    "uniform": "the uniform network of the same budget",
}


def work(
    jobs: Sequence[Job],
    loaded: Loaded,
    store: Store,
    methods: Mapping[str, Method],
    trainings: Sequence[Train] | None = None,
) -> None:
    """Do the jobs that have no record yet, in their order.

    Args:
        methods: the key of a `Solve` job -> the method.
        trainings: jobs whose network may be shared; by default those of `jobs`.
    """
    others = [job for job in jobs if isinstance(job, Train)] if trainings is None else trainings
    for job in jobs:
        if store.record(job) is not None:
            _tell_finished(job, loaded, store)
        elif isinstance(job, Original):
            _original(job, loaded, store)
        elif isinstance(job, Solve):
            _solve(job, loaded, store, methods[job.key])
        elif isinstance(job, Start):
            _start(job, loaded, store)
        elif isinstance(job, Train):
            _train(job, others, loaded, store)


def _tell_finished(job: Job, loaded: Loaded, store: Store) -> None:
    record, name = store.record(job), store.names(job)
    assert record is not None
    if isinstance(job, Solve):
        for training in record.trainings:
            loaded.begin_stage(training, f"{describe(training)}: already finished")
            store.clear(training, f"{job.key}-{training}")
    elif record.history or isinstance(job, Train):
        loaded.begin_stage(name, f"{describe(name)}: already finished")
        if isinstance(job, Train):
            store.network(job, store.answer(job.solve)[0].widths)  # a corrupt file is noticed now
        store.clear(name, job.key)


def describe(name: str) -> str:
    return DESCRIPTIONS.get(name.split("-")[0], "the slim network")


# The original


def original_of(job: Original, loaded: Loaded, store: Store) -> nn.Module:
    """The trained original of a finished job."""
    if loaded.given is not None:
        return loaded.given.model
    return store.network(job, loaded.graph.widths)


def _original(job: Original, loaded: Loaded, store: Store) -> None:
    if loaded.given is not None:
        store.put(job, evaluate_given(job, loaded))
        return
    seed_everything(derive_seed("init", "original", job.seed or 0))
    graph = loaded.graph
    network = slim(
        loaded.model,
        graph.widths,
        graph=graph,
        weights="inherit" if loaded.new_classifier else "fresh",
    ).requires_grad_(True)
    assert job.recipe is not None
    objective = loaded.task.objective(job.recipe.label_smoothing)
    training = _training(job, job.recipe, loaded.data.train, job.seed or 0, store)
    network, record = train_network(network, objective, training, loaded, store)
    metrics = record.history[-1].test or {}
    notes = untrained_notes(metrics.get("top1"), loaded)
    store.put(job, replace(record, notes=[*record.notes, *notes]), network)
    loaded.tell(notes)


def evaluate_given(job: Original, loaded: Loaded) -> Record:
    """Evaluate a given original before anything is written or trained: one that fails stops the run."""
    given = loaded.given
    assert given is not None
    loaded.begin_stage("original", "evaluating the original")
    metrics, notes = loaded.evaluate(given.model), []
    if metrics.top1 is not None:
        if loaded.data.is_own:
            notes = chance_notes(given, metrics.top1, loaded)
        else:
            check_accuracy(given, metrics.top1, loaded)
    known = given.record or Record([], 0)
    return replace(known, key=job.key, metrics=metrics.to_dict(), notes=[*known.notes, *notes])


def _training(job: Job, recipe: Recipe, images: Split, seed: int, store: Store) -> Training:
    name = store.names(job)
    return Training(name, job.key, recipe, images, seed, describe(name))


# Plans


def calibration_of(job: Original, loaded: Loaded, store: Store) -> Calibration:
    """What is measured of an original, once for all methods and networks."""
    if job.key not in loaded.caches:
        model = loaded.engine.prepare(original_of(job, loaded, store))
        loaded.caches[job.key] = Calibration(loaded.problem(None, model), loaded.engine)
    found: Calibration = loaded.caches[job.key]
    return found


def _solve(job: Solve, loaded: Loaded, store: Store, method: Method) -> None:
    name, original, calibration = store.names(job), None, None
    if job.original is not None:
        calibration = calibration_of(job.original, loaded, store)
        original = calibration.original
    problem = loaded.problem(job, original)
    trainings: list[str] = []

    def train(
        stage: str,
        network: nn.Module,
        objective: Goal,
        recipe: Recipe,
        images: Split,
        callbacks: Sequence[Callback],
    ) -> nn.Module:
        # In a comparison, several plans train a network of this name.
        stage = stage if name in ("", "plan") else f"{name}-{stage}"
        key = f"{job.key}-{stage}"
        trainings.append(stage)
        if (done := store.find(stage, key)) is not None:
            loaded.begin_stage(stage, f"{describe(stage)}: already finished")
            store.clear(stage, key)
            return finished(store.load(stage, key, _widths_of(network)), loaded)
        training = Training(stage, key, recipe, images, job.seed, describe(stage), callbacks)
        network, done = train_network(network, objective, training, loaded, store)
        store.save(stage, key, done, network)
        return network

    lent = Work(
        problem,
        loaded.engine,
        calibration=calibration or Calibration(problem, loaded.engine),
        trainer=train,
        notebook=MethodFiles(store, name, job.key),
        callbacks=loaded.callbacks,
        checkpoint_seconds=loaded.config.checkpoint_seconds,
    )
    with named_errors(row_of(job)):
        found = method.solve(problem, lent)
    answer, widths = checked(found, problem, method, row_of(job))
    loaded.world.check_equal("the plan", json.dumps(dict(widths)))
    answer = replace(answer, widths=widths, notes=(*answer.notes, *lent.notes))
    answer = loaded.world.broadcast(answer)
    plan = assemble_plan(problem, answer, row_of(job), job.method.settings)
    # The code of the network at these widths runs once, before anything is trained for it.
    slim(loaded.model, widths, graph=loaded.graph)
    passes = round(lent.spent.macs / loaded.graph.macs())
    seconds = lent.spent.seconds
    history = [EpochRecord(1, 1, 0.0, {}, None, seconds, passes / max(seconds, 1e-9))] if passes else []
    for steps in lent.step_names:
        store.clear(f"{name}-{steps}", f"{job.key}-{steps}")
    store.put_answer(
        job, answer, plan, Record(history, passes, job.key, list(answer.notes), trainings=trainings)
    )


def _widths_of(network: nn.Module) -> Widths:
    return Widths(info_of(network).widths)


# The final networks


def _start(job: Start, loaded: Loaded, store: Store) -> None:
    """Cut and repair a network. The original runs once for all of them."""
    answer, _ = store.answer(job.solve)
    row, name = row_of(job.solve), store.names(job)
    calibration = calibration_of(job.original, loaded, store)
    scores: dict[str, float] = {}
    if answer.network is not None:
        network = copy.deepcopy(answer.network).requires_grad_(True)
        loaded.engine.prepare(network)
    else:

        def watch(step: str, network: nn.Module) -> None:
            # Its own name: the training of this network comes later.
            loaded.begin_stage(name, f"evaluating {describe(row)}, {step}")
            score = loaded.evaluate(network).score
            if score is not None:
                scores[step] = score

        network = calibration.cut(answer.widths, answer.scores, watch)
    loss = loaded.held_out_loss(network)
    store.put(job, Record([], 0, job.key, before_training=scores, held_out_loss=loss), network)


def _train(job: Train, others: Sequence[Train], loaded: Loaded, store: Store) -> None:
    """A slim network, trained with the recipe that all share."""
    if (twin := _twin(job, others, store)) is not None:
        _share(job, twin, loaded, store)
        return
    answer, _ = store.answer(job.solve)
    network = _network_of(job, answer, loaded, store)
    start = None if job.start is None else store.record(job.start)
    before = copy.deepcopy(network.state_dict()) if _is_judged(job, start) else None
    network, objective = _objective_of(job, network, answer, loaded, store)
    images = _images_of(job, loaded, store)
    training = _training(job, job.recipe, images, job.seed, store)
    network, record = train_network(network, objective, training, loaded, store)
    if start is not None:
        record = replace(record, before_training=start.before_training)
    if before is not None and start is not None:
        after = loaded.held_out_loss(network)
        assert start.held_out_loss is not None
        assert after is not None
        record = replace(record, held_out_losses=(start.held_out_loss, after))
        if after > start.held_out_loss:  # fine-tuning on few images may lose what the repair gave
            network.load_state_dict(before)
            record = replace(record, kept_metrics=loaded.evaluate(network).to_dict())
    store.put(job, record, network)


def _is_judged(job: Train, start: Record | None) -> bool:
    return start is not None and start.held_out_loss is not None and job.recipe.epochs > 0


def _network_of(job: Train, answer: Answer, loaded: Loaded, store: Store) -> nn.Module:
    seed_everything(derive_seed("init", "final", job.seed))  # paired: the same for all
    if job.start is not None:
        calibration_of(job.start.original, loaded, store).free()
        network = copy.deepcopy(store.network(job.start, answer.widths))
    elif answer.network is not None:
        network = copy.deepcopy(answer.network)
    else:
        network = slim(loaded.model, answer.widths, graph=loaded.graph)
    return network.requires_grad_(True)


def _objective_of(
    job: Train, network: nn.Module, answer: Answer, loaded: Loaded, store: Store
) -> tuple[nn.Module, Objective]:
    """The network, or a pair with a wider one, and what is minimized."""
    objective: Objective = loaded.task.objective(job.recipe.label_smoothing)
    logits = loaded.task.is_classification
    if job.distill == "none" or job.recipe.epochs == 0 or job.terms is None:
        return network, objective
    kd_weight, temperature, hard_weight = job.terms
    terms: dict[str, Any] = {"weight": kd_weight, "temperature": temperature, "hard_weight": hard_weight}
    if job.distill == "in-place":
        seed_everything(derive_seed("init", "final", job.seed))
        pair = in_place_pair(loaded.model, loaded.graph, answer.widths)
        return pair, InPlace(objective, **terms, logits=logits)
    assert job.teacher is not None
    teacher = original_of(job.teacher, loaded, store)
    loaded.engine.prepare(teacher).eval().requires_grad_(False)
    return network, Distillation(objective, teacher, **terms, logits=logits)


def _images_of(job: Train, loaded: Loaded, store: Store) -> Split:
    """The training images, with cached logits of the teacher where a cache is worth it."""
    images, engine = loaded.data.train, loaded.engine
    if job.distill != "teacher" or job.teacher is None or not engine.cache_teacher or loaded.data.is_own:
        return images
    key = f"logits of {job.teacher.key}"
    if key not in loaded.caches:
        teacher = original_of(job.teacher, loaded, store)
        classes = len(loaded.data.classes)
        loaded.caches[key] = make_logit_cache(teacher, images, job.recipe.augment, classes, engine)
    cache: LogitCache | None = loaded.caches[key]
    return images if cache is None else CachedTeacher(images, cache)


def _twin(job: Train, others: Sequence[Train], store: Store) -> Train | None:
    """A finished training of the same network in the same way: of another method with the same answer."""
    answer, _ = store.answer(job.solve)
    for other in others:
        if other.key == job.key or store.record(other) is None:
            continue
        known, _ = store.answer(other.solve)
        is_alike = replace(job, solve=other.solve, start=other.start) == other
        # Where weights are inherited, a method may keep other channels at the same widths.
        keeps_others = job.start is not None and (answer.scores is not None or known.scores is not None)
        has_own = answer.network is not None or known.network is not None
        if is_alike and not keeps_others and not has_own and dict(answer.widths) == dict(known.widths):
            return other
    return None


def _share(job: Train, twin: Train, loaded: Loaded, store: Store) -> None:
    """End a job whose network is that of a finished one. It takes no time."""
    record, name = store.record(twin), store.names(job)
    assert record is not None
    loaded.begin_stage(name, f"{describe(name)}: the {row_of(twin.solve)} network, which is trained already")
    history = [replace(epoch, seconds=0.0) for epoch in record.history]
    answer, _ = store.answer(twin.solve)
    network = store.network(twin, answer.widths)
    if store.folder is not None:
        store.folder.restart_metrics(name, history)
    store.put(job, replace(record, key=job.key, history=history, image_passes=0), network)
