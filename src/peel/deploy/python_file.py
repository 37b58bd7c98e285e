"""A Python file that builds a slim network without peel: it reads the files of `peel.save` beside it."""

import contextlib
import inspect
import keyword
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import safetensors.torch
from torch import Tensor, nn

from .. import zoo
from ..errors import ExportError
from ..surgery.info import info_of
from ..surgery.serialization import save
from ..utils.references import load_object, module_of_file
from ..version import __version__
from ..zoo import cifar

#: How a written file begins. No other file is overwritten.
BEGIN = '"""A slim network, written by peel '

TEMPLATE = Template(
    BEGIN
    + '''\
$version, which it does not need: only torch, safetensors$packages.

    from $stem import load, normalize
    model = load()
    logits = model(normalize(pixels))  # pixels: from 0 to 1, images x channels x height x width

$stem.json and $stem.safetensors lie beside this file. The JSON file also names the classes.
"""

import copy
import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import load as load_tensors
from torch import nn

$imports

DOCUMENT = json.loads(Path(__file__).with_suffix(".json").read_text())
INPUT = DOCUMENT.get("input", {})
CLASSES = INPUT.get("classes")


def build():
    """The network before it was slimmed, with random weights."""
    return $call


def load(model=None):
    """The slim network, in evaluation mode. `model`: the network before it was slimmed, if not `build()`."""
    model = build() if model is None else model
    data = Path(__file__).with_suffix(".safetensors").read_bytes()
    if hashlib.sha256(data).hexdigest() != DOCUMENT["weights"]["sha256"]:
        raise ValueError("$stem.safetensors is corrupt, or belongs to another $stem.json")
    old = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    new = {}  # by the id of the old tensor, which several modules may share
    for name, tensor in load_tensors(data).items():
        new[id(old[name])] = nn.Parameter(tensor) if isinstance(old[name], nn.Parameter) else tensor
    for module in model.modules():  # what a forward pass computed and left behind cannot be copied
        kept = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
        new.update({id(value): value.detach() for value in kept if value.grad_fn is not None})
    model = copy.deepcopy(model, new)
    for name, attributes in DOCUMENT["modules"].items():
        module = model.get_submodule(name)
        for attribute, value in attributes.items():
            old = getattr(module, attribute)
            setattr(module, attribute, type(old)(value) if isinstance(old, (list, tuple)) else value)
    return model.eval()


def normalize(pixels):
    """Pixels from 0 to 1 as the network was trained on them; of the shape INPUT["shape"] each."""
    mean, std = (torch.tensor(INPUT.get(name, value)) for name, value in (("mean", [0.0]), ("std", [1.0])))
    return (pixels - mean[:, None, None]) / std[:, None, None]
'''
)

#: Runs the file where peel cannot be imported: FILE INPUTS OUTPUTS.
CHECK = """
import importlib.util, sys
sys.modules["peel"] = None
import torch
from safetensors.torch import load_file, save_file
spec = importlib.util.spec_from_file_location("exported", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [leaf for item in items for leaf in leaves(item)]
model, given, made = module.load(), load_file(sys.argv[2]), {}
for number in sorted({name.partition(" ")[0] for name in given}):
    inputs = [given[name] for name in sorted(given) if name.startswith(number + " ")]
    with torch.no_grad():
        for i, leaf in enumerate(leaves(model(*inputs))):
            made[f"{number} {i:04d}"] = leaf.contiguous()
save_file(made, sys.argv[3])
"""


def check_python_path(path: Path) -> None:
    """Refuse a name that cannot be imported, or a file of the user's own."""
    if not path.stem.isidentifier() or keyword.iskeyword(path.stem):
        raise ExportError(f"{path} cannot be imported under that name: use letters, digits and underscores.")
    if path.exists() and not path.read_text(errors="replace").startswith(BEGIN):
        raise ExportError(f"{path} is there already, and peel did not write it. Name another file.")


