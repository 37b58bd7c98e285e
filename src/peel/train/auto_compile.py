"""How fast steps go, and whether compiling would repay itself in what is left."""

from __future__ import annotations

import time

import torch

from .engine import Engine

__all__ = ["AutoCompile"]

#: Steps until the pace is taken (a recorded step has settled by then), and how many are timed.
SETTLED, TIMED = 20, 30

#: Compiling takes about a minute for a large network and saves about a quarter of the time: it is worth it above this many seconds.
WORTH_SECONDS = 600.0


class AutoCompile:
    """Times a few steps early in a training; the device is waited for at two of them and never again."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.steps = 0
        self.began = 0.0
        self.is_decided = engine.compile == "off"

    def should_compile(self, steps_left: int) -> bool:
        """Asked before every step: true once, when it is known that the network should be compiled."""
        if self.is_decided:
            return False
        if self.engine.compile == "on":
            self.is_decided = True
            return True
        self.steps += 1
        if self.steps == SETTLED:
            self.began = self._now()
        if self.steps < SETTLED + TIMED:
            return False
        self.is_decided = True
        seconds_left = (self._now() - self.began) / TIMED * steps_left
        # The first process decides for all.
        return bool(self.engine.world.broadcast(seconds_left > WORTH_SECONDS))

    def _now(self) -> float:
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)
        return time.perf_counter()
