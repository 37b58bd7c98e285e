"""Where and how a network runs: the device, its precision and memory format."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..errors import ConfigError, did_you_mean
from ..utils.environment import count_cores, env_number
from .distributed import SINGLE_PROCESS, World, init_distributed
from .sync_batch_norm import SyncBatchNormMode

__all__ = ["COMPILE", "Engine", "make_engine"]

COMPILE: dict[str, str] = {
    "auto": "on a GPU, when what is left of the training takes longer than ten minutes",
    "on": "from the first step",
    "off": "never",
}


@dataclass(frozen=True)
class Engine:
    device: torch.device
    bf16: bool = False
    """Forward passes in bfloat16; weights and losses stay in float32."""
    cuda_graphs: bool = False
    """Training steps recorded once as a CUDA graph and replayed: small networks are bound by launches otherwise."""
    workers: int = 0
    """Processes that decode images, where they are read from disk."""
    accumulation_steps: int = 1
    """In how many parts a batch goes through the network; gradients add up, and the weights move once."""
    pad_channels: bool = False
    """Odd widths are padded with zero channels while training, to widths whose kernels are fast."""
    compile: str = "off"
    """Whether networks are turned into fused kernels before training: on, off, or auto, when the steps that are left repay it."""
    cache_teacher: bool = False
    """What a teacher says is kept for every view of every image, where views can be counted: asked once for all students."""
    deterministic: bool = True
    """The same seed gives the same bits."""
    sync_bn: bool = False
    """Batch norms take their statistics over all processes instead of each over its part."""
    world: World = SINGLE_PROCESS
    """The processes that train together."""

    def prepare(self, model: nn.Module) -> nn.Module:
        return model.to(self.device).to(memory_format=torch.channels_last)

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    def sync_batch_norm(self) -> AbstractContextManager[object]:
        return SyncBatchNormMode() if self.sync_bn and self.world.size > 1 else nullcontext()

    @property
    def description(self) -> str:
        name = (
            torch.cuda.get_device_name(self.device)
            if self.device.type == "cuda"
            else f"CPU, {torch.get_num_threads()} threads"
        )
        return f"{name}, {'bfloat16' if self.bf16 else 'float32'}"


def _workers(device: torch.device) -> int:
    """One process per core that this one may use; on a CPU fewer, as they share the cores with training."""
    return max(
        1, min(24 if device.type == "cuda" else 4, count_cores() // int(env_number("LOCAL_WORLD_SIZE", 1)))
    )


def make_engine(
    device: str = "auto",
    *,
    workers: int | None = None,
    deterministic: bool = False,
    accumulate: int = 1,
    compile: str = "auto",
    sync_bn: bool = False,
) -> Engine:
    """The engine for a device: `auto` takes a GPU where there is one. `deterministic` gives up speed for equal bits on a GPU."""
    if compile not in COMPILE:
        raise ConfigError(
            f"compile is one of {', '.join(COMPILE)}, not {compile!r}.{did_you_mean(compile, COMPILE)}"
        )
    if compile == "on" and (deterministic or sync_bn):
        raise ConfigError(
            "a network that is compiled is neither deterministic nor has it batch norms over all processes: choose one."
        )
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ConfigError(f"accumulate must be a whole number of at least 1, not {accumulate!r}.")
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
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"training runs on cpu or cuda, not on {device!r}.")
    count = _workers(chosen) if workers is None else workers
    world = init_distributed(chosen)
    common = Engine(chosen, workers=count, accumulation_steps=accumulate, sync_bn=sync_bn, world=world)
    if chosen.type != "cuda":
        # Compiling takes longer than most trainings on a CPU are worth, so it happens there only where it was asked for.
        return replace(common, compile="on" if compile == "on" else "off")
    torch.cuda.set_device(chosen)
    torch.set_float32_matmul_precision("high")
    # Either way: another run in this process may have had it otherwise.
    torch.backends.cudnn.deterministic = deterministic
    torch.use_deterministic_algorithms(deterministic, warn_only=deterministic)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        return replace(
            common, bf16=torch.cuda.is_bf16_supported(including_emulation=False), pad_channels=True
        )
    return replace(
        common,
        bf16=torch.cuda.is_bf16_supported(including_emulation=False),
        cuda_graphs=True,
        deterministic=False,
        pad_channels=True,
        cache_teacher=True,
        compile="off" if sync_bn else compile,
    )
