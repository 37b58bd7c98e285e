"""The losses of networks that are cut from the trained original and repaired, without training.

A run stores them, so that a killed search goes on.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..cost.widths import Widths
from ..data.datasets import Split, hold_out
from ..errors import DataError
from ..surgery.explain import explain_scores
from ..surgery.original_shapes import PadConvolutions, original_shapes
from ..surgery.repair import Repairer, images_at_once
from ..surgery.slim import build_slim
from ..train.callbacks import Callback
from ..train.distributed import World
from ..train.engine import Engine, eval_batch_size
from ..train.loop import evaluate
from ..utils.rng import derive_seed, seed_everything
from .peel import HELD_OUT
from .problem import Problem
from .start import calibration_images

#: Images for the repair of a network, if one pass can take them. It is judged by at most and at least so many
#: others.
REPAIR_IMAGES, MOST_HELD_OUT, LEAST_HELD_OUT = 512, 2048, 16


class Images(NamedTuple):
    """Training images, apart from each other: for the repair, and to judge networks by."""

    repair: Split
    held_out: Split
    per_repair: int
    """How many of the former a network is repaired with."""

    @classmethod
    def of(cls, problem: Problem) -> Images:
        size = problem.data.train.size
        fraction = min(HELD_OUT, MOST_HELD_OUT / max(1, size))
        # The same in every run: an original that another run of a search trained has not seen them either.
        repair, held_out = hold_out(problem.data.train, fraction, seed=0)
        if held_out.size < LEAST_HELD_OUT:
            raise DataError(
                f"the method search needs at least {math.ceil(LEAST_HELD_OUT / HELD_OUT)} training images, "
                f"and here are {size}: it judges networks by {HELD_OUT:.0%} of them. Give more images, or "
                "another method (--method)."
            )
        at_once = images_at_once(problem.model, problem.graph)
        return cls(repair, held_out, min(REPAIR_IMAGES, repair.size, at_once))

    def for_repair(self, problem: Problem) -> Problem:
        """The problem without the images that networks are judged by."""
        return replace(problem, data=replace(problem.data, train=self.repair))

    @property
    def per_network(self) -> int:
        return self.per_repair + self.held_out.size


@dataclass(frozen=True)
class Judge:
    """Cuts networks from the trained original, repairs them, and measures their losses."""

    problem: Problem
    images: Images

    @cached_property
    def engine(self) -> Engine:
        """In float32, as repairs are: a GPU prepares convolutions once for each precision.

        Each process judges networks of its own.
        """
        return replace(self.problem.engine, bf16=False, world=World())

    @cached_property
    def original(self) -> nn.Module:
        assert self.problem.trained is not None
        return self.engine.prepare(self.problem.trained)

    @cached_property
    def batches(self) -> list[tuple[Any, None]]:
        """The images for repairs."""
        return calibration_images(self.images.for_repair(self.problem), self.images.per_repair)

    @cached_property
    def scores(self) -> dict[str, Tensor]:
        return explain_scores(self.original, self.problem.graph, self.batches)

    @cached_property
    def repairer(self) -> Repairer:
        return Repairer(self.original, self.batches, self.problem.graph)

    def losses(self, several: Sequence[Widths], callbacks: Sequence[Callback] = ()) -> list[float]:
        """The losses of networks of these widths, divided among the processes. Those that earlier starts of
        the run have measured are known.
        """
        problem, world = self.problem, self.problem.engine.world
        known = world.broadcast(_read_losses(problem))
        for callback in callbacks:
            callback.on_stage_begin("plan", f"comparing {len(several)} cut and repaired networks")
        missing = [widths for widths in several if _key(widths) not in known]
        for start in range(0, len(missing), world.size):
            together = missing[start : start + world.size]
            own = self._loss(together[world.rank]) if world.rank < len(together) else math.nan
            for number, loss in enumerate(world.gather(own)[: len(together)], start):
                known[_key(missing[number])] = loss
                _store_loss(problem, missing[number], loss)
                for callback in callbacks:
                    done = len(several) - len(missing) + number + 1
                    callback.on_step_end(done, len(several), self.images.per_network)
        return [known[_key(widths)] for widths in several]

    def _loss(self, widths: Widths) -> float:
        original, graph, held_out = self.original, self.problem.graph, self.images.held_out
        scores = self.scores
        seed_everything(derive_seed("search", self.problem.seed, _key(widths)))  # the same after a kill
        network = self.engine.prepare(build_slim(original, widths, graph, scores=scores))
        # With as many images as the repair has: the same convolutions.
        batch_size = min(self.images.per_repair, eval_batch_size(held_out))
        self.repairer.repair(network)
        with PadConvolutions(original_shapes(network, original)):
            loss = evaluate(network, held_out, self.engine, batch_size, self.problem.task).loss
        return math.nan if loss is None else loss


def _read_losses(problem: Problem) -> dict[str, float]:
    """Widths -> loss, of the networks that earlier starts of the run have judged."""
    known, file = dict[str, float](), problem.progress_file
    for line in file.read_text().splitlines() if file is not None and file.exists() else ():
        with contextlib.suppress(ValueError, TypeError):  # the run was killed while it wrote this line
            widths, loss = json.loads(line)
            known[json.dumps(widths)] = float(loss)
    return known


def _key(widths: Widths) -> str:
    return json.dumps(list(widths.values()))


def _store_loss(problem: Problem, widths: Widths, loss: float) -> None:
    if problem.progress_file is not None:  # in the main process
        problem.progress_file.parent.mkdir(parents=True, exist_ok=True)
        with problem.progress_file.open("a") as file:
            file.write(json.dumps([list(widths.values()), loss]) + "\n")
