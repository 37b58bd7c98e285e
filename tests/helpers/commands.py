"""`peel run` of a short training, in a process of its own."""

from __future__ import annotations

from pathlib import Path

from helpers.killing import command, exit_code

#: The original alone: two epochs of eleven steps, with a checkpoint after each epoch.
ORIGINAL = {
    "--data": "digits",
    "--stages": "original",
    "--train.epochs": "2",
    "--train.batch-size": "128",
    "--device": "cpu",
}


def line(output: Path | str, *options: str, model: str = "helpers.small:Faulty") -> list[str]:
    """The arguments; `options` are pairs of flag and value."""
    chosen = {**ORIGINAL, "--output": str(output), **dict(zip(options[::2], options[1::2]))}
    return ["run", model, *(part for pair in chosen.items() for part in pair)]


def run(
    output: Path, *options: str, model: str = "helpers.small:Faulty", **environment: str
) -> tuple[int, str]:
    """Exit code and output of the command."""
    log = output.with_name(f"{output.name}.log")
    log.write_text("")
    code = exit_code(command(line(output, *options, model=model), log, **environment))
    return code, log.read_text()
