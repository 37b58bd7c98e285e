"""`--gpus N`: the same command in several processes on this machine, started by torchrun's launcher."""

import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence

from ..errors import PeelError
from ..utils.environment import count_cores

#: Where the processes find the command that started them.
COMMAND = "PEEL_COMMAND"

_arguments: list[str] = []


def set_arguments(arguments: Sequence[str]) -> None:
    _arguments[:] = arguments


def command_line() -> str:
    """The command as the user gave it."""
    prefix = "torchrun ... -m " if "TORCHELASTIC_RUN_ID" in os.environ else ""
    return os.environ.get(COMMAND, f"{prefix}peel {shlex.join(_arguments)}")


def launch(count: int) -> int:
    """Run this command in `count` processes. The exit code is that of the first that failed."""
    from torch.cuda import device_count
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise PeelError("torchrun has already started the processes: leave --gpus out.")
    if count < 1:
        raise PeelError(f"--gpus must be at least 1, not {count}.")
    if count > (found := device_count()):
        way_out = f"Give --gpus {found}" if found else "Leave it out"
        raise PeelError(
            f"--gpus {count}: the number of GPUs that torch finds here is {found}. {way_out}, or start "
            f"processes on the CPU: torchrun --nproc-per-node {count} -m peel run ..."
        )
    place = next(i for i, argument in enumerate(_arguments) if argument.partition("=")[0] == "--gpus")
    own = [*_arguments[:place], *_arguments[place + (1 if "=" in _arguments[place] else 2) :]]
    os.environ[COMMAND] = command_line()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() // count)))
    # The processes report their errors themselves.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id="peel",  # torch warns without one
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "peel", *own)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        print(f"error: process {rank} was killed by {name}. The same command resumes.", file=sys.stderr)
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0
