"""What reads the files of each format, and random inputs for it. benchmarks/fuzz_files.py runs many of them.

An input must be loaded, or end in a `PeelError` of one or two lines.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import peel
from helpers.deploy import slim_small
from helpers.folders import save_pair
from helpers.latency import planted_model
from helpers.mutations import (
    ODD,
    join_safetensors,
    json_bytes,
    mutate,
    mutate_bytes,
    mutated_toml,
    split_safetensors,
)
from helpers.small import Small, few_digits, fresh, small_run, taught
from peel import zoo
from peel.deploy.evaluation import evaluate_network, load_data_for
from peel.deploy.networks import load_network, make_network
from peel.errors import PeelError
from peel.report import RunRecord, page, render
from peel.run import loading
from peel.run.bench import latency_notes, stored_speed
from peel.run.prune import prune
from peel.run.result import Record, Result
from peel.run.single import Run
from peel.run.store import RunFolder
from peel.run.subject import State, check_state
from peel.run.weights import load_weights
from peel.surgery import attach_info, info_of
from peel.surgery.serialization import read_info
from peel.utils.files import parse_toml, read_file

#: The message of a resume with other settings has a line for each, of at most 12.
CHANGES = "was started with other settings"


class Format:
    """Files of one format: `write` makes the random input, `read` calls what reads it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, rng: random.Random) -> None:
        raise NotImplementedError

    def read(self, rng: random.Random) -> None:
        raise NotImplementedError


def check_message(error: PeelError) -> None:
    """Messages are short."""
    text = str(error)
    limit = 16 if CHANGES in text else 2
    if text.count("\n") + 1 > limit or len(text) > 20_000:
        raise AssertionError(
            f"a message of {text.count(chr(10)) + 1} lines, {len(text)} characters: {text[:300]}"
        )


def is_loaded(kind: Format, rng: random.Random) -> str:
    """Empty where the input was loaded; else the message that refused it. Anything else is raised."""
    limit = sys.getrecursionlimit()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.setrecursionlimit(10_000)  # deep documents can be written
        try:
            kind.write(rng)
        finally:
            sys.setrecursionlimit(limit)
    try:
        kind.read(rng)
    except PeelError as error:
        check_message(error)
        return str(error) or "(no message)"
    return ""


