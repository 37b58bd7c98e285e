"""The engine: device, precision, memory, and what makes training fast."""

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import nn

from ..data.datasets import Split
from ..data.torch_data import DatasetSplit, LoaderSplit
from ..errors import ConfigError, OutOfMemoryError
from ..utils.environment import count_cores, env_number
from .distributed import World, init_distributed
from .sync_batch_norm import SyncBatchNormMode

T = TypeVar("T")

log = logging.getLogger("peel")

#: When to compile networks. "auto": on a GPU, when more than ten minutes of training are left.
COMPILE = ("auto", "on", "off")


#: A thread pays off on a CPU from about this many multiply-adds of a layer's forward pass. Processor time of
#: two threads over one, cifar_resnet20 and resnet18: 1.1 at 8M, 0.85 at 33M, 0.65 at 130M, 0.5 at 260M.
MACS_PER_THREAD = 32_000_000


@dataclass(frozen=True)
class Engine:
    """Where and how networks run."""

    device: torch.device
    bf16: bool = False
    """Mixed precision: forward passes in bfloat16, weights and losses in float32."""
    cuda_graphs: bool = False
    """Replay training steps as a CUDA graph: otherwise small networks are bound by kernel launches."""
    workers: int = 0
    """Data loader processes, for images that are read from disk."""
    accumulation_steps: int = 1
    """Micro-batches per batch; their gradients add up to one update."""
    pad_channels: bool = False
    """Pad odd widths with zero channels while training, to widths with fast kernels."""
    compile: str = "off"
    """When to compile networks: one of `COMPILE`."""
    cache_teacher: bool = False
    """Cache the teacher's logits where the augmentation has few enough variants of an image."""
    deterministic: bool = True
    """The same seed gives the same bits."""
    sync_bn: bool = False
    """Batch norm takes its statistics over all processes."""
    world: World = field(default_factory=World)

    def prepare(self, model: nn.Module) -> nn.Module:
        model = model.to(self.device)
        if any(parameter.ndim == 5 for parameter in model.parameters()):
            return model  # channels-last is for images; volumes have a format of their own
        return model.to(memory_format=torch.channels_last)

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    def sync_batch_norm(self, *, alone: bool = False) -> AbstractContextManager[object]:
        """Batch norm over all processes; `alone`, the same computation without waiting for the others."""
        is_on = self.sync_bn and self.world.size > 1
        return SyncBatchNormMode(1 if alone else self.world.size) if is_on else nullcontext()

    @property
    def description(self) -> str:
        precision = "bfloat16" if self.bf16 else "float32"
        if self.device.type == "cuda":
            return f"{torch.cuda.get_device_name(self.device)}, {precision}"
        return f"CPU, {torch.get_num_threads()} threads, {precision}"


def make_engine(
    device: str = "auto",
    *,
    workers: int | None = None,
    deterministic: bool = False,
    accumulate: int = 1,
    compile: str = "auto",
    sync_bn: bool = False,
    threads: int | None = None,
    layer_macs: float | None = None,
) -> Engine:
    """The engine for a device; `auto` prefers a GPU. `deterministic` is slower on a GPU only.

    On a CPU, `threads` are used; by default as many as are worth it for layers of about `layer_macs`
    multiply-adds, which does not depend on what else runs: with other threads, other bits would come out.
    """
    if compile == "on" and (deterministic or sync_bn):
        raise ConfigError("compile cannot be on together with deterministic or sync_bn: choose one of them.")
    if threads is not None and threads > (cores := os.cpu_count() or threads):
        raise ConfigError(f"threads: this machine has {cores} cores. Choose at most as many, not {threads}.")
    chosen = find_device(device)
    is_cuda = chosen.type == "cuda"
    world = init_distributed(chosen)
    if is_cuda:
        torch.cuda.set_device(chosen)
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.deterministic = deterministic
        torch.use_deterministic_algorithms(deterministic, warn_only=deterministic)
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    elif compile == "auto":
        compile = "off"  # on a CPU compiling takes longer than it saves in most trainings
    if threads is None and layer_macs is not None and not is_cuda:
        threads = max(1, min(torch.get_num_threads(), int(layer_macs / MACS_PER_THREAD)))
    if threads is not None:
        torch.set_num_threads(threads)
    if workers is None:
        # One per core; fewer on a CPU, where they compete with training.
        cores = count_cores() // int(env_number("LOCAL_WORLD_SIZE", 1))
        workers = max(1, min(24 if is_cuda else 4, cores))
    return Engine(
        chosen,
        bf16=is_cuda and torch.cuda.is_bf16_supported(including_emulation=False),
        cuda_graphs=is_cuda and not deterministic,
        workers=workers,
        accumulation_steps=accumulate,
        pad_channels=is_cuda,
        compile="off" if deterministic or sync_bn else compile,
        cache_teacher=is_cuda and not deterministic,
        deterministic=deterministic or not is_cuda,
        sync_bn=sync_bn,
        world=world,
    )


def find_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"the device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"training runs on cpu or cuda, not on {name!r}.")
    return device


#: The largest batch of an evaluation, in images and in pixels.
EVAL_IMAGES, EVAL_PIXELS = 1000, 16_000_000


def eval_batch_size(split: Split) -> int:
    """Batch size of forward passes without gradients. The user's own data keep the batch size of training."""
    if isinstance(split, DatasetSplit | LoaderSplit):
        return split.batch_size
    return min(EVAL_IMAGES, max(1, EVAL_PIXELS // (split.shape[1] * split.shape[2])))


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means out of memory. On the CPU torch raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "CPUAllocator" in str(error)
    )


def retry_on_oom(work: Callable[[int], T], batch_size: int, device: torch.device) -> T:
    """Call `work(batch_size)`, again with half the batch size as long as it runs out of memory."""
    while True:
        try:
            return work(batch_size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if batch_size == 1:
                raise OutOfMemoryError(f"a single image does not fit into the memory of {device}.") from None
            batch_size = -(-batch_size // 2)
            torch.cuda.empty_cache()
            log.info("out of memory: forward passes continue with a batch size of %d.", batch_size)
