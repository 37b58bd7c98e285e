"""The jobs: train an original, cut a network without training it, fine-tune a cut network."""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

import peel
from peel.cost.rounding import Divisor
from peel.errors import BudgetError, DivergedError
from peel.methods import Method, Plan, Problem
from peel.methods.config import MethodConfig
from peel.methods.registry import find_method
from peel.methods.start import Watch, start_network
from peel.run.trainer import Trainer
from peel.steps.distillation import Distillation
from peel.train.objective import Objective
from peel.train.recipe import Recipe, named_recipe
from peel.utils.rng import derive_seed, seed_everything

from .lanes import Lane, Setting, run_jobs
from .networks import NETWORKS, graph_of, latency_model, original_path, original_seed
from .peer import PEERS, TorchPruning, kept_channels

#: The arms. `streams` is uniform with the residual streams at their original width.
METHODS = ("peel", "uniform", "streams", "magnitude", "taylor", "sensitivity", *PEERS)

#: Those that are fine-tuned.
MAIN = tuple(method for method in METHODS if method != "streams")

#: Fractions of the MACs: of the curve, and of the fine-tuned networks.
CURVE, BUDGETS = ("90%", "70%", "50%", "30%"), ("50%", "25%")

#: Fractions of the MACs at which papers report ResNet-56: 2.1 and 2.55 times fewer MACs.
PUBLISHED = ("47.62%", "39.22%")

#: Recipes of the originals. Without label smoothing, 120 epochs end with 99.8 % of the training images right
#: and 90 % of the test images: regularization is missing, not time.
RECIPES = {
    "plain": named_recipe("cifar-fast").changed(batch_size=256, lr=0.2, label_smoothing=0.0),
    "smooth": named_recipe("cifar-fast").changed(batch_size=256, lr=0.2, label_smoothing=0.1),
    "decay": named_recipe("cifar-fast").changed(batch_size=256, lr=0.2, weight_decay=1e-3),
}


# Originals


@dataclass(frozen=True)
class OriginalJob:
    network: str
    recipe: str
    epochs: int
    seed: int


def train_original(lane: Lane, job: OriginalJob) -> dict[str, Any]:
    """Train an original from scratch and save it in the folder of originals."""
    graph = graph_of(job.network)
    seed_everything(derive_seed("init", "original", job.seed))
    network = peel.slim(NETWORKS[job.network](), graph.widths, graph=graph).requires_grad_(True)
    problem = replace(lane.problem(job.network, "100%", job.seed, network), trained=None, inherits=False)
    recipe = lane.recipe(RECIPES[job.recipe]).changed(epochs=job.epochs, warmup_epochs=job.epochs / 20)
    trainer = Trainer(problem, ())
    objective = problem.task.objective(recipe.label_smoothing)
    trained = trainer.train("original", network, objective, recipe, lane.data.train)
    path = original_path(lane.setting.originals, job.network, job.seed)
    peel.save(trained, path.with_suffix(""))
    return history_of(trainer, "original") | {"macs": graph.macs(), "params": graph.params()}


def history_of(trainer: Trainer, stage: str) -> dict[str, Any]:
    """Top-1 after every epoch, and the last training loss and test loss."""
    history = trainer.records[stage].history
    tests = [record.test or {} for record in history]
    return {
        "top1": [round(test["top1"], 4) for test in tests],
        "loss": tests[-1]["loss"],
        "train_loss": history[-1].train["cross_entropy"],
        "epoch_seconds": round(history[-1].seconds, 3),
    }


def originals(
    images: Path,
    originals: Path,
    results: Path,
    networks: Sequence[str],
    seeds: Sequence[int],
    recipe: str,
    epochs: int,
    lanes: int,
    deadline: float = math.inf,
    count: int | None = None,
    batch_size: int | None = None,
) -> None:
    jobs = [OriginalJob(network, recipe, epochs, seed) for seed in seeds for network in networks]
    setting = Setting(images, originals, count, batch_size)
    run_jobs(jobs, train_original, setting, results=results, lanes=lanes, deadline=deadline)


