"""The jobs: train an original, let a method plan, train a planned network from scratch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch._dynamo
from torch import nn

import peel
from peel import zoo
from peel.cost.widths import Widths
from peel.data.augmentation import View
from peel.data.datasets import Data, Split
from peel.errors import DivergedError
from peel.graph import ChannelGraph
from peel.methods.allocation import Space
from peel.methods.config import MethodConfig
from peel.methods.loss_fit import spend
from peel.methods.plan import assemble_plan
from peel.methods.problem import Problem
from peel.methods.registry import find_method
from peel.methods.repaired_losses import Images
from peel.methods.search import by_sensitivity
from peel.run.trainer import Trainer
from peel.steps.distillation import Distillation
from peel.train import step
from peel.train.engine import Engine, make_engine
from peel.train.loop import evaluate
from peel.train.objective import Objective
from peel.train.recipe import Recipe, named_recipe
from peel.train.teacher_cache import CachedTeacher, LogitCache, make_logit_cache
from peel.utils.rng import derive_seed, seed_everything

from ..allocation.images import draw_held_out, draw_of_each_class
from ..allocation.results import read
from ..trained.images import load_images, reduce_images
from ..trained.peer import fraction
from ..trained.work import history_of

#: VGG-16 had no part in the choice of the search. It is trained on the first data set only.
DATA = ("tiny-imagenet-32", "cifar10")
NETWORKS = ("cifar_resnet18", "cifar_mobilenet_v2", "cifar_vgg16_bn")
BUDGETS = ("25%", "10%")

#: The test images of this data set are sharper than its training images, probably scaled down by another
#: filter: squared differences of neighboring pixels are 1.8 times as large. So 50 training images of each
#: class test, and the given test images are reported beside them.
SHARPER_TEST, TEST_IMAGES = DATA[0], 50

#: Controls without a search: the same proportions of the hidden groups in every network, divided by
#: sensitivity inside groups as by the search. Each has those of the highest and the lowest resolution over
#: uniform, before they are scaled to the budget. Those of `profile` are about what the searches of the
#: exploration found. `divided` was added after a look at the planned trainings, and is trained after them.
CONTROLS = {"profile": (0.65, 1.3), "divided": (1.0, 1.0)}

#: Controls are trained at this budget, without a teacher.
CONTROL_BUDGET = "10%"

#: `peel` has the published settings, and its backbone the recipe of all trainings.
METHODS = ("uniform", "search", "peel", *CONTROLS)

SEEDS = tuple(range(10, 20))

#: Test images after an epoch that is not the last.
FEW_IMAGES = 100

#: PEEL stands beside the comparison, and is trained with fewer seeds.
FEWER_SEEDS = SEEDS[:5]

#: The seed of the originals and of the plans. One original and one plan serve all trainings of a row.
PLAN_SEED = SEEDS[0]

RECIPE = named_recipe("cifar-fast").changed(epochs=24, warmup_epochs=2.4, augment="crop-flip")


class Setting(NamedTuple):
    """What all jobs have in common."""

    images: Path
    """The folder of decoded images."""
    originals: Path
    plans: Path
    count: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    compiles: bool = False
    """Compile the networks that are trained. All plans alike; originals and plans are trained without."""


class TestedData(NamedTuple):
    data: Data
    given_test: Split | None = None
    """The test images of the archive, where others test."""


def fresh_test(data: Data) -> TestedData:
    """Tested by training images that are left out here, and had no part in the choice of the search."""
    assert data.train.labels is not None
    labels = data.train.labels.cpu()
    seed = derive_seed("confirmation", "test")
    is_test = draw_of_each_class(~draw_held_out(labels), labels, TEST_IMAGES, seed)
    train, test = (data.train.subset(part.nonzero().flatten()) for part in (~is_test, is_test))
    return TestedData(replace(data, train=train, test=test), data.test)


class Lane(NamedTuple):
    """What a process works with."""

    setting: Setting
    engine: Engine
    loaded: dict[str, TestedData]
    caches: dict[tuple[str, str], LogitCache | None]

    @classmethod
    def open(cls, setting: Setting) -> Lane:
        torch.set_num_threads(1)
        if setting.compiles:
            # The trainings of a lane share compiled code where their networks have the same widths.
            torch._dynamo.config.recompile_limit = 64
            step._compiled = partial(torch.compile, dynamic=False)  # type: ignore[assignment]
        return cls(setting, make_engine(compile="on" if setting.compiles else "off", workers=0), {}, {})

    def data(self, name: str) -> Data:
        return self.tested(name).data

    def tested(self, name: str) -> TestedData:
        if name not in self.loaded:
            path = self.setting.images / f"{name}.pt"
            data = load_images(path, self.engine.device)
            tested = fresh_test(data) if name == SHARPER_TEST else TestedData(data)
            self.loaded[name] = tested._replace(data=reduce_images(tested.data, self.setting.count))
        return self.loaded[name]

    def recipe(self, recipe: Recipe = RECIPE) -> Recipe:
        changes = {"epochs": self.setting.epochs, "batch_size": self.setting.batch_size}
        known: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
        if "epochs" in known:
            known["warmup_epochs"] = known["epochs"] / 10
        return recipe.changed(**known)

    def problem(
        self, data: str, network: str, budget: str, seed: int, trained: nn.Module | None = None
    ) -> Problem:
        images = self.data(data)
        model, graph = make_network(network, len(images.classes))
        return Problem(
            model=model,
            graph=graph,
            budget=int(fraction(budget) * graph.macs()),
            resource="macs",
            divisor=1,  # as in the trainings that the rule was chosen by: the MACs of all networks are equal
            freeze=zoo.FROZEN.get(f"cifar:{network}", ()),
            data=images,
            backbone_recipe=self.recipe(),
            engine=self.engine,
            seed=seed,
            trained=trained,
        )

    def original(self, data: str, network: str) -> nn.Module:
        model = make_network(network, len(self.data(data).classes))[0]
        trained = peel.load(original_path(self.setting.originals, data, network), model=model)
        return self.engine.prepare(trained).eval().requires_grad_(False)

    def taught(self, data: str, network: str) -> Split:
        """The training images, with cached logits of the original where the engine caches them."""
        key, images = (data, network), self.data(data)
        if key not in self.caches:
            arguments = images.train, "crop-flip", len(images.classes), self.engine
            is_cached = self.engine.cache_teacher
            cache = make_logit_cache(self.original(*key), *arguments) if is_cached else None
            path = logits_path(self.setting.originals, *key)
            if cache is not None and path.exists():
                stored = torch.load(path, mmap=True)
                cache.logits.copy_(stored["logits"])
                cache.known.copy_(stored["known"])
            self.caches[key] = cache
        logits = self.caches[key]
        return images.train if logits is None else CachedTeacher(images.train, logits)


@cache
def make_network(name: str, classes: int) -> tuple[nn.Module, ChannelGraph]:
    model = zoo.create(name, num_classes=classes)
    return model, peel.trace(model, torch.zeros(1, 3, 32, 32))


def original_path(folder: Path, data: str, network: str) -> Path:
    return folder / f"{data}-{network}" / "original.safetensors"


def logits_path(folder: Path, data: str, network: str) -> Path:
    return original_path(folder, data, network).with_name("logits.pt")


# Originals


@dataclass(frozen=True)
class OriginalJob:
    data: str
    network: str
    seed: int = PLAN_SEED


def train_original(lane: Lane, job: OriginalJob) -> dict[str, Any]:
    """Train an original from scratch and save it. The images that judge networks are left out."""
    problem = lane.problem(job.data, job.network, "100%", job.seed)
    images = find_method("search").original_images(problem)
    trained, line = train_network(lane, problem, problem.graph.widths, images)
    path = original_path(lane.setting.originals, job.data, job.network)
    peel.save(trained, path.with_suffix(""))
    line |= {"macs": problem.graph.macs(), "params": problem.graph.params()}
    return line | given_scores(lane, job.data, trained)


def given_scores(lane: Lane, data: str, network: nn.Module) -> dict[str, Any]:
    """The loss and top-1 on the given test images, where others test."""
    given = lane.tested(data).given_test
    if given is None:
        return {}
    metrics = evaluate(network, given, lane.engine)
    return {"given_top1": metrics.top1, "given_loss": metrics.loss}


def train_network(
    lane: Lane,
    problem: Problem,
    widths: Widths,
    images: Split,
    taught_by: tuple[str, str] | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Train a network of these widths from fresh weights. Seeds fix weights, order and augmentation.

    `taught_by`: the data and the network of the original that teaches it.
    """
    seed_everything(derive_seed("init", "confirmation", problem.seed))
    network = peel.slim(problem.model, widths, graph=problem.graph).requires_grad_(True)
    recipe, trainer = lane.recipe(), Trainer(problem, ())
    objective: Objective = problem.task.objective(recipe.label_smoothing)
    if taught_by is not None:
        objective = Distillation(objective, lane.original(*taught_by))
    trained = trainer.train("final", network, objective, recipe, images)
    return trained, history_of(trainer, "final")