class ModelFiles(Format):
    """What `peel.save` writes, of both versions."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        model = zoo.create("cifar_resnet20", num_classes=10)
        graph = peel.trace(model, torch.zeros(1, 3, 8, 8))
        by_name = peel.slim(model, peel.uniform(graph, "30%"), graph=graph, weights="inherit")
        self.files: list[tuple[dict[str, Any], bytes, dict[str, Any] | None]] = []
        whole = Small()
        attach_info(whole, replace(info_of(whole), input={"shape": [3, 8, 8]}))
        for network in (slim_small(), slim_small(), whole, by_name):
            peel.save(network, folder / "base")
            self.files.append((*split_safetensors((folder / "base.safetensors").read_bytes()), None))
        (folder / "base.safetensors").unlink()
        save_pair(slim_small(), folder / "pair")
        pair = split_safetensors((folder / "pair.safetensors").read_bytes())
        self.files.append((*pair, json.loads((folder / "pair.json").read_text())))
        self.path = folder / "model.safetensors"

    def write(self, rng: random.Random) -> None:
        header, tensors, old = copy.deepcopy(rng.choice(self.files))
        self.path.with_suffix(".json").unlink(missing_ok=True)
        kind, metadata = rng.random(), header["__metadata__"]
        if kind < 0.7 and old is not None:
            self.path.with_suffix(".json").write_bytes(json_bytes(rng, old))
        elif kind < 0.7:
            metadata["peel"] = json_bytes(rng, json.loads(metadata["peel"])).decode(errors="replace")
        elif kind < 0.8:
            header = mutate(rng, header)
        elif kind < 0.85:
            tensors = mutate_bytes(rng, tensors)
        data = join_safetensors(json.dumps(header).encode(), tensors)
        if old is not None and kind >= 0.7:
            self.path.with_suffix(".json").write_text(json.dumps(old))
        if kind >= 0.85:
            front = 8 + len(json.dumps(header))
            data = mutate_bytes(rng, data, 0, rng.choice((8, front, len(data))))
        self.path.write_bytes(data)

    def read(self, rng: random.Random) -> None:
        if "zoo" in read_info(self.path).source:
            load_network(str(self.path))
            return
        loaded = peel.load(self.path, model=Small())
        make_network("model", loaded)
        peel.save(loaded, self.folder / "again")


def _tensors(rng: random.Random, tensor: Tensor) -> Any:
    """A tensor of another kind."""
    makers: list[Callable[[], Any]] = [
        *(tensor.to_sparse, lambda: tensor.to("meta"), tensor.int, tensor.bool, tensor.half, tensor.double),
        *(lambda: tensor.to(torch.complex64), lambda: tensor.to(torch.bfloat16), lambda: tensor * torch.nan),
        *(lambda: tensor.to(torch.float8_e4m3fn), lambda: tensor.double() * 1e300, lambda: torch.empty(0)),
        *(lambda: tensor[..., :0], lambda: torch.zeros(1).expand(tensor.shape), lambda: tensor.reshape(-1)),
        *(
            lambda: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8),
            lambda: tensor.to(torch.uint8),
        ),
        *(lambda: torch.zeros(1).expand(2**27), lambda: tensor.float().requires_grad_(), lambda: tensor.T),
        *(lambda: tensor.reshape(len(tensor), -1).to_sparse_csr(), tensor.tolist),
        *(
            lambda: nn.Parameter(tensor.float()),
            lambda: tensor.numpy(),
            lambda: tensor[None],
            lambda: tensor / 0,
        ),
        *(
            lambda: tensor.data_ptr(),
            lambda: torch.Size([1, 2]),
            lambda: torch.float32,
            lambda: tensor.storage(),
        ),
    ]
    try:
        return rng.choice(makers)()
    except (RuntimeError, IndexError, TypeError):  # a scalar has no such form
        return tensor


class WeightFiles(Format):
    """State dicts and checkpoints of `torch.save`, and plain safetensors files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.model = fresh()
        self.state = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        self.path = folder / "weights.pt"
        self.bases: list[bytes] = []
        for content in (self.state, {"epoch": 3, "model": self.state, "optimizer": {"lr": 0.1, "state": {}}}):
            for zipped in (True, False):
                buffer = io.BytesIO()
                torch.save(content, buffer, _use_new_zipfile_serialization=zipped)
                self.bases.append(buffer.getvalue())
        save_file(
            {name: tensor.contiguous() for name, tensor in self.state.items()}, folder / "w.safetensors"
        )
        self.safe = split_safetensors((folder / "w.safetensors").read_bytes())
        load_file(folder / "w.safetensors")

    def write(self, rng: random.Random) -> None:
        self.path = self.folder / "weights.pt"
        kind = rng.random()
        if kind < 0.25:
            self.path.write_bytes(mutate_bytes(rng, rng.choice(self.bases)))
        elif kind < 0.4:
            self.path = self.folder / "weights.safetensors"
            header, tensors = self.safe
            data = json.dumps(mutate(rng, header)).encode()
            whole = join_safetensors(data, tensors)
            self.path.write_bytes(mutate_bytes(rng, whole) if rng.random() < 0.3 else whole)
        else:
            torch.save(self._container(rng), self.path, _use_new_zipfile_serialization=rng.random() < 0.8)

    def _container(self, rng: random.Random) -> Any:
        state: dict[Any, Any] = dict(self.state)
        for _ in range(rng.choice((0, 1, 1, 2))):
            name = rng.choice(list(self.state))
            change = rng.randrange(5)
            if change < 3:
                state[name] = _tensors(rng, self.state[name])
            elif change == 3:
                state.pop(name, None)
            else:
                key = rng.choice(
                    (f"module.{name}", "x\ny\nz\n", 3, ("a", 1), 2.5, "y" * 5000, None, "", "a\0")
                )
                state[key] = rng.choice((self.state[name], rng.choice(ODD)))
        value: Any = state
        for _ in range(rng.choice((0, 0, 1, 2, 3, 40))):
            key = rng.choice(("state_dict", "model", "net", "ema", "a" * 3000, 1, None, "x\ny", "module"))
            value = rng.choice(
                ({key: value}, {key: value, "other": value}, {key: value, "epoch": 1}, [value], (value,))
            )
        if rng.random() < 0.1 and isinstance(value, dict):
            value[rng.choice(("self", "state_dict", "model"))] = value
        if rng.random() < 0.1:
            odd = list(ODD)
            value = rng.choice(
                (value, rng.choice(odd), {"a": rng.choice(odd)}, {1, 2}, torch.zeros(3), [state] * 3)
            )
        return value

    def read(self, rng: random.Random) -> None:
        loaded = load_weights(self.path, self.model)
        assert all(torch.isfinite(tensor).all() for tensor in loaded.state_dict().values()), "NaN was loaded"
        assert all(tensor.dtype == self.state[name].dtype for name, tensor in loaded.state_dict().items())


