"""A plain training loop for comparison: DataLoader, torchvision transforms, float32."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from peel.data.in_memory import InMemoryImages
from peel.train.recipe import Recipe


def plain_loop(
    model: nn.Module,
    images: InMemoryImages,
    recipe: Recipe,
    device: torch.device,
    seed: int,
    workers: int,
    steps: int | None,
) -> Iterator[tuple[float, float]]:
    """Loss and seconds of each step, as in torchvision's reference script; `steps` limits their number."""
    size = images.shape[1]
    transform = v2.Compose(
        [
            v2.RandomCrop(size, padding=size // 8),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(images.mean, images.std),
        ]
    )
    torch.backends.cuda.matmul.allow_tf32 = False  # torch's default; convolutions may use TF32
    try:
        torch.manual_seed(seed)
        loader = DataLoader(
            _Dataset(images, transform),
            recipe.batch_size,
            shuffle=True,
            num_workers=workers,
            drop_last=True,
            pin_memory=True,
            generator=torch.Generator().manual_seed(seed),
        )
        model = model.to(device).to(memory_format=torch.contiguous_format).train()
        optimizer = torch.optim.SGD(
            _parameter_groups(model, recipe), lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov
        )
        done = 0
        for _ in range(recipe.epochs):
            began = time.perf_counter()
            for batch, labels in loader:
                for group in optimizer.param_groups:
                    group["lr"] = recipe.lr_at(done, len(loader))
                loss = nn.functional.cross_entropy(
                    model(batch.to(device)), labels.to(device), label_smoothing=recipe.label_smoothing
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                yield loss.item(), time.perf_counter() - began
                began = time.perf_counter()
                done += 1
                if done == steps:
                    return
    finally:
        torch.backends.cuda.matmul.allow_tf32 = True


def _parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [{"params": weights, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]


class _Dataset(Dataset[tuple[Tensor, int]]):
    def __init__(self, images: InMemoryImages, transform: Callable[[Any], Tensor]) -> None:
        self.pixels, self.labels = images.pixels.cpu().numpy(), images.labels.tolist()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.pixels[index])), self.labels[index]