@dataclass(frozen=True)
class LogitsJob:
    data: str
    network: str
    seeds: tuple[int, ...] = SEEDS
    """Of the trainings with a teacher that are missing."""


def compute_logits(lane: Lane, job: LogitsJob) -> dict[str, Any]:
    """The logits of an original for all variants of images that its students see, computed once for all."""
    taught = lane.taught(job.data, job.network)
    if not isinstance(taught, CachedTeacher):
        return {"computed": 0}
    recipe = lane.recipe()
    for seed, epoch in itertools.product(job.seeds, range(recipe.epochs)):
        view = View.of_epoch(recipe.augment, derive_seed("order", seed), epoch)
        taught.fill(torch.arange(taught.size), view)
    stored = {"logits": taught.cache.logits.cpu(), "known": taught.cache.known.cpu()}
    torch.save(stored, logits_path(lane.setting.originals, job.data, job.network))
    return {"computed": taught.cache.computed}


# Plans


@dataclass(frozen=True)
class PlanJob:
    data: str
    network: str
    budget: str
    method: str
    seed: int = PLAN_SEED


def make_plan(lane: Lane, job: PlanJob) -> dict[str, Any]:
    """What the method decides, and the seconds that it takes beside those of the original."""
    began = time.perf_counter()
    trained = lane.original(job.data, job.network)
    problem = lane.problem(job.data, job.network, job.budget, job.seed, trained)
    is_control = job.method in CONTROLS
    config = MethodConfig(budget=problem.budget, method="uniform" if is_control else job.method)
    method = find_method(config.method)
    method.check(problem, config)
    if is_control:
        plan = assemble_plan(problem, control_widths(problem, CONTROLS[job.method]), config=config)
    else:
        plan = method.plan(problem, config, Trainer(problem, ()).train)
    last = plan.rounds[-1] if plan.rounds else None
    return {
        "widths": plan.slim.widths,
        "macs": plan.slim.macs,
        "params": plan.slim.params,
        "original_macs": plan.original.macs,
        "note": last.note if last else "",
        "factors": last.factors if last else {},
        "search_seconds": round(time.perf_counter() - began, 1),
        "search_macs": method.search_macs(problem),
    }


