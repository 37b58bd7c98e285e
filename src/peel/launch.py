"""`--gpus N`: the same command in several processes on this machine. torchrun's agent starts and watches them; what is said and how it ends
is the command's own, as with one process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

__all__ = ["launch"]


def launch(count: int, arguments: list[str]) -> int:
    """The exit code of the process that failed first; 0 where all of them succeed."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # As many threads for each as there are cores for it; torchrun would give it one, and say so at length.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    # Each process says itself what went wrong; the agent would add a page about where it was started.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(parse_args(["--standalone", f"--nproc-per-node={count}", "-m", "peel", *arguments]))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        sys.stderr.write(f"error: process {rank} of {count} was ended by {name}; the others were stopped.\n")
        return 1
    except SignalException as stop:
        # The processes were sent it too, and have kept their state.
        return 128 + stop.sigval
    return 0
