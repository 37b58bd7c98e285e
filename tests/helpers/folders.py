"""What is in the folder of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file with the time it was written at."""
    return {
        str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.read_bytes())
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def kept(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted((folder / "checkpoints").glob("*.pt"))


def weights(folder: Path) -> bytes:
    """Those of the trained original."""
    return (folder / "stages" / "original.safetensors").read_bytes()
