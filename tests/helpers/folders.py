"""The content of run folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from peel.graph.rebuild import tensors_of
from peel.surgery.info import info_of


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file: name -> (time of its last change, bytes)."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def kept(folder: Path) -> list[Path]:
    """The checkpoints, oldest first."""
    return sorted((folder / "checkpoints").glob("*.pt"))


def weights(folder: Path) -> bytes:
    """The weights of the trained original, without the header of the file, which names its class."""
    data = (folder / "stages" / "original.safetensors").read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


def save_pair(model: nn.Module, path: Path) -> None:
    """Save a model as version 1 of the format did: a JSON file beside the safetensors file."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors_of(model).items()}
    save_file(tensors, path.with_suffix(".safetensors"), {"format": "pt"})
    info = info_of(model)
    document = {
        "format": "peel-model",
        "version": 1,
        "model": info.source,
        "widths": info.widths,
        "modules": info.modules,
        "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "costs": info.costs,
        "input": info.input or {},
        "weights": {"file": f"{path.name}.safetensors", "sha256": ""},
        "checksum": "",
    }
    path.with_suffix(".json").write_text(json.dumps(document))
