"""Faults in a training of this process, by patching. Other processes run `helpers.small:Faulty`."""

from __future__ import annotations

import math
import signal
from typing import Any

import pytest
import torch

from peel.data.batch import Batch
from peel.train import step as step_module
from peel.train.state import TrainingState


def inject(fault: str, patch: pytest.MonkeyPatch) -> None:
    """STEP:KIND, with steps counted from 0 over a training. KIND is nan, oom or the name of a signal.

    From an oom on, micro-batches as large as the batch of that step do not fit into memory.
    """
    step, kind = fault.split(":")
    run_step, forward = TrainingState.run_step, step_module._LossModule.forward
    too_large = math.inf

    def run_step_with_fault(self: TrainingState, batch: Batch) -> None:
        nonlocal too_large
        if self.global_step == int(step):
            if kind == "nan":
                batch = batch._replace(inputs=torch.full_like(batch.inputs, math.nan))
            elif kind == "oom":
                too_large = len(batch.inputs)
            else:
                signal.raise_signal(getattr(signal, f"SIG{kind.upper()}"))
        run_step(self, batch)

    def forward_with_fault(self: Any, images: torch.Tensor, *others: Any) -> Any:
        if len(images) >= too_large:
            raise torch.OutOfMemoryError("an injected fault")
        return forward(self, images, *others)

    patch.setattr(TrainingState, "run_step", run_step_with_fault)
    patch.setattr(step_module._LossModule, "forward", forward_with_fault)