# What Torch-Pruning keeps


@dataclass(frozen=True)
class PeerJob:
    network: str
    method: str
    original: int


def prune_with_peer(lane: Lane, job: PeerJob) -> dict[str, Any]:
    budgets = list(dict.fromkeys((*CURVE, *BUDGETS, *PUBLISHED)))
    kept = kept_channels(lane.setting.originals, job.network, job.original, job.method, budgets)
    graph = graph_of(job.network)
    widths = {budget: {tie: len(some) for tie, some in kept[budget].items()} for budget in budgets}
    return {"macs": {budget: graph.macs(widths[budget]) / graph.macs() for budget in budgets}}


def peers(
    images: Path,
    originals: Path,
    results: Path,
    networks: Sequence[str],
    seeds: Sequence[int],
    lanes: int,
    deadline: float = math.inf,
    count: int | None = None,
) -> None:
    """Let Torch-Pruning cut every original to every budget. Nothing is written twice."""
    own = {(name, original_seed(originals, name, seed)) for seed in seeds for name in networks}
    jobs = [PeerJob(name, arm, seed) for name, seed in sorted(own) for arm in PEERS]
    setting = Setting(images, originals, count)
    run_jobs(
        jobs,
        prune_with_peer,
        setting,
        results=results,
        lanes=lanes,
        deadline=deadline,
        kind=("network", "method"),
    )


# Cut, recalibrated, repaired


@dataclass(frozen=True)
class CurveJob:
    network: str
    budget: str
    method: str
    seed: int
    original: int
    divisor: Divisor


def make_plan(lane: Lane, job: CurveJob | FinetuneJob) -> tuple[Problem, Plan, Method]:
    """The plan of a job, its problem and its method. PEEL trains its backbone here."""
    trained = lane.original(job.network, job.original)
    is_streams = job.method == "streams"
    problem = lane.problem(job.network, job.budget, job.seed, trained, streams=is_streams)
    if job.method in PEERS:
        folder = lane.setting.originals
        kept = kept_channels(folder, job.network, job.original, job.method, [job.budget])
        method: Method = TorchPruning(kept[job.budget])
    else:
        method = find_method("uniform" if is_streams else job.method)
    plan = method.plan(problem, MethodConfig(budget=problem.budget), Trainer(problem, ()).train)
    if isinstance(job, FinetuneJob) and job.resource == "latency":
        graph = problem.graph.with_latency(latency_model(job.network))
        budget = math.ceil(1e9 * graph.latency(plan.widths))
        problem = replace(problem, graph=graph, budget=budget, resource="latency")
        plan = method.plan(problem, MethodConfig(budget=budget), Trainer(problem, ()).train)
    return problem, plan, method


def describe(problem: Problem, plan: Plan) -> dict[str, Any]:
    shares = {"shares": [one.shares for one in plan.rounds]} if plan.rounds else {}
    return {
        "macs": plan.slim.macs,
        "params": plan.slim.params,
        "original_macs": plan.original.macs,
        "original_params": plan.original.params,
        "widths": plan.slim.widths,
        **shares,
    }


def judge_cut(lane: Lane, job: CurveJob) -> dict[str, Any]:
    """Top-1 of the original, and of the network after each step of surgery."""
    try:
        problem, plan, method = make_plan(lane, job)
    except BudgetError as error:
        return {"error": str(error)}
    before: dict[str, float] = {}
    start_network(problem, plan.widths, method.scores(problem), watch_top1(problem, before))
    return describe(problem, plan) | {"original_top1": original_top1(problem), "before": before}


def watch_top1(problem: Problem, before: dict[str, float]) -> Watch:
    def watch(step: str, network: nn.Module) -> None:
        before[step] = problem.evaluate(network).top1 or 0.0

    return watch


def original_top1(problem: Problem) -> float:
    assert problem.trained is not None
    return problem.evaluate(problem.trained).top1 or 0.0


