"""Global state of the process that training changes, restored afterwards."""

import contextlib
import os
import threading
from collections.abc import Iterator

import torch

from .environment import count_cores
from .rng import get_rng_state, set_rng_state


@contextlib.contextmanager
def preserve_process_state() -> Iterator[None]:
    """Restores random states, deterministic and precision flags, dtype, threads, variables, current GPU."""
    cpu = torch.device("cpu")
    random_state = get_rng_state(cpu)
    has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpus = torch.cuda.get_rng_state_all() if has_cuda else []
    device = torch.cuda.current_device() if has_cuda else 0
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    threads = torch.get_num_threads()
    environment = dict(os.environ)
    try:
        yield
    finally:
        set_rng_state(random_state, cpu)
        if has_cuda:
            torch.cuda.set_rng_state_all(gpus)
            torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


@contextlib.contextmanager
def share_cores() -> Iterator[None]:
    """OpenMP threads of torch that wait leave their cores to other processes.

    By default they spin, which makes training on a busy machine ten times slower. OMP_WAIT_POLICY=PASSIVE is
    read when torch is loaded, often before peel. But with more threads than cores, GNU's library does not
    spin for long (GOMP_SPINCOUNT in its manual): meanwhile a second team of threads exists, and sleeps.
    """
    threads = torch.get_num_threads()
    if threads == 1 or {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        yield
        return
    is_started, is_over = threading.Event(), threading.Event()

    def hold_team() -> None:
        torch.set_num_threads(max(2, count_cores() - threads + 2))
        torch.zeros(100_000).add_(1)  # large enough to be divided: this starts the team
        torch.set_num_threads(threads)
        is_started.set()
        is_over.wait()

    thread = threading.Thread(target=hold_team, daemon=True)
    thread.start()
    is_started.wait()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
