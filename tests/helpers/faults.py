"""Faults in training, injected by patching peel from outside.

A fault is written STEP:KIND[:RANK], with steps counted from 0 over a stage. Processes that tests start read it from
the variable PEEL_FAULT. Processes that torchrun has restarted are spared.
"""

from __future__ import annotations

import math
import os
import signal
import time
from typing import Any

import pytest
import torch

from peel.data.batch import Batch
from peel.train import step as step_module
from peel.train.state import TrainingState


def inject(fault: str, patch: pytest.MonkeyPatch) -> None:
    """Kinds are kill, hang, error, nan, oom, and names of signals.

    From an oom on, micro-batches as large as the batch it struck do not fit into memory.
    """
    step, kind, *rank = fault.split(":")
    run_step, forward = TrainingState.run_step, step_module._LossModule.forward
    too_large = math.inf

    def run_step_with_fault(self: TrainingState, batch: Batch) -> None:
        nonlocal too_large
        if self.global_step == int(step) and rank in ([], [os.environ.get("RANK", "0")]):
            if kind == "hang":
                time.sleep(3600)
            elif kind == "error":
                raise RuntimeError("an injected fault")
            elif kind == "nan":
                batch = batch._replace(images=torch.full_like(batch.images, math.nan))
            elif kind == "oom":
                too_large = len(batch.images)
            else:
                signal.raise_signal(getattr(signal, f"SIG{kind.upper()}"))
        run_step(self, batch)

    def forward_with_fault(self: Any, images: torch.Tensor, *others: Any) -> Any:
        if len(images) >= too_large:
            raise torch.OutOfMemoryError("an injected fault")
        return forward(self, images, *others)

    patch.setattr(TrainingState, "run_step", run_step_with_fault)
    patch.setattr(step_module._LossModule, "forward", forward_with_fault)


def inject_from_environment() -> None:
    fault = os.environ.get("PEEL_FAULT")
    if fault and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        inject(fault, pytest.MonkeyPatch())
