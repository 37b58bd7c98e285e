"""Faults on demand, for tests: `PEEL_FAULT=STEP:KIND[:RANK]` strikes at a step counted from 0 over a stage.

What torchrun has started again is spared: the fault has struck its first life.
"""

from __future__ import annotations

import os
import signal
import time

import torch
from torch import Tensor

__all__ = ["fault"]


def fault(step: int, images: Tensor) -> Tensor:
    """The images as they are, unless a fault was ordered for this step."""
    order = os.environ.get("PEEL_FAULT")
    if not order or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return images
    when, kind, *rank = order.split(":")
    if int(when) != step or (rank and rank[0] != os.environ.get("RANK", "0")):
        return images
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "hang":
        time.sleep(3600)
    elif kind == "error":
        raise RuntimeError("a fault that was ordered")
    elif kind == "nan":
        return torch.full_like(images, torch.nan)
    elif kind == "oom":
        # Only while the batch is whole: a smaller one fits.
        os.environ["PEEL_FAULT"] = ""
        os.environ["PEEL_FAULT_OOM"] = str(len(images))
    else:
        os.kill(os.getpid(), getattr(signal, f"SIG{kind.upper()}"))
    return images
