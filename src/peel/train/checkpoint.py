"""Checkpoints: a crash at any moment leaves a valid one, and the newest valid one is loaded."""

import hashlib
import io
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CorruptFileError, RunError
from ..utils.files import write_bytes

log = logging.getLogger("peel")


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one stage, `NAME-EPOCH-STEP-SHA256.pt`: the newest and the one before it."""

    folder: Path
    name: str
    run: str = ""
    """Identifies the run. Checkpoints of other runs are not loaded."""

    def save(self, state: dict[str, Any], epoch: int, step: int) -> Path:
        """Write a checkpoint and delete all but the one before it, also those that claim to be later."""
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
        previous = next((found for found in self._found() if found < path), path)
        for found in self._found():
            if found not in (path, previous):
                found.unlink(missing_ok=True)
        return path

    def newest(self) -> dict[str, Any] | None:
        """Load the newest valid checkpoint of this run; None where there is no checkpoint."""
        found = self._found()
        for path in found:
            try:
                data = path.read_bytes()
                if hashlib.sha256(data).hexdigest() != path.stem.rsplit("-", 1)[1]:
                    raise ValueError("it does not match its checksum")
                state: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
                if state.pop("run") != self.run:
                    raise ValueError("it belongs to a run with other settings")
                return state
            except Exception as error:  # torch.load raises many kinds
                reason = str(error).partition("\n")[0] or type(error).__name__
                log.warning("%s is not used: %s.", path, reason)
        if found:
            raise CorruptFileError(
                f"every checkpoint of stage {self.name} in {self.folder} is corrupt or of another run: "
                f"{', '.join(path.name[:40] for path in found)}. "
                "Restore one of them from a copy, or delete them to train this stage from its beginning."
            )
        return None

    def clear(self) -> None:
        for path in self._found():
            path.unlink(missing_ok=True)

    def _found(self) -> list[Path]:
        """All checkpoints of this stage, newest first."""
        pattern = f"{self.name}-{'[0-9]' * 5}-{'[0-9]' * 7}-{'?' * 64}.pt"
        return sorted(self.folder.glob(pattern), reverse=True)


def non_persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that are not in the state dict (`persistent=False`). Training may change them all the same."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}
