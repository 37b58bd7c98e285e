"""How much work the stages of a run are, and how long it takes."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..errors import ConfigError
from ..methods.config import MethodConfig
from ..methods.peel import recipe_of_round, stage_of_round
from ..methods.plan import Plan
from ..methods.problem import Problem
from ..steps.distillation import IN_PLACE_WIDTH
from ..surgery import slim
from ..train.loop import fit
from ..train.recipe import Recipe

#: A training step costs about this many forward passes.
PASSES_PER_STEP = 3

#: Steps timed on a GPU, which include the recording of a CUDA graph.
GPU_STEPS = 20

#: On a CPU: images of a first guess, and seconds that the timed steps should take.
FIRST_IMAGES, TIMED_SECONDS = 32, 1.5


def estimate_work(
    problem: Problem,
    config: MethodConfig,
    recipe: Recipe,
    plan: Plan,
    trained: Sequence[str],
    search: float = 0.0,
) -> list[tuple[str, float]]:
    """(stage, multiply-adds) for each stage that trains, at the widths of the plan, and for the search."""
    images, full = problem.data.train.size, plan.original.macs
    wide = PASSES_PER_STEP * IN_PLACE_WIDTH**2 * full
    teacher = {"teacher": full, "in-place": wide, "none": 0}[config.distill]
    work: list[tuple[str, float]] = []
    if "original" in trained:
        work.append(("original", recipe.epochs * images * PASSES_PER_STEP * full))
    if plan.backbone is not None and "backbone" in trained:
        for number in range(config.rounds):
            passes = recipe_of_round(problem, config, number).epochs * images * PASSES_PER_STEP
            work.append((stage_of_round(number), passes * plan.backbone.macs))
    if search:
        work.append(("plan", search))
    for name, network in {"uniform": plan.uniform, plan.name: plan.slim}.items():
        if name in trained:
            work.append((name, float(recipe.epochs * images * (PASSES_PER_STEP * network.macs + teacher))))
    return work


def seconds_per_mac(problem: Problem, recipe: Recipe) -> float:
    """Time a few training steps of the original, data loading included."""
    if problem.task.train_fn is not None:
        raise ConfigError("a dry run times training steps, and cannot time those of train_fn.")
    if problem.engine.device.type == "cuda":
        speed = _images_per_second(problem, recipe, recipe.batch_size * GPU_STEPS)
    else:
        speed = _images_per_second(problem, recipe, FIRST_IMAGES)
        images = int(problem.engine.world.broadcast(speed) * TIMED_SECONDS)
        if images > FIRST_IMAGES:
            speed = _images_per_second(problem, recipe, images)
    return 1 / (speed * PASSES_PER_STEP * problem.graph.macs())


def _images_per_second(problem: Problem, recipe: Recipe, images: int) -> float:
    """Measured on about `images` images."""
    processes, available = problem.engine.world.size, problem.data.train.size
    batch = max(processes, min(recipe.batch_size, images, available) // processes * processes)
    some = problem.data.train.subset(torch.arange(min(images, available) // batch * batch))
    network = slim(problem.model, problem.graph.widths, graph=problem.graph)
    # The first epoch warms up: memory, kernels, workers.
    short = replace(recipe, epochs=2, batch_size=batch, warmup_epochs=0.0)
    accumulate = min(problem.engine.accumulation_steps, batch // processes)
    engine = replace(problem.engine, accumulation_steps=accumulate, compile="off")
    task = problem.task
    return fit(network, task.objective(), some, short, engine=engine, seed=0, task=task)[-1].images_per_second
