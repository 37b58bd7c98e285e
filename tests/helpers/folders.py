"""The content of run folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


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
    """The weights of the trained original."""
    return (folder / "stages" / "original.safetensors").read_bytes()
