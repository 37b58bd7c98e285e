"""Imported by the server that test processes are forked from: a run without training, to import everything.

Nothing is trained here: the threads of a backward pass do not survive a fork.
"""

import tempfile

import torch

from helpers import killing  # noqa: F401
from helpers.small import Dropping, small_run, taught

torch.set_num_threads(1)
with tempfile.TemporaryDirectory() as folder:
    small_run(Dropping(), weights=taught(), stages=["original"], output=f"{folder}/run")