class RunFiles(Format):
    """The files of a run folder that the page and a resumed run read."""

    #: Charts are drawn of one page in so many: they take 0.5 s.
    DRAWN = 100

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.run = folder / "run"
        runs = {
            "peel": {"method": "peel"},
            "sensitivity": {"weights": taught(), "init": "inherit", "method": "sensitivity"},
        }
        self.bases: list[dict[str, bytes]] = []
        for name, settings in runs.items():
            place = folder / name
            small_run(output=place, **{"bench_seconds": 0.3, **settings})
            files = {"error.json": b'{"format": "peel-error", "version": 2, "error": "it broke"}'}
            names = (
                *(
                    "plan.json",
                    "result.json",
                    "state.json",
                    "config.toml",
                    "metrics.jsonl",
                    "environment.json",
                ),
                "stages/uniform.record.json",
            )
            files |= {name: (place / name).read_bytes() for name in names}
            self.bases.append(files)
        self.graph = peel.trace(Small(), torch.zeros(1, 3, 8, 8))
        (self.run / "stages").mkdir(parents=True)
        self.pages = 0
        self.files: dict[str, bytes] = {}
        self.subject: dict[str, Any] = {}

    def write(self, rng: random.Random) -> None:
        base = rng.choice(self.bases)
        self.files, self.subject = dict(base), json.loads(base["state.json"])["subject"]
        for name in rng.sample(list(self.files), rng.choice((1, 1, 1, 2))):
            self.files[name] = self._mutated(rng, name, self.files[name])
        for name in rng.sample(list(self.files), rng.choice((0, 0, 0, 1, 3))):
            del self.files[name]
        for name in self.bases[0]:
            self.run.joinpath(name).unlink(missing_ok=True)
        for name, data in self.files.items():
            self.run.joinpath(name).write_bytes(data)

    def _mutated(self, rng: random.Random, name: str, data: bytes) -> bytes:
        if name == "config.toml":
            import tomllib

            return mutated_toml(rng, tomllib.loads(data.decode()))
        if name == "metrics.jsonl":
            lines = data.splitlines(keepends=True)
            at = rng.randrange(len(lines))
            lines[at] = json_bytes(rng, json.loads(lines[at])) + b"\n"
            return mutate_bytes(rng, b"".join(lines)) if rng.random() < 0.1 else b"".join(lines)
        return json_bytes(rng, json.loads(data))

    def read(self, rng: random.Random) -> None:
        errors: list[PeelError] = []
        for reads in (self._draw, self._resume):
            try:
                reads(rng)
            except PeelError as error:
                check_message(error)
                errors.append(error)
        if errors:
            raise errors[0]

    def _draw(self, rng: random.Random) -> None:
        record = RunRecord.read(self.run)
        self.pages += 1
        if self.pages % self.DRAWN == 0:
            render(record)
            return
        charts = ("curves_chart", "groups_chart", "importance_chart", "widths_chart")
        with contextlib.ExitStack() as stack:
            for name in charts:
                stack.enter_context(mock.patch.object(page, name, lambda *_: ""))
            render(record)

    def _resume(self, rng: random.Random) -> None:
        folder = RunFolder(self.run)
        if folder.has("state.json"):
            state = State("peel run", self.subject, {}, {}, {})
            check_state(folder, state, {"device": "CPU", "peel": "1", "threads": 1})
        if folder.has("stages/uniform.record.json"):
            folder.read_json("stages/uniform.record.json", Record)
        if folder.has("plan.json"):
            self.graph.check(folder.read("plan.json", peel.Plan.from_json).widths)
        stored_speed(folder, {"original": self.graph.macs()})
        folder.restart_metrics("final", [])


class OnnxFiles(Format):
    """The metadata of an ONNX file."""

    def __init__(self, folder: Path) -> None:
        import onnx

        super().__init__(folder)
        path = folder / "base.onnx"
        peel.export(slim_small(), path)
        self.onnx = onnx.load(path)
        self.data = path.read_bytes()
        self.given = {item.key: json.loads(item.value) for item in self.onnx.metadata_props}
        self.start = min(self.data.find(item.key.encode()) for item in self.onnx.metadata_props)
        self.path = folder / "model.onnx"

    def write(self, rng: random.Random) -> None:
        if rng.random() < 0.15:
            at = self.data.rfind(b"shape") - 100
            self.path.write_bytes(mutate_bytes(rng, self.data, max(self.start, at)))
            return
        changed, proto = mutate(rng, self.given), self.onnx
        del proto.metadata_props[:]
        for key, value in changed.items() if isinstance(changed, dict) else [("shape", changed)]:
            name = str(key).replace("\ud800", "?")
            text = (
                json.dumps(value)
                if rng.random() < 0.9
                else mutate_bytes(rng, json.dumps(value).encode()).decode(errors="replace")
            )
            proto.metadata_props.add(key=name, value=text)
        self.path.write_bytes(proto.SerializeToString())

    def read(self, rng: random.Random) -> None:
        network = load_network(str(self.path))
        if network.macs:
            assert 2.0 / network.macs < 3
        with mock.patch("peel.deploy.evaluation.load_data", _few_digits_of_size):
            data = load_data_for(network, "digits")
            metrics = evaluate_network(network, data)
        assert metrics.loss is not None and abs(metrics.loss) < 1e30, "the loss is not finite"


