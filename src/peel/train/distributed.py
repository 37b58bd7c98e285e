"""The processes that train together: one, or as many as `torchrun` started, on one machine or many."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from ..errors import ConfigError, RunError
from ..utils.environment import env_number
from .signals import watch_parent

T = TypeVar("T")

__all__ = ["SINGLE_PROCESS", "World", "init_distributed", "shutdown_distributed"]

#: After this many seconds without an answer from the others, a process gives up instead of waiting for ever.
TIMEOUT = 300.0


@dataclass(frozen=True)
class World:
    """This process among the others. Every method is called by all of them, in the same order."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main_process(self) -> bool:
        """Whether this process writes files and talks to people."""
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """What the first process has, for all."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """What each process has, in the order of their ranks."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process."""
        return flag if self.size == 1 else any(self.gather(flag))

    def first_not_none(self, value: T | None) -> T | None:
        """What the first process has that has anything."""
        return next((found for found in self.gather(value) if found is not None), None)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    @torch.no_grad()
    def average_buffers(self, model: nn.Module) -> None:
        """Statistics of norm layers are each process's own while training; what is evaluated and kept is their mean."""
        if self.size > 1:
            for buffer in model.buffers():
                if buffer.is_floating_point():
                    dist.all_reduce(buffer)
                    buffer.div_(self.size)
                else:
                    dist.broadcast(buffer, src=0)

    def check_equal(self, what: str, value: str) -> None:
        """The same in all processes, or an error: two that disagree would train two networks."""
        digests = self.gather(hashlib.sha256(value.encode()).hexdigest())
        odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if odd:
            raise RunError(
                f"{what} differs between processes: {', '.join(map(str, odd))} disagree with 0. Start them with the same settings."
            )


SINGLE_PROCESS = World()


def init_distributed(device: torch.device) -> World:
    """The world that `torchrun` describes in the environment; alone without it."""
    if env_number("WORLD_SIZE", 1) == 1:
        return SINGLE_PROCESS
    missing = [
        name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
    ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is set, but {', '.join(missing)} is not: start several processes with torchrun or with --gpus."
        )
    if not dist.is_initialized():
        timeout = timedelta(seconds=env_number("PEEL_TIMEOUT", TIMEOUT))
        # Questions and answers go from processor to processor: over NCCL each would wait until the GPU has done all its steps.
        kind = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        with watch_parent():
            store, rank, size = next(rendezvous("env://", timeout=timeout))
            store = dist.PrefixStore(f"life-{_life()}", store)  # type: ignore[attr-defined]
            dist.init_process_group(kind, store=store, rank=rank, world_size=size, timeout=timeout)
    return World(dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"]))


def _life() -> str:
    """How often torchrun has started these processes again.

    Its store outlives them: without a place of their own they may find the addresses of those who died, and wait for them. Agents on
    several machines do not count alike; there, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each life a store of its own.
    """
    return (
        os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if os.environ.get("GROUP_WORLD_SIZE") == "1"
        else "0"
    )


def shutdown_distributed() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
