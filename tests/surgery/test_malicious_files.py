"""Files that mean harm (F11): what claims to be huge is refused within little memory."""

from __future__ import annotations

import json
import resource
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import peel
from helpers.killing import exit_code, start
from helpers.small import Small, small_run

pytestmark = pytest.mark.usefixtures("one_thread")


def declared(path: Path) -> None:
    """A few bytes that are said to be half a gigabyte."""
    rewrite(path, bytes(16))


def rewrite(path: Path, content: bytes) -> None:
    torch.save({"fc.weight": torch.zeros(4)}, path)
    with zipfile.ZipFile(path) as stored:
        parts = {item.filename: stored.read(item) for item in stored.infolist()}
    with zipfile.ZipFile(path, "w") as stored:
        for name, data in parts.items():
            if name.endswith("data.pkl"):
                data = huge(data)
            stored.writestr(name, content if name.endswith("/data/0") else data)


def old_format(path: Path) -> None:
    torch.save({"fc.weight": torch.zeros(4)}, path, _use_new_zipfile_serialization=False)
    path.write_bytes(huge(path.read_bytes()))


def huge(pickled: bytes) -> bytes:
    """The four elements of a tensor become 2**27."""
    assert b"K\x04" in pickled
    return pickled.replace(b"K\x04", b"J" + struct.pack("<i", 2**27))


def stretched(path: Path) -> None:
    torch.save({**Small().state_dict(), "fc.weight": torch.zeros(1).expand(2**27)}, path)


def read_teacher(path: Path, said: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        small_run(weights=path, stages=["original"])
        error = "nothing"
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    said.write_text(json.dumps([error, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024]))


@pytest.mark.parametrize("write", [declared, old_format, stretched])
def test_weights_that_claim_to_be_huge_are_refused_within_little_memory(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "teacher.pt"
    write(path)
    assert path.stat().st_size < 2**20
    assert exit_code(start(read_teacher, path, tmp_path / "said")) == 0
    error, memory = json.loads((tmp_path / "said").read_text())
    assert error.startswith("StoreError: ")
    assert str(path) in error
    assert memory < 2**27


def test_a_saved_model_that_claims_to_be_huge_is_refused(tmp_path: Path) -> None:
    peel.save(Small(), tmp_path / "slim")
    path = tmp_path / "slim.safetensors"
    header = json.dumps({"fc.bias": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(peel.CorruptFileError, match=r"slim.safetensors is corrupt"):
        peel.load(tmp_path / "slim", model=Small())