@cache
def _few_digits_of_size(name: str, image_size: int | None, channels: int, **other: Any) -> Any:
    from peel.data.datasets import load_data

    return load_data(name, image_size=image_size, channels=channels)


class TomlFiles(Format):
    """The file of `--config`, up to the checks of a run; no data are loaded and nothing is trained.

    The command line reads a tenth of them. It takes 40 ms, so the others are given to `prune` as keywords.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.path = folder / "settings.toml"
        self.graph = peel.trace(Small(), torch.zeros(1, 3, 8, 8))
        given = peel.Config(data="digits").to_dict()
        own = {
            "budget": "macs<=60%, params<=70%",
            "method": "peel",
            "criterion": "gradient",
            "seed": 3,
            "train": {"epochs": 3, "lr": 0.1},
            "backbone": {"epochs": 2},
            "mean": [0.5],
            "std": [0.2],
            "groups": {"first": ["conv1", "conv2"], "last": ["conv3", "conv4"]},
            "freeze": ["conv4"],
        }
        self.bases: list[dict[str, Any]] = [given, own]

    def write(self, rng: random.Random) -> None:
        self.path.write_bytes(mutated_toml(rng, rng.choice(self.bases)))

    def read(self, rng: random.Random) -> None:
        if rng.random() < 0.9:
            values = read_file(self.path, parse_toml)
            with self._cheap():
                prune(values.pop("model", "cifar_resnet20"), **values, dry_run=True)
            return
        from peel.cli.main import main

        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said), self._cheap():
            code = main(["run", "--config", str(self.path), "--dry-run", "--quiet"])
        if code:
            text = said.getvalue().strip()
            lines = [line.strip("│ ") for line in text.splitlines() if not line.startswith(("╭", "╰"))]
            assert code in (2, 3), f"exit code {code}"
            assert text, "no message"
            if not text.startswith("error: "):
                lines = [" ".join(lines)]  # wrapped by cyclopts
            raise PeelError("\n".join(lines).removeprefix("error: "))

    @contextlib.contextmanager
    def _cheap(self) -> Iterator[None]:
        """Runs stop before the dry run, and build nothing."""

        def load(model: Any, data: Any, config: peel.Config, weights: Any) -> Any:
            return fresh(), few_digits().normalized(config.mean, config.std)

        def trace(network: nn.Module, example: Any, groups: Any = None) -> Any:
            return self.graph if groups is None else self.graph.regroup(groups)

        ends = Result(None, None, {}, [], [], None)
        with (
            mock.patch.object(loading, "load_model_and_data", load),
            mock.patch.object(loading, "trace", trace),
            mock.patch.object(loading, "has_new_classifier", lambda *_: False),
            mock.patch.object(Run, "estimate", lambda _: ends),
            mock.patch("peel.cli.run._show", lambda *_, **__: None),
        ):
            yield


class LatencyFiles(Format):
    """What `peel latency` writes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.graph = peel.trace(Small(), torch.zeros(1, 3, 8, 8))
        self.path = folder / "latency.json"
        planted_model(self.graph, step=1).save(self.path)
        self.given = json.loads(self.path.read_text())
        measured = {
            "backend": "eager",
            "device_type": "cpu",
            "device": "a CPU",
            "batch": 1,
            "threads": 1,
            "note": None,
        }
        self.bases = [self.given, {**self.given, "conditions": measured}]

    def write(self, rng: random.Random) -> None:
        self.path.write_bytes(json_bytes(rng, rng.choice(self.bases)))

    def read(self, rng: random.Random) -> None:
        graph = self.graph.with_latency(peel.LatencyModel.load(self.path))
        assert 0 <= graph.latency() < 1e7
        latency_notes(graph)
        peel.uniform(graph, "95%", resource="latency")


FORMATS: dict[str, Callable[[Path], Format]] = {
    "model file": ModelFiles,
    "weights": WeightFiles,
    "run JSON": RunFiles,
    "ONNX metadata": OnnxFiles,
    "TOML": TomlFiles,
    "latency file": LatencyFiles,
}


def seeded(name: str, seed: int, number: int) -> random.Random:
    """The generator of one input, which can be repeated by itself."""
    return random.Random(f"{name} {seed} {number}")


__all__ = ["FORMATS", "Format", "is_loaded", "seeded"]
