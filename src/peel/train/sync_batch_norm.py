"""Batch norm over the batch of all processes together (an option; by default each process normalises with its own part)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["SyncBatchNormMode"]


class SyncBatchNormMode(TorchFunctionMode):
    """While this is on, batch norms that train take mean and variance over all processes.

    It works on the function, not on the modules: whatever class a network derives from torch's is covered, and the network stays as it is.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.batch_norm:
            return _joint_batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _joint_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    others = [axis for axis in range(input.ndim) if axis != 1]
    shape = [1, -1] + [1] * (input.ndim - 2)
    values = input.float()
    # Every process has an equal part of the batch.
    count = values.numel() // values.shape[1] * dist.get_world_size()
    mean: Tensor = _Summed.apply(values.sum(others)) / count
    centred = values - mean.view(shape)
    variance: Tensor = _Summed.apply(centred.square().sum(others)) / count
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.detach().to(running_mean.dtype), momentum)
            running_var.lerp_(variance.detach().to(running_var.dtype) * (count / max(1, count - 1)), momentum)
    scaled = centred * torch.rsqrt(variance + eps).view(shape)
    if weight is not None:
        scaled = scaled * weight.view(shape)
    if bias is not None:
        scaled = scaled + bias.view(shape)
    return scaled.to(input.dtype)


class _Summed(torch.autograd.Function):
    """The sum over all processes; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total
