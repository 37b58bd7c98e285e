"""`export`: a network as a file that runs elsewhere, checked by running it before it gets its name."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves  # has no public name

from ..errors import ExportError, PeelError
from ..graph.capture import untouched
from ..graph.copying import deep_copy
from ..surgery.info import info_of
from ..surgery.serialization import load, save
from ..utils.files import temporary_folder
from ..utils.text import first_line
from ..version import __version__
from .networks import shape_of
from .onnx_model import OnnxModel, write_onnx

#: Batches that an exported file is run with.
BATCHES = (1, 5)
#: The largest difference, relative to the largest output.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Exported:
    """What was written: `path` is the file that was asked for, `files` are all."""

    path: Path
    files: tuple[Path, ...]
    batches: tuple[int, ...]
    """The batches that it was run with."""
    difference: float
    """The largest difference to torch, relative to the largest output."""


@dataclass(frozen=True)
class Job:
    """A network on the CPU, in evaluation mode, and how it is exported."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    """Example inputs, with the batch axis first."""
    outputs: int = 1
    """How many tensors it returns."""
    batch: int | None = None
    """None: any batch."""

    def examples(self, batch: int) -> tuple[Tensor, ...]:
        """Random inputs with this batch; what is no floating-point number is repeated."""
        return tuple(
            torch.randn(batch, *value.shape[1:], dtype=value.dtype)
            if value.is_floating_point()
            else value[:1].expand(batch, *value.shape[1:]).contiguous()
            for value in self.inputs
        )

    @property
    def metadata(self) -> dict[str, Any]:
        """What travels with the network: how to feed it, its costs, where it comes from."""
        info = info_of(self.model)
        costs = {name: info.costs[name] for name in ("macs", "params") if name in info.costs}
        made_by = {"peel": __version__, "torch": torch.__version__.split("+")[0]}
        shape = list(self.inputs[0].shape[1:])
        return {**(info.input or {}), "shape": shape, **costs, "model": dict(info.source), "made_by": made_by}


#: Runs what a file holds on several batches: the outputs of each.
Run = Callable[[Sequence[tuple[Tensor, ...]]], list[list[Tensor]]]


def export(
    model: nn.Module,
    path: str | Path,
    example_input: Tensor | tuple[Tensor, ...] | None = None,
    *,
    batch: int | None = None,
) -> Exported:
    """Write a model as `.onnx`, `.pt2` (torch.export), or `.safetensors` as `peel.save` does.

    The file takes any batch; with `batch`, only this one. Before it gets its name it is run at the batches 1
    and 5: it must agree with torch to 1e-4, with the same best class. On any failure nothing is left behind.
    `example_input` is by default of the shape that the model was trained or traced with.

    >>> peel.export(result.model, "slim.onnx").difference
    """
    path = Path(path)
    check_path(path)
    writer = WRITERS[path.suffix]
    name = type(model).__name__
    job = _prepare(model, example_input, batch)
    with folder_beside(path) as folder:
        try:
            with untouched():
                run = writer(job, folder / path.name)
        except PeelError:
            raise
        except Exception as error:
            raise ExportError(f"{name} cannot be exported to {path.suffix}: {_cause(error)}") from error
        difference = check(job, run, name)
        files = publish(folder, path)
    return Exported(path, files, _batches(job), difference)


def check_path(path: Path) -> None:
    """Refuse a file whose name says no format."""
    if path.suffix not in WRITERS:
        kinds = ", ".join(WRITERS)
        raise ExportError(f"{path} has no format that peel can export: end its name in one of {kinds}.")


@contextlib.contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """A temporary folder beside a file, in which it is written."""
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(temporary_folder(path.parent))
        except OSError as error:
            raise ExportError(f"cannot write to {path.parent}: {error.strerror}.") from error
        yield folder


def publish(folder: Path, path: Path) -> tuple[Path, ...]:
    """Move all files of a folder to where `path` lies; `path` itself comes last."""
    try:
        files = [file for file in folder.iterdir() if file.name != ".lock"]
        files.sort(key=lambda file: (file.name == path.name, file.name))
        return tuple(file.replace(path.parent / file.name) for file in files)
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error.strerror}.") from error


def _prepare(model: nn.Module, example: Tensor | tuple[Tensor, ...] | None, batch: int | None) -> Job:
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise ExportError(f"only a torch.nn.Module can be exported, not a {name}.")
    if batch is not None and batch < 1:
        raise ExportError(f"batch must be at least 1, not {batch}.")
    shape = shape_of(info_of(model))
    if example is None and shape is None:
        raise ExportError(f"the input shape of {name} is not known: give an example_input.")
    given = example if example is not None else torch.zeros(1, *(shape or ()))
    inputs = given if isinstance(given, tuple) else (given,)
    if not all(isinstance(value, Tensor) and value.ndim > 0 for value in inputs):
        raise ExportError("example_input must be a tensor, or a tuple of tensors, with the batch axis first.")
    twin = deep_copy(model).cpu().eval()
    job = Job(twin, tuple(value.detach().cpu() for value in inputs), batch=batch)
    try:
        return replace(job, outputs=len(_call(twin, job.examples(2))))
    except Exception as error:
        shapes = ", ".join(str((2, *value.shape[1:])) for value in inputs)
        raise ExportError(f"{name} cannot run on inputs of shape {shapes}: {first_line(error)}") from error


@torch.no_grad()
def _call(model: Callable[..., Any], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """All tensors that a model returns."""
    return [leaf for leaf in tree_leaves(model(*inputs)) if isinstance(leaf, Tensor)]


def _batches(job: Job) -> tuple[int, ...]:
    return BATCHES if job.batch is None else (job.batch,)


def check(job: Job, run: Run, name: str) -> float:
    """Compare what a file computes with the network. Returns the largest relative difference."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inputs = [job.examples(batch) for batch in _batches(job)]
    try:
        outputs = run(inputs)
    except PeelError:
        raise
    except Exception as error:
        raise ExportError(f"the exported {name} does not run: {first_line(error)}") from error
    differences = [0.0]
    for batch, given, found in zip(_batches(job), inputs, outputs, strict=True):
        text = f"the exported {name}, with a batch of {batch},"
        try:
            differences += _compare(_call(job.model, given), found, text)
        except ExportError as error:
            raise ExportError(f"{error}{_sensitivity(job, given)}") from None
    return max(differences)