def control_widths(problem: Problem, proportions: tuple[float, float]) -> Widths:
    """Hidden groups in these proportions, on a logarithmic scale, and divided; streams are uniform."""
    space = Space(problem)
    hidden = dict(zip(space.hidden, np.linspace(*np.log(proportions), len(space.hidden)), strict=True))
    logs = np.array([[hidden.get(group, 0.0) for group in space.groups]])
    bound = np.array([np.inf if group in hidden else 0.0 for group in space.groups])
    [log] = spend(logs, space.load, -bound, bound)
    return space.rounded(space.divided(space.ideal_at(log), by_sensitivity(problem, Images.of(problem))))


# Trainings


@dataclass(frozen=True)
class TrainJob:
    data: str
    network: str
    budget: str
    method: str
    teacher: bool
    seed: int


def train_planned(lane: Lane, job: TrainJob) -> dict[str, Any]:
    plan = find_plan(lane.setting.plans, job)
    problem = lane.problem(job.data, job.network, job.budget, job.seed)
    test, taught_by = problem.data.test, (job.data, job.network) if job.teacher else None
    images = problem.data.train if taught_by is None else lane.taught(*taught_by)
    # Only the last epoch counts: the others are tested by a few images.
    few = replace(problem.data, test=test.subset(torch.arange(FEW_IMAGES)))
    try:
        network, line = train_network(lane, replace(problem, data=few), plan["widths"], images, taught_by)
    except DivergedError as error:
        return {"error": str(error)}
    metrics = evaluate(network, test, lane.engine)
    line |= {"top1": metrics.top1, "loss": metrics.loss, "macs": plan["macs"], "params": plan["params"]}
    return line | given_scores(lane, job.data, network)


def find_plan(plans: Path, job: TrainJob) -> dict[str, Any]:
    wanted = job.data, job.network, job.budget, job.method
    found = [line for line in read(plans) if _plan_key(line) == wanted]
    if not found:
        raise FileNotFoundError(f"{plans} has no plan for {' '.join(wanted)}: run `plans` first.")
    return found[-1]


def _plan_key(line: dict[str, Any]) -> tuple[str, ...]:
    return tuple(line[name] for name in ("data", "network", "budget", "method"))


def train_jobs(
    data: Sequence[str], networks: Sequence[str], seeds: Sequence[int], teachers: Sequence[bool]
) -> Iterator[TrainJob]:
    """Seeds come first, so that what a short run leaves has all rows. What was not planned comes last."""
    cells = itertools.product(
        seeds, sorted(teachers, reverse=True), BUDGETS, pairs_of(data, networks), METHODS
    )
    planned_first = sorted(cells, key=lambda cell: cell[-1] == "divided")
    for seed, teacher, budget, (name, network), method in planned_first:
        is_left_out = method in CONTROLS and (teacher or budget != CONTROL_BUDGET)
        if not is_left_out and (method != "peel" or seed in FEWER_SEEDS):
            yield TrainJob(name, network, budget, method, teacher, seed)


def pairs_of(data: Sequence[str], networks: Sequence[str]) -> list[tuple[str, str]]:
    """Data sets and networks that belong together."""
    pairs = [(name, network) for network in networks for name in data]
    return [pair for pair in pairs if pair != (DATA[1], NETWORKS[2])]


def print_sharpness(images: Path) -> None:
    """Mean squared differences of neighboring pixels (0 to 1), of training and test images."""
    for name in DATA:
        stored = torch.load(images / f"{name}.pt")
        pixels = [stored[part][0].float() / 255 for part in ("train", "test")]
        train, test = ((some[:, 1:] - some[:, :-1]).square().mean().item() for some in pixels)
        print(f"{name}: training {train:.4f}, test {test:.4f}, ratio {test / train:.2f}")
