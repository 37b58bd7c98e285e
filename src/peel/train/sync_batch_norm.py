"""Batch norm over the images of all processes.

torch.nn.SyncBatchNorm needs a GPU and replaces modules, which loses subclasses such as timm's BatchNormAct2d.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class SyncBatchNormMode(TorchFunctionMode):
    """While active, `F.batch_norm` in training mode takes mean and variance over all processes.

    With `processes=1`, the same is computed for this process alone: nothing waits for another process.
    """

    def __init__(self, processes: int) -> None:
        super().__init__()
        self.processes = processes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            return _sync_batch_norm(self.processes, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _sync_batch_norm(
    processes: int,
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
    axes = [axis for axis in range(input.ndim) if axis != 1]
    shape = [1, -1] + [1] * (input.ndim - 2)
    values = input.float()
    # All processes have equally many images.
    count = values.numel() // values.shape[1] * processes
    total = _AllReduce.apply if processes > 1 else torch.clone
    mean: Tensor = total(values.sum(axes)) / count
    centered = values - mean.view(shape)
    variance: Tensor = total(centered.square().sum(axes)) / count
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_(variance.to(running_var.dtype) * (count / max(1, count - 1)), momentum)
    normalized = centered * torch.rsqrt(variance + eps).view(shape)
    if weight is not None:
        normalized = normalized * weight.view(shape)
    if bias is not None:
        normalized = normalized + bias.view(shape)
    return normalized.to(input.dtype)


class _AllReduce(torch.autograd.Function):
    """Differentiable all-reduce. That of torch.distributed.nn is deprecated."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _AllReduce.forward(ctx, gradient)
