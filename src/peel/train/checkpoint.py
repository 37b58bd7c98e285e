"""Checkpoints: written so that a crash at any moment leaves a valid one, and read newest valid one first."""

from __future__ import annotations

import hashlib
import io
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CorruptFileError, RunError
from ..utils.files import write_bytes

__all__ = ["Checkpoints", "non_persistent_buffers"]

log = logging.getLogger("peel")


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one stage: `NAME-EPOCH-STEP-SHA256.pt`. The two newest are kept."""

    folder: Path
    name: str
    keep: int = 2
    run: str = ""
    """What tells this run from others: a checkpoint of another one is not taken for one's own."""

    def save(self, state: dict[str, Any], epoch: int, step: int, *, goes_back: bool = False) -> Path:
        """Where training goes back to this place, what was kept after it is given up: it would be taken for newer than what comes now."""
        buffer = io.BytesIO()
        torch.save({**state, "run": self.run}, buffer)
        data = buffer.getvalue()
        path = self.folder / f"{self.name}-{epoch:05d}-{step:07d}-{hashlib.sha256(data).hexdigest()}.pt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_bytes(path, data)
        except OSError as error:
            raise RunError(
                f"cannot write the checkpoint {path.name[:40]} to {self.folder}: {error.strerror}. "
                "The checkpoints before it are kept; make room and run the same command again."
            ) from error
        here = self._place(path)
        for later in [
            found
            for found in self._found()
            if goes_back and self._place(found)[:2] >= here[:2] and found != path
        ]:
            later.unlink(missing_ok=True)
        # Files that call themselves newer are damaged or someone else's: they do not push out what is good.
        for old in [found for found in self._found() if self._place(found) <= here][self.keep :]:
            old.unlink(missing_ok=True)
        return path

    def newest(self) -> dict[str, Any] | None:
        """The newest checkpoint whose content agrees with its checksum; None where there is none at all."""
        found = self._found()
        for path in found:
            try:
                data = path.read_bytes()
            except OSError as error:
                log.warning("%s cannot be read (%s); an older checkpoint is used.", path, error.strerror)
                continue
            if hashlib.sha256(data).hexdigest() == path.stem.rsplit("-", 1)[1]:
                try:
                    state: dict[str, Any] = torch.load(
                        io.BytesIO(data), map_location="cpu", weights_only=True
                    )
                    owner = state.pop("run", self.run)
                except Exception as error:  # whatever is in it, it was not written here
                    log.warning(
                        "%s is no checkpoint of peel (%s); an older one is used.", path, type(error).__name__
                    )
                    continue
                if owner == self.run:
                    return state
                log.warning("%s belongs to a run with other settings; an older checkpoint is used.", path)
                continue
            log.warning("%s is damaged; an older checkpoint is used.", path)
        if found:
            raise CorruptFileError(
                f"every checkpoint of stage {self.name} in {self.folder} is damaged or of another run: "
                f"{', '.join(path.name[:40] for path in found)}. "
                "Restore one of them from a copy, or delete them to train this stage from its beginning."
            )
        return None

    def exist(self) -> bool:
        return bool(self._found())

    def clear(self) -> None:
        for path in self._found():
            path.unlink(missing_ok=True)

    def _found(self) -> list[Path]:
        """Newest first."""
        return sorted(
            (path for path in self.folder.glob("*.pt") if self._place(path)), key=self._place, reverse=True
        )

    def _place(self, path: Path) -> tuple[Any, ...]:
        """Epoch, step and checksum; nothing where it is no checkpoint of this stage."""
        found = re.fullmatch(re.escape(self.name) + r"-(\d{5,})-(\d{7,})-([0-9a-f]{64})\.pt", path.name)
        return (int(found[1]), int(found[2]), found[3]) if found else ()


def non_persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that are no part of the model's own state (`persistent=False`): it may change them in training all the same."""
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in kept}