def curve(
    images: Path,
    originals: Path,
    results: Path,
    networks: Sequence[str],
    methods: Sequence[str],
    budgets: Sequence[str],
    seeds: Sequence[int],
    lanes: int,
    divisor: Divisor = "auto",
    deadline: float = math.inf,
    count: int | None = None,
    batch_size: int | None = None,
) -> None:
    cells = itertools.product(seeds, budgets, methods, networks)
    jobs = [
        CurveJob(name, budget, method, seed, original_seed(originals, name, seed), divisor)
        for seed, budget, method, name in cells
    ]
    setting = Setting(images, originals, count, batch_size, divisor)
    run_jobs(
        jobs, judge_cut, setting, results=results, lanes=lanes, deadline=deadline, kind=("network", "method")
    )


# Fine-tuning


@dataclass(frozen=True)
class FinetuneJob:
    network: str
    budget: str
    method: str
    resource: str
    """Of the budget: macs, or the latency that the network has if the budget is one of MACs."""
    start: str
    """Repaired, cut or fresh (from scratch)."""
    teacher: bool
    epochs: int
    batch_size: int
    lr: float
    seed: int
    original: int
    divisor: Divisor


def fine_tune(lane: Lane, job: FinetuneJob) -> dict[str, Any]:
    """Cut, repair and train a network; top-1 after each step of surgery and after every epoch."""
    began = time.perf_counter()
    try:
        problem, plan, method = make_plan(lane, job)
    except BudgetError as error:
        return {"error": str(error)}
    line = describe(problem, plan) | {"original_top1": original_top1(problem)}
    line |= {"search_seconds": round(time.perf_counter() - began, 2)}
    seed_everything(derive_seed("init", "final", job.seed))  # paired: the same for all
    network = started(problem, plan, method, job.start, line)
    usual = RECIPES["plain"].changed(warmup_epochs=1) if job.start == "fresh" else FINETUNE
    recipe = lane.recipe(usual.changed(epochs=job.epochs, batch_size=job.batch_size, lr=job.lr))
    trainer = Trainer(problem, ())
    train = lane.taught(job.network, job.original) if job.teacher else lane.data.train
    try:
        trainer.train("final", network, objective_of(problem, recipe, job.teacher), recipe, train)
    except DivergedError as error:
        return line | {"error": str(error)}
    return line | history_of(trainer, "final")


def started(problem: Problem, plan: Plan, method: Method, start: str, line: dict[str, Any]) -> nn.Module:
    """The network before training. Its top-1 after each step of surgery goes to the line."""
    before: dict[str, float] = {}
    if start == "fresh":
        network = peel.slim(problem.model, plan.widths, graph=problem.graph).requires_grad_(True)
        line["before"] = {start: problem.evaluate(network).top1 or 0.0}
        return network
    watch_step, copies = watch_top1(problem, before), dict[str, nn.Module]()

    def watch(step: str, network: nn.Module) -> None:
        watch_step(step, network)
        if step == start == "cut":
            copies[step] = copy.deepcopy(network)

    repaired = start_network(problem, plan.widths, method.scores(problem), watch)
    line["before"] = before
    return copies.get(start, repaired).requires_grad_(True)


def objective_of(problem: Problem, recipe: Recipe, with_teacher: bool) -> Objective:
    objective: Objective = problem.task.objective(recipe.label_smoothing)
    assert problem.trained is not None
    return Distillation(objective, problem.trained) if with_teacher else objective


#: The recipe of all arms, and the batch sizes and learning rates that it was chosen from.
FINETUNE = named_recipe("finetune")
RATES = tuple(itertools.product((128, 512), (0.04, 0.02, 0.01, 0.005, 0.002)))
HIGH_RATE = (128, 0.02)


