"""How much there is to do in a run, and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..methods.peel import recipe_of_round, stage_of_round
from ..methods.problem import Problem
from ..methods.settings import Method
from ..surgery import slim
from ..train.loop import fit
from ..train.objective import CrossEntropy
from ..train.recipe import Recipe

__all__ = ["seconds_per_mac", "work_of"]

#: A step of training costs about this many forward passes.
TRAINING_PASSES = 3

#: Steps that are timed on a GPU: until a recorded step has settled.
GPU_STEPS = 20

#: On a CPU, where every image takes its time: images of a first guess, and seconds that the timed steps should last.
FIRST_IMAGES, TIMED_SECONDS = 32, 1.5


def work_of(
    problem: Problem, method: Method, recipe: Recipe, steps: Sequence[str], *, searches: bool
) -> list[tuple[str, float]]:
    """Stages and how much there is to do in each, in multiply-adds. The original is among the steps where it is to be trained."""
    graph, images = problem.graph, problem.data.train.size
    full, slimmed = graph.macs(), graph.macs(problem.uniform())
    taught = (
        full
        if method.distill == "teacher"
        else TRAINING_PASSES * 2.25 * full
        if method.distill == "in-place"
        else 0
    )
    work: list[tuple[str, float]] = []
    if "original" in steps:
        work.append(("original", recipe.epochs * images * TRAINING_PASSES * full))
    if searches:
        for number in range(method.rounds):
            epochs = recipe_of_round(problem, method, number).epochs
            work.append((stage_of_round(number), epochs * images * TRAINING_PASSES * method.keep * slimmed))
    final = float(recipe.epochs * images * (TRAINING_PASSES * slimmed + taught))
    return [*work, *((name, final) for name in ("uniform", "peel") if name in steps)]


def seconds_per_mac(problem: Problem, recipe: Recipe) -> float:
    """Seconds for a multiply-add of training: a few steps of the original go the way of all steps, decoding included, and are forgotten."""
    return 1 / (_images_per_second(problem, recipe) * TRAINING_PASSES * problem.graph.macs())


def _images_per_second(problem: Problem, recipe: Recipe) -> float:
    if problem.engine.device.type == "cuda":
        return _timed(problem, recipe, recipe.batch_size * GPU_STEPS)
    guess = _timed(problem, recipe, FIRST_IMAGES)
    images = int(problem.engine.world.broadcast(guess) * TIMED_SECONDS)
    return _timed(problem, recipe, images) if images > FIRST_IMAGES else guess


def _timed(problem: Problem, recipe: Recipe, images: int) -> float:
    """Images per second over so many images, in batches of the recipe or smaller ones."""
    processes = problem.engine.world.size
    batch = max(processes, min(recipe.batch_size, images, problem.data.train.size) // processes * processes)
    some = problem.data.train.subset(torch.arange(min(images, problem.data.train.size) // batch * batch))
    network = slim(problem.model, problem.graph.widths, graph=problem.graph)
    # The first epoch warms up: memory, kernels, processes that decode.
    short = replace(recipe, epochs=2, batch_size=batch, warmup_epochs=0.0, retries=0)
    engine = replace(
        problem.engine,
        accumulation_steps=min(problem.engine.accumulation_steps, batch // processes),
        compile="off",
    )
    return fit(network, CrossEntropy(), some, short, engine=engine, seed=0)[-1].images_per_second
