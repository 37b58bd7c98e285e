"""`peel inspect`: which channels are tied, what each group costs, what is fixed and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..cost.budget import format_count
from ..errors import PeelError
from ..utils.terminal import make_console, print_json, show_status

if TYPE_CHECKING:
    from rich.console import Console

    from ..graph import ChannelGraph


def inspect(
    model: str,
    /,
    *,
    input: str | None = None,
    num_classes: int | None = None,
    verify: bool = False,
    seconds: float = 120.0,
    json: bool = False,
) -> int:
    """Which channels are tied, what each group costs, what is fixed and why.

    Parameters
    ----------
    model
        Name or reference of the model.
    input
        Shape of one input: channels,height,width. Default: what the model was made for.
    num_classes
        Number of classes, where the model takes that argument.
    verify
        Prove it on this model: zero channels, cut them, compare the outputs; count costs on built networks.
    seconds
        Start no further check of --verify after this time.
    json
        Print JSON instead of tables.
    """
    import torch

    from .. import zoo
    from ..graph import trace
    from ..surgery import verify as run_verify

    console, notes = make_console(), make_console(stderr=True)
    with show_status(notes, f"building {model}"):
        shape = parse_shape(input) or zoo.find(model).input_size
        network = zoo.create(model, num_classes=num_classes)
    with show_status(notes, f"tracing {model}"):
        graph = trace(network, torch.zeros(1, *shape))
    data = inspection(model, graph)
    verification = None
    if verify:
        with show_status(notes, "verifying") as status:
            verification = run_verify(
                network,
                torch.randn(1, *shape),
                graph=graph,
                seconds=seconds,
                progress=lambda name, done, total: status.update(f"verifying {done}/{total}: {name}"),
            )
        checks = [
            {"name": item.name, "passed": item.passed, "detail": item.detail} for item in verification.checks
        ]
        data["verification"] = {"passed": verification.passed, "checks": checks}
    if json:
        print_json(data)
    else:
        draw(data, console)
    return 0 if verification is None or verification.passed else 1


def parse_shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise PeelError(f"--input {text!r} is not a shape: write channels,height,width, such as 3,224,224.")
    return shape


def inspection(name: str, graph: ChannelGraph) -> dict[str, Any]:
    """Groups, ties and what is fixed, as plain values for JSON."""
    macs_by_group, params_by_group = graph.macs_by_group(), graph.params_by_group()
    group_of = {tie: group for group, ties in graph.groups.items() for tie in ties}
    return {
        "model": name,
        "input_shapes": [list(shape) for shape in graph.input_shapes],
        "modules": list(graph.modules),
        "macs": graph.macs(),
        "params": graph.params(),
        "activation_bytes_estimate": graph.activation_bytes(),
        "free_channel_fraction": graph.free_fraction,
        "smallest_macs": graph.macs(graph.steps),
        "groups": [
            {
                "name": group,
                "ties": list(ties),
                "layers": sum(len(graph.ties[tie].layers) for tie in ties),
                "channels": sum(graph.widths[tie] for tie in ties),
                "macs": macs_by_group[group],
                "params": params_by_group[group],
            }
            for group, ties in graph.groups.items()
        ],
        "outside_groups": {
            "macs": macs_by_group.get("(fixed)", 0),
            "params": params_by_group.get("(fixed)", 0),
        },
        "ties": [
            {
                "name": tie.name,
                "width": tie.width,
                "step": tie.step,
                "group": group_of.get(tie.name),
                "fixed": tie.fixed,
                "inexact": tie.inexact,
                "layers": list(tie.layers),
                "tied_by": list(tie.causes),
                "members": [asdict(member) for member in tie.members],
            }
            for tie in graph.ties.values()
        ],
        "unknown_operators": dict(graph.unknown_operators),
        "failed_rules": dict(graph.failed_rules),
    }


def draw(data: dict[str, Any], console: Console) -> None:
    """The inspection as tables, with the verification where there is one."""
    from rich.markup import escape

    size = ", ".join("x".join(map(str, shape[1:])) for shape in data["input_shapes"])
    console.print(
        f"[bold]{escape(data['model'])}[/] at {size}: {format_count(data['macs'])} MACs, "
        f"{format_count(data['params'])} params, about "
        f"{data['activation_bytes_estimate'] / 2**20:.1f} MiB of activations (estimate)"
    )
    if data["modules"]:
        names = ", ".join(data["modules"])
        console.print(f"[yellow]captured through {escape(names)}[/]: MACs and activations are theirs")
    free = [tie for tie in data["ties"] if tie["fixed"] is None]
    fixed = [tie for tie in data["ties"] if tie["fixed"] is not None]
    console.print(
        f"{len(free)} free ties, {data['free_channel_fraction']:.0%} of all channels; the smallest network "
        f"has {format_count(data['smallest_macs'])} MACs "
        f"({data['smallest_macs'] / max(1, data['macs']):.1%})\n"
    )
    columns = ["group", "ties", "layers", "channels", "MACs", "fraction", "params", "fraction"]
    console.print(_table("Groups (by spatial size)", columns, _group_rows(data), numbers=columns[1:]))
    columns = ["tie", "group", "width", "layers", "tied by, remarks"]
    console.print(
        _table("\nTies (channels that keep the same number)", columns, map(_tie_row, free), numbers=["width"])
    )
    rows = ([tie["name"], str(tie["width"]), tie["fixed"]] for tie in fixed)
    console.print(_table("\nFixed", ["tie", "width", "why"], rows, numbers=["width"]))
    for operator, place in data["unknown_operators"].items():
        failure = data["failed_rules"].get(operator)
        problem = (
            f"the channel rule for {operator} failed ({failure})"
            if failure
            else f"no channel rule for {operator}"
        )
        console.print(f"[yellow]{escape(problem)}[/] (in {escape(place)}): channels that reach it are fixed")
    if "verification" in data:
        _draw_verification(data["verification"], console)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column in numbers else "left")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _group_rows(data: dict[str, Any]) -> Iterator[list[str]]:
    outside = {"name": "(fixed)", "ties": [], "layers": "", "channels": "", **data["outside_groups"]}
    for group in [*data["groups"], *([outside] if any(data["outside_groups"].values()) else [])]:
        costs = [
            text
            for key in ("macs", "params")
            for text in (format_count(group[key]), f"{group[key] / max(1, data[key]):.1%}")
        ]
        ties = str(len(group["ties"]) or "")
        yield [group["name"], ties, str(group["layers"]), str(group["channels"]), *costs]


def _tie_row(tie: dict[str, Any]) -> list[str]:
    remarks = [_shorten(cause) for cause in tie["tied_by"] if _is_worth_showing(cause)]
    if tie["step"] > 1:
        remarks.insert(0, f"multiple of {tie['step']}")
    if tie["inexact"]:
        remarks.insert(0, f"cutting is not exactly zeroing: {tie['inexact']}")
    others = [layer for layer in tie["layers"] if layer != tie["name"]]
    layers = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
    remark = "; ".join(list(dict.fromkeys(remarks))[:4])
    return [tie["name"], tie["group"], str(tie["width"]), layers and f"+ {layers}", remark]


def _is_worth_showing(cause: str) -> bool:
    """Hide obvious causes: norm layers and convolutions tie their channels."""
    return not cause.startswith(("batch_norm", "conv", "linear", "layer_norm"))


def _shorten(cause: str) -> str:
    return cause.replace("depthwise conv2d in", "depthwise").replace("grouped conv2d in", "grouped conv")


def _draw_verification(verification: dict[str, Any], console: Console) -> None:
    from rich.markup import escape

    words = {True: "[green]passed[/]", False: "[bold red]FAILED[/]", None: "[yellow]skipped[/]"}
    console.print("\n[bold]Verification[/]")
    for check in verification["checks"]:
        console.print(f"{words[check['passed']]}  {check['name']}: {escape(check['detail'])}")