class Stage(NamedTuple):
    """Arms that belong together. Torch-Pruning repairs nothing: by default its networks start cut."""

    methods: Sequence[str] = MAIN
    starts: Sequence[str] = ("repaired",)
    teacher: bool = True
    budgets: Sequence[str] = BUDGETS
    epochs: Sequence[int] = (10,)
    networks: Sequence[str] = tuple(NETWORKS)
    peer_start: str = "cut"
    resource: str = "macs"
    rates: Sequence[tuple[int, float]] = ((FINETUNE.batch_size, FINETUNE.lr),)


#: Methods for questions that are not about methods, and the others of ours.
FEW, REST = ("uniform", "sensitivity"), ("peel", "magnitude", "taylor")

STAGES = {
    # The table: all methods, the same training
    "main": Stage(),
    # What repair buys after every epoch
    "cut": Stage(FEW, ("cut",)),
    "cut-rest": Stage(REST, ("cut",)),
    # ResNet-56 at the reductions of the literature
    "published": Stage((*FEW, *PEERS), budgets=PUBLISHED, networks=("cifar_resnet56",)),
    # Without a teacher
    "bare": Stage((*FEW, *PEERS), teacher=False),
    "bare-rest": Stage(REST, teacher=False),
    "bare-cut": Stage(FEW, ("cut",), teacher=False),
    "bare-cut-rest": Stage(REST, ("cut",), teacher=False),
    # Networks of Torch-Pruning, repaired
    "peers-repaired": Stage(tuple(PEERS), peer_start="repaired"),
    # Torch-Pruning at the rate that suits it better in some cells
    "peers-high-rate": Stage(tuple(PEERS), rates=(HIGH_RATE,)),
    # Batch sizes and learning rates, for a network that is repaired and for one that is not
    "rates": Stage(("sensitivity", "tp-local"), rates=RATES),
    # After every epoch at the other budgets of the curve
    "curve": Stage(("sensitivity", *PEERS), budgets=("90%", "70%", "30%")),
    "curve-cut": Stage(("sensitivity",), ("cut",), budgets=("90%", "70%", "30%")),
    # From scratch, for as many epochs
    "scratch": Stage(FEW, ("fresh",), rates=((256, 0.2),)),
    # Budgets of latency, against those of MACs in `main`
    "latency": Stage(("peel", *FEW), resource="latency"),
    # Schedules of other lengths
    "schedules": Stage(("uniform", "tp-global"), ("repaired", "cut"), epochs=(1, 2, 5, 20)),
}


def finetune(
    images: Path,
    originals: Path,
    results: Path,
    stages: Sequence[str],
    networks: Sequence[str],
    methods: Sequence[str],
    lanes: int,
    epochs: int | None = None,
    divisor: Divisor = "auto",
    deadline: float = math.inf,
    count: int | None = None,
    batch_size: int | None = None,
) -> None:
    """Train what is missing of the stages, in their order. `networks` and `methods` leave out others."""
    jobs = [
        job
        for text in stages
        for job in finetune_jobs(originals, text, divisor, epochs)
        if job.network in networks and job.method in methods
    ]
    setting = Setting(images, originals, count, batch_size, divisor)
    run_jobs(dict.fromkeys(jobs), fine_tune, setting, results=results, lanes=lanes, deadline=deadline)


def finetune_jobs(
    originals: Path, text: str, divisor: Divisor, epochs: int | None = None
) -> Iterator[FinetuneJob]:
    """The jobs of `NAME:SEEDS`, such as `main:0-2`. Methods and networks alternate within a budget."""
    name, _, seeds = text.partition(":")
    first, _, last = seeds.partition("-")
    stage = STAGES[name]
    lengths = stage.epochs if epochs is None else (epochs,)
    cells = itertools.product(
        range(int(first), int(last or first) + 1),
        lengths,
        stage.rates,
        stage.starts,
        stage.budgets,
        stage.methods,
        stage.networks,
    )
    for seed, length, (size, lr), start, budget, method, network in cells:
        begin = stage.peer_start if method in PEERS else start
        original = original_seed(originals, network, seed)
        how = stage.resource, begin, stage.teacher, length, size, lr
        yield FinetuneJob(network, budget, method, *how, seed, original, divisor)
