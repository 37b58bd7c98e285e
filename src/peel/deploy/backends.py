"""Backends: what runs a network. A `Runner` is a network made ready to run on batches by one of them."""

import inspect
import shutil
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, check_choice
from ..graph.capture import untouched
from ..graph.copying import deep_copy
from .onnx_model import OnnxModel, write_onnx

#: torch as it is, compiled by torch.compile, exported and run by ONNX Runtime (on the CPU only).
BACKENDS = ("eager", "compile", "onnxruntime")

#: Runs a network on the inputs of a batch and returns its output when all work is done.
Runner = Callable[..., Any]


def available_backends(device: torch.device) -> list[str]:
    """The backends that are installed and fit the device."""
    has_compiler = device.type == "cuda" or shutil.which("g++") or shutil.which("clang++")
    has_runtime = all(find_spec(name) is not None for name in ("onnx", "onnxscript", "onnxruntime"))
    found = ["eager"]
    found += ["compile"] if has_compiler else []
    found += ["onnxruntime"] if has_runtime and device.type == "cpu" else []
    return found


def can_run(backend: str, model: nn.Module) -> bool:
    """An ONNX file runs in ONNX Runtime only."""
    return backend == "onnxruntime" or not isinstance(model, OnnxModel)


def make_runner(
    backend: str, model: nn.Module, example: Any, *, device: torch.device | None = None, threads: int = 1
) -> Runner:
    """A runner for batches of the shape of `example`. The model is not changed.

    In ONNX Runtime, networks have one tensor as input; in torch, any arguments. `threads` are those of ONNX
    Runtime; torch uses `torch.get_num_threads()`.

    >>> run = make_runner("onnxruntime", model, torch.randn(1, 3, 224, 224))
    >>> run(torch.randn(1, 3, 224, 224))
    """
    check_choice("backend", backend, BACKENDS)
    device = device or torch.device("cpu")
    if backend == "onnxruntime":
        if device.type != "cpu":
            raise ConfigError(f"the backend onnxruntime runs on the CPU here, not on {device}.")
        return _onnx_runner(model, example, threads)
    if not can_run(backend, model):
        raise ConfigError(f"an ONNX file cannot run with the backend {backend}: choose onnxruntime.")
    twin = deep_copy(model).to(device).eval()
    return _torch_runner(twin if backend == "eager" else _compiled(twin), device)


def _torch_runner(model: Callable[..., Any], device: torch.device) -> Runner:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode():
            output = model(*args, **kwargs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return output

    return run


def _compiled(model: nn.Module) -> Callable[..., Any]:
    """Each network is compiled for itself: those of other widths have the same code."""
    options: dict[str, Any] = {"isolate_recompiles": True}
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:  # torch before 2.15
        torch._dynamo.config.recompile_limit = 1024
        options = {}
    compiled: Callable[..., Any] = torch.compile(model, dynamic=False, **options)
    return compiled


def _onnx_runner(model: nn.Module, example: Tensor, threads: int) -> Runner:
    if isinstance(model, OnnxModel):
        return OnnxModel(model.path, threads=threads)
    with tempfile.TemporaryDirectory() as folder, untouched():
        path = Path(folder) / "model.onnx"
        twin = deep_copy(model).eval()
        inputs = example if len(example) > 1 else example.expand(2, *example.shape[1:])
        dynamic = ({0: torch.export.Dim("batch")},)
        write_onnx(twin, path, (inputs,), outputs=0, dynamic_shapes=dynamic, metadata={})
        return OnnxModel(path, threads=threads)
