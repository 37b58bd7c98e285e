"""Where and how a network runs: the device, its precision and memory format."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import ConfigError

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

    def prepare(self, model: nn.Module) -> nn.Module:
        return model.to(self.device).to(memory_format=torch.channels_last)

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    @property
    def description(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        return f"{name}, {'bfloat16' if self.bf16 else 'float32'}"


def find_engine(device: str = "auto", *, workers: int | None = None, deterministic: bool = False) -> Engine:
    """The engine for a device: `auto` takes a GPU where there is one. `deterministic` gives up speed for equal bits on a GPU."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"the device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
    count = min(8, torch.get_num_threads()) if workers is None else workers
    if chosen.type != "cuda":
        return Engine(chosen, workers=count)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.deterministic = deterministic
    return Engine(chosen, bf16=torch.cuda.is_bf16_supported(), graphs=not deterministic, workers=count)
