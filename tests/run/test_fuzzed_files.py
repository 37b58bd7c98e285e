"""Files that are nearly right are loaded, or refused in a line or two. benchmarks/fuzz_files.py has more."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from helpers.fuzzing import FORMATS, is_loaded, seeded

pytestmark = pytest.mark.usefixtures("one_thread")

INPUTS = {"TOML": 60}


@pytest.mark.parametrize("name", FORMATS)
def test_each_file_is_loaded_or_refused_in_a_line(name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters
        kind = FORMATS[name](tmp_path)
    count = INPUTS.get(name, 300)
    refused = [is_loaded(kind, seeded(name, 0, number)) for number in range(count)]
    assert 0.02 * count < refused.count("") < 0.7 * count, "most inputs are wrong, and some are not"
