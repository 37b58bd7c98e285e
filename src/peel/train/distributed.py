"""The processes that train together: one, or as many as the launcher started, on one machine or several."""

import gc
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from ..errors import ConfigError, RunError
from ..utils.environment import env_number, timeout_seconds

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among the others. Every method must be called by all of them, in the same order."""

    rank: int = 0
    size: int = 1

    @property
    def is_main_process(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def broadcast(self, value: T) -> T:
        """The value of the main process."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return any(self.gather(flag))

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    @torch.no_grad()
    def average_buffers(self, model: nn.Module) -> None:
        """Average batch-norm statistics, which differ between processes while training."""
        if self.size > 1:
            for buffer in model.buffers():
                if buffer.is_floating_point():
                    dist.all_reduce(buffer)
                    buffer.div_(self.size)
                else:
                    dist.broadcast(buffer, src=0)

    def check_equal(self, what: str, value: str) -> None:
        """Raise an error in all processes unless they have the same value."""
        values = self.gather(value)
        different = [rank for rank, other in enumerate(values) if other != values[0]]
        if different:
            raise RunError(
                f"{what} differs between rank 0 and rank {', '.join(map(str, different))}. "
                "Start all processes with the same settings."
            )


def init_distributed(device: torch.device) -> World:
    """Join the processes that the variables of torchrun describe; a single process without them."""
    if env_number("WORLD_SIZE", 1) == 1:
        return World()
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ConfigError(
                f"WORLD_SIZE is set, but {name} is not: start processes with torchrun or --gpus."
            )
    if not dist.is_initialized():
        timeout = timedelta(seconds=timeout_seconds())
        # Objects travel over gloo: over NCCL each message would wait for the queued GPU work.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        # The store of torchrun outlives its processes, and holds the addresses of those that died. Agents on
        # several machines count restarts differently: there, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
        is_one_machine = os.environ.get("GROUP_WORLD_SIZE") == "1"
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_machine else "0"
        store = dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return World(dist.get_rank(), dist.get_world_size())


def shutdown_distributed() -> None:
    """Leave the process group. What still refers to it is freed first: torch may abort otherwise."""
    if dist.is_available() and dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
