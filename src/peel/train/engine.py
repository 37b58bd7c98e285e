"""Where and how a network runs: the device, its precision and memory format."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import ConfigError
from .world import ALONE, World, join_world

__all__ = ["Engine", "find_engine"]


@dataclass(frozen=True)
class Engine:
    device: torch.device
    bf16: bool = False
    """Forward passes in bfloat16; weights and losses stay in float32."""
    graphs: bool = False
    """Training steps recorded once as a CUDA graph and replayed: small networks are bound by launches otherwise."""
    workers: int = 0
    """Processes that decode images, where they are read from disk."""
    parts: int = 1
    """In how many parts a batch goes through the network; gradients add up, and the weights move once."""
    align: int = 1
    """Odd widths are padded with zero channels to a multiple of this while training: tensor cores like eights."""
    world: World = ALONE
    """The processes that train together."""

    def prepare(self, model: nn.Module) -> nn.Module:
        return model.to(self.device).to(memory_format=torch.channels_last)

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    @property
    def description(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        return f"{name}, {'bfloat16' if self.bf16 else 'float32'}"


def find_engine(device: str = "auto", *, workers: int | None = None, deterministic: bool = False, parts: int = 1) -> Engine:
    """The engine for a device: `auto` takes a GPU where there is one. `deterministic` gives up speed for equal bits on a GPU."""
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
        raise ConfigError(f"parts must be a whole number of at least 1, not {parts!r}.")
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 0):
        raise ConfigError(f"workers must be a whole number, 0 or more, not {workers!r}.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"the device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
    count = min(8, torch.get_num_threads()) if workers is None else workers
    world = join_world(chosen)
    if chosen.type != "cuda":
        return Engine(chosen, workers=count, parts=parts, world=world)
    torch.cuda.set_device(chosen)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.deterministic = deterministic
    return Engine(chosen, torch.cuda.is_bf16_supported(), not deterministic, count, parts, align=8, world=world)