def write_python(model: nn.Module, path: Path, build: str | None) -> list[Path]:
    """Write `PATH` with a JSON and a safetensors file beside it. Returns all three."""
    imports, call, package = _builder(model, build)
    if path.stem in {"torch", "safetensors", package} | sys.stdlib_module_names:
        raise ExportError(f"{path} would hide the module {path.stem} from Python. Name another file.")
    json_path = save(model, path.with_suffix(""))
    text = TEMPLATE.substitute(
        version=__version__,
        stem=path.stem,
        packages=f" and {package}" if package else "",
        imports=imports,
        call=call,
    )
    path.write_text(text)
    return [json_path.with_suffix(".safetensors"), json_path, path]


def _builder(model: nn.Module, build: str | None) -> tuple[str, str, str]:
    """The code that imports what builds the original, the call, and the package that it needs, if any."""
    info = info_of(model)
    source, spec = info.source, info.input or {}
    if build is None and "zoo" in source:
        found = zoo.find(source["zoo"])
        package = type(model).__module__.partition(".")[0]
        given = "".join(f", {name}={value!r}" for name, value in source["arguments"].items())
        call = f'("{found.name}"{given})'
        if found.source == zoo.TORCHVISION:
            return "import torchvision", f"torchvision.models.get_model{call}", package
        if found.source == zoo.TIMM:
            return "import timm", f"timm.create_model{call}", package
        needed = "" if package == "peel" else package
        code = (
            f"# The original network is built by the code up to the next line of dashes.\n{{}}\n# {'-' * 40}"
        )
        return (
            code.format(inspect.getsource(cifar).rstrip()),
            f'CIFAR_MODELS["{found.name}"]({given[2:]})',
            needed,
        )
    place, _, name = (build or str(source["class"])).rpartition(":")
    if place == "__main__" or "<locals>" in name:
        raise ExportError(
            f"{name} is defined in {place}, where another program cannot import it. Put it into a file, and "
            'name a callable without arguments that builds it: build="package.module:callable" (--model).'
        )
    target = load_object(f"{place}:{name}", ExportError)
    module = module_of_file(Path(place))[1] if place.endswith(".py") else place
    return (
        f"from {module} import {name.partition('.')[0]}",
        f"{name}({_arguments(target, spec)})",
        module.partition(".")[0],
    )


def _arguments(target: Any, spec: Mapping[str, Any]) -> str:
    """The number of classes, where the callable takes it: `peel run` builds it in the same way."""
    names: Collection[str] = ()
    with contextlib.suppress(TypeError, ValueError):  # not every callable has a signature
        names = inspect.signature(target).parameters
    return f"num_classes={len(spec['classes'])}" if "num_classes" in names and "classes" in spec else ""


def run_python(path: Path, build: str | None, several: Sequence[tuple[Tensor, ...]]) -> list[list[Tensor]]:
    """What the network that a written file builds returns, in a process in which peel is missing."""
    place = (build or "").rpartition(":")[0]
    roots = [str(module_of_file(Path(place))[0])] if place.endswith(".py") else []
    roots += [os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "inputs", Path(folder) / "outputs"
        named = {
            f"{n:04d} {i:04d}": value for n, inputs in enumerate(several) for i, value in enumerate(inputs)
        }
        safetensors.torch.save_file(named, given)
        command = [sys.executable, "-c", CHECK, str(path), str(given), str(made)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(roots)}
        ended = subprocess.run(command, capture_output=True, text=True, env=environment)
        if ended.returncode:
            last = (ended.stderr.strip() or f"exit code {ended.returncode}").splitlines()[-1]
            raise ExportError(
                f"the written Python file does not build the network: {last}. Name a callable without "
                'arguments that builds it before slimming: build="package.module:callable" (--model).'
            )
        outputs = safetensors.torch.load_file(made)
    numbers = sorted({name.partition(" ")[0] for name in named})
    return [[outputs[name] for name in sorted(outputs) if name.startswith(f"{n} ")] for n in numbers]
