"""How much work the jobs of a run are, and how long it takes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ..errors import ConfigError
from ..methods.rehearsal import PASSES_PER_STEP
from ..methods.work import Spent
from ..steps.distillation import IN_PLACE_WIDTH
from ..surgery import slim
from ..train.loop import fit
from ..train.recipe import Recipe
from .jobs import Job, Original, Solve, Train
from .loaded import Loaded

#: Steps timed on a GPU, which include the recording of a CUDA graph.
GPU_STEPS = 20

#: On a CPU: images of a first guess, and seconds that the timed steps should take.
FIRST_IMAGES, TIMED_SECONDS = 32, 1.5


def estimate_work(
    jobs: Sequence[Job],
    loaded: Loaded,
    names: Mapping[str, str],
    spent: Mapping[str, Spent],
    macs: Mapping[str, int],
) -> list[tuple[str, float]]:
    """(stage, multiply-adds) for each stage that computes much.

    Args:
        names: key of a job -> its stage.
        spent: key of a `Solve` job -> what its rehearsal asked for.
        macs: key of a `Solve` job -> those of its network, as far as they are known.
    """
    images, full = loaded.data.train.size, loaded.graph.macs()
    wide = PASSES_PER_STEP * IN_PLACE_WIDTH**2 * full
    teacher = {"teacher": float(full), "in-place": wide, "none": 0.0}
    work: list[tuple[str, float]] = []
    for job in jobs:
        if isinstance(job, Original) and job.recipe is not None:
            work.append((names[job.key], float(job.recipe.epochs * images * PASSES_PER_STEP * full)))
        elif isinstance(job, Solve) and job.key in spent:
            work += spent[job.key].trained.items()
            if spent[job.key].macs:
                work.append((names[job.key], spent[job.key].macs))
        elif isinstance(job, Train):
            passes = PASSES_PER_STEP * macs[job.solve.key] + teacher[job.distill]
            work.append((names[job.key], float(job.recipe.epochs * images * passes)))
    return work


def seconds_per_mac(loaded: Loaded, recipe: Recipe) -> float:
    """Time a few training steps of the original, data loading included."""
    if loaded.task.train_fn is not None:
        raise ConfigError("a dry run times training steps, and cannot time those of train_fn.")
    if loaded.engine.device.type == "cuda":
        speed = _images_per_second(loaded, recipe, recipe.batch_size * GPU_STEPS)
    else:
        speed = _images_per_second(loaded, recipe, FIRST_IMAGES)
        images = int(loaded.world.broadcast(speed) * TIMED_SECONDS)
        if images > FIRST_IMAGES:
            speed = _images_per_second(loaded, recipe, images)
    return 1 / (speed * PASSES_PER_STEP * loaded.graph.macs())


def _images_per_second(loaded: Loaded, recipe: Recipe, images: int) -> float:
    """Measured on about `images` images."""
    processes, available = loaded.world.size, loaded.data.train.size
    batch = max(processes, min(recipe.batch_size, images, available) // processes * processes)
    some = loaded.data.train.subset(torch.arange(min(images, available) // batch * batch))
    network = slim(loaded.model, loaded.graph.widths, graph=loaded.graph)
    # The first epoch warms up: memory, kernels, workers.
    short = replace(recipe, epochs=2, batch_size=batch, warmup_epochs=0.0)
    accumulate = min(loaded.engine.accumulation_steps, batch // processes)
    engine = replace(loaded.engine, accumulation_steps=accumulate, compile="off")
    task = loaded.task
    return fit(network, task.objective(), some, short, engine=engine, seed=0, task=task)[-1].images_per_second