def _sensitivity(job: Job, inputs: tuple[Tensor, ...]) -> str:
    """A remark where torch itself does not compute the network within the tolerance: nobody else can."""
    twin = deep_copy(job.model).double()
    exact = _call(twin, tuple(value.double() if value.is_floating_point() else value for value in inputs))
    first, second = exact[0].float(), _call(job.model, inputs)[0]
    difference = float((first - second).abs().max() / first.abs().max())
    if difference <= TOLERANCE:
        return ""
    text = f"In torch, float32 and float64 differ by {difference:.2g}"
    return f" {text}: rounding errors explode in this network (is it trained?)."


def _compare(expected: Sequence[Tensor], found: Sequence[Tensor], text: str) -> list[float]:
    shapes = [[tuple(value.shape) for value in values] for values in (expected, found)]
    if shapes[0] != shapes[1]:
        raise ExportError(f"{text} returns shapes {shapes[1]}, the network {shapes[0]}.")
    differences = []
    for one, other in zip(expected, found, strict=True):
        scale = max(float(one.abs().max()), 1e-12) if one.numel() else 1.0
        difference = float((one - other).abs().max()) / scale if one.numel() else 0.0
        if not difference <= TOLERANCE:  # also where a value is not a number
            raise ExportError(f"{text} differs from the network by {difference:.2g} of its largest output.")
        if one.ndim == 2:
            # Scores that are equal within the tolerance may change places.
            lost = one.max(1).values - one.gather(1, other.argmax(1, keepdim=True))[:, 0]
            if float(lost.max()) > TOLERANCE * scale:
                raise ExportError(f"{text} chooses another class than the network.")
        differences.append(difference)
    return differences


def _cause(error: BaseException) -> str:
    """The kind and first line of what went wrong first."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"


def _dynamic(job: Job) -> tuple[dict[int, Any], ...] | None:
    if job.batch is not None:
        return None
    batch = torch.export.Dim("batch")
    return tuple({0: batch} for _ in job.inputs)


def _in_process(model: Callable[..., Any]) -> Run:
    return lambda several: [_call(model, inputs) for inputs in several]


def _to_onnx(job: Job, path: Path) -> Run:
    write_onnx(
        job.model,
        path,
        job.examples(job.batch or 2),
        outputs=job.outputs,
        dynamic_shapes=_dynamic(job),
        metadata=job.metadata,
    )
    return _in_process(OnnxModel(path))


def _to_pt2(job: Job, path: Path) -> Run:
    program = torch.export.export(job.model, job.examples(job.batch or 2), dynamic_shapes=_dynamic(job))
    torch.export.save(program, path, extra_files={"peel.json": json.dumps(job.metadata)})
    return _in_process(torch.export.load(path).module())


def _to_safetensors(job: Job, path: Path) -> Run:
    save(job.model, path)
    original = None if "zoo" in info_of(job.model).source else job.model
    return _in_process(load(path, model=original).eval())


#: Suffix -> function that writes a file and returns what runs it.
WRITERS: dict[str, Callable[[Job, Path], Run]] = {
    ".onnx": _to_onnx,
    ".pt2": _to_pt2,
    ".safetensors": _to_safetensors,
}
