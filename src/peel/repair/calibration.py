"""Unlabeled images for networks that are not trained, and batch-norm statistics measured on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map  # has no public name

from ..errors import DataError, PeelError
from ..graph.channel_graph import ChannelGraph
from ..graph.layers import refuse_inference_tensors, refuse_meta_tensors

#: Images that are taken from an iterable of batches. A tensor is used whole.
MAX_IMAGES = 1024

#: Bytes of activations and stored outputs that may be held at a time.
MEMORY = 4 * 2**30

Images = Tensor | Mapping[str, Any] | Iterable[Any]


def images_in_memory(graph: ChannelGraph, most: int) -> int:
    """How many images run together, at most `most`. A GPU prepares convolutions once for each number."""
    return max(1, min(most, MEMORY // max(1, graph.activation_bytes())))


def make_batches(images: Images, images_per_batch: int) -> list[Any]:
    """Batches as the model takes them: tensors of at most so many images, or what an iterable gives.

    Of a batch that is a tuple or list (images and labels), the first element counts. A dict holds keyword
    arguments.
    """
    if isinstance(images, Mapping):
        batches = _split(images, images_per_batch)
    else:
        batches = [images] if isinstance(images, Tensor) else _take(images)
    if batches and not any(isinstance(value, Tensor) for value in tree_leaves(batches)):
        raise DataError(
            f"images holds no tensor, but {type(tree_leaves(batches)[0]).__name__}; give tensors (of numpy "
            "arrays: torch.from_numpy)."
        )
    if not any(map(count_images, batches)):
        raise DataError("images is empty; give some images as the network takes them, a few hundred say.")
    _refuse_not_finite(batches)
    _refuse_constant(batches)
    return merge(batches, images_per_batch)


def _split(arguments: Mapping[str, Any], images_per_batch: int) -> list[Any]:
    """Batches of keyword arguments, where all tensors have as many images."""
    counts = {len(value) for value in arguments.values() if isinstance(value, Tensor) and value.ndim}
    if len(counts) != 1:
        return [dict(arguments)]
    (count,) = counts
    return [
        {
            name: value[start : start + images_per_batch]
            if isinstance(value, Tensor) and value.ndim
            else value
            for name, value in arguments.items()
        }
        for start in range(0, count, images_per_batch)
    ]


def merge(batches: list[Any], images_per_batch: int) -> list[Any]:
    """Tensors of at most so many images, where the batches are plain tensors."""
    is_plain = bool(batches) and all(isinstance(batch, Tensor) and batch.ndim > 0 for batch in batches)
    if not is_plain or len({(batch.shape[1:], batch.dtype) for batch in batches}) > 1:
        return batches
    # One tensor, cut anew: a GPU prepares convolutions for each batch size once.
    whole = batches[0] if len(batches) == 1 else torch.cat(batches)
    return list(whole.split(max(1, images_per_batch)))


def _refuse_not_finite(batches: list[Any]) -> None:
    """NaN in one image would spread to the statistics of all."""
    for number, batch in enumerate(batches):
        for tensor in tree_leaves(batch):
            if isinstance(tensor, Tensor) and not torch.isfinite(tensor).all():
                count = int((~torch.isfinite(tensor)).sum())
                raise DataError(
                    f"images holds {count} values that are not finite (NaN or inf), in batch {number}: leave "
                    "these images out, or check their normalization (a std of 0?)."
                )


def _refuse_constant(batches: list[Any]) -> None:
    """Layers cannot be fitted, and channels not compared, where nothing varies."""
    tensors = [tensor for tensor in tree_leaves(batches) if isinstance(tensor, Tensor) and tensor.numel()]
    value = tensors[0].flatten()[0].item()
    if all((tensor == value).all() for tensor in tensors):
        raise DataError(
            f"images are constant: every value is {value:g}. Give images that vary, as the network takes "
            "them (black ones are often files that were not read, or a wrong normalization)."
        )


def _take(images: Iterable[Any]) -> list[Any]:
    taken: list[Any] = []
    count = 0
    try:
        iterator = iter(images)
    except TypeError:
        raise DataError(
            f"images is a {type(images).__name__}; give a tensor, or an iterable of batches (a DataLoader)."
        ) from None
    for batch in iterator:
        batch = dict(batch) if isinstance(batch, Mapping) else batch
        taken.append(batch[0] if isinstance(batch, tuple | list) and batch else batch)
        count += count_images(taken[-1])
        if count >= MAX_IMAGES:
            break
    return taken


def count_images(batch: Any) -> int:
    if isinstance(batch, list):
        return len(batch)
    return next((len(value) for value in tree_leaves(batch) if isinstance(value, Tensor) and value.ndim), 0)


def run_model(model: nn.Module, batch: Any) -> Any:
    """A forward pass; a tuple holds positional arguments, a dict keyword arguments.

    Tensors are moved to the device of the model. Whatever the code of the model raises says that it cannot
    take the batch.
    """
    device = device_of(model)
    batch = tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, batch)
    try:
        if isinstance(batch, dict):
            return model(**batch)
        return model(*batch) if isinstance(batch, tuple) else model(batch)
    except PeelError:
        raise
    except Exception as error:
        raise DataError(f"the model cannot take these images: {error or type(error).__name__}") from error


def device_of(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Eval mode without gradients. Modes and random states are restored at the end."""
    for model in models:
        refuse_meta_tensors(model)
    modes = [(module, module.training) for model in models for module in model.modules()]
    devices = {device_of(model) for model in models}
    cuda = [device for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(devices=cuda), torch.inference_mode(False), torch.no_grad():
        try:
            for model in models:
                model.eval()
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def recalibrate(model: nn.Module, images: Images, *, batch_size: int = 256) -> None:
    """Measure the means and variances of all batch norms on unlabeled images, in place.

    Nothing else changes, and nothing at all if the model cannot take the images. `images`: a tensor, or an
    iterable of batches; of a batch that is a tuple or list, the first element counts.

    >>> peel.recalibrate(small, images)
    """
    refuse_inference_tensors(model)
    norms = [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None
    ]
    batches = make_batches(images, batch_size)
    momenta = [norm.momentum for norm in norms]
    before = [{name: buffer.clone() for name, buffer in norm.named_buffers()} for norm in norms]
    with evaluating(model):
        try:
            for norm in norms:
                norm.reset_running_stats()
                norm.train()
                norm.momentum = None  # the mean over the batches
            for batch in batches if norms else ():
                run_model(model, batch)
        except BaseException:
            for norm, buffers in zip(norms, before, strict=True):
                norm.load_state_dict({**norm.state_dict(), **buffers})
            raise
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
