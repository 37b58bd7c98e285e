"""ONNX files: written by torch's exporter, run by ONNX Runtime on the CPU."""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PeelError, StoreError
from ..utils.environment import count_cores
from ..utils.text import first_line

#: What ONNX Runtime says of an axis without a fixed length is a name, or None.
Axis = int | str | None

#: The largest file of protobuf is 2 GiB: the weights of larger networks go into a second file.
MAX_BYTES = 1_800_000_000


def require(package: str) -> Any:
    """An optional package; an error of one line where it is missing."""
    try:
        return import_module(package)
    except ImportError as error:
        name = package.split(".")[0]
        raise PeelError(f"this needs {name}: pip install peel-pruning[deploy]") from error


class OnnxModel(nn.Module):
    """An ONNX file as a module: it takes and returns tensors, as the exported network did."""

    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        super().__init__()
        runtime = require("onnxruntime")
        self.path = path
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads or count_cores()
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        if not path.is_file():
            raise StoreError(f"there is no file {path}.")
        try:
            self.session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            inputs, stored = self.session.get_inputs(), self.session.get_modelmeta().custom_metadata_map
        except Exception as error:  # its errors have no common type
            raise StoreError(f"ONNX Runtime cannot load {path}: {first_line(error)}") from error
        if not inputs:
            raise StoreError(f"{path} takes no input: it is no network.")
        self.input_names = [item.name for item in inputs]
        self.input_shape: list[Axis] = list(inputs[0].shape)
        self.metadata = _parse(stored)

    def forward(self, *inputs: Tensor) -> Any:
        feed = {
            name: value.contiguous().numpy() for name, value in zip(self.input_names, inputs, strict=True)
        }
        outputs = tuple(map(torch.from_numpy, self.session.run(None, feed)))
        return outputs[0] if len(outputs) == 1 else outputs


def _parse(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The metadata that `write_onnx` wrote; that of other programs stays text."""
    values: dict[str, Any] = {}
    for name, text in metadata.items():
        try:
            values[name] = json.loads(text)
        except (ValueError, RecursionError):
            values[name] = text
    return values


def write_onnx(
    model: nn.Module,
    path: Path,
    inputs: tuple[Tensor, ...],
    *,
    outputs: int,
    dynamic_shapes: tuple[dict[int, Any], ...] | None,
    metadata: Mapping[str, Any],
) -> None:
    """Write a model in evaluation mode. Without `dynamic_shapes` it takes the shapes of `inputs` only.

    The metadata are written as JSON, one property each.
    """
    require("onnx")
    require("onnxscript")
    program = torch.onnx.export(
        model,
        inputs,
        dynamo=True,
        dynamic_shapes=dynamic_shapes,
        input_names=["images"] if len(inputs) == 1 else None,
        output_names=["logits"] if outputs == 1 else None,
        verbose=False,
    )
    assert program is not None
    for node in program.model.graph:
        node.metadata_props.clear()  # stack traces, with the paths of this machine
    program.model.metadata_props.update({name: json.dumps(value) for name, value in metadata.items()})
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    program.save(str(path), external_data=size > MAX_BYTES)
