"""Charts of a run as SVG text for one HTML page. The same data give the same bytes."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

from ..cost.budget import format_count
from ..utils.tables import Cell, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = Sequence[tuple[int, float]]

# The palette of Okabe and Ito, for every kind of color vision; line styles serve black-and-white print.
_COLORS = {"original": "#8c8c8c", "backbone": "#009e73", "uniform": "#e69f00"}
_DASHES = {"backbone": ":", "uniform": "--"}
_SLIM = "#0072b2"
_SEQUENCE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#000000")
_MARKERS = "os^DvPX"
_WIDTH = 9.6

#: Larger numbers make the ticks of an axis overflow.
LARGEST = 1e30


def label(stage: str) -> str:
    """A stage or network as the page writes it."""
    return {"peel": "PEEL", "given": "given plan"}.get(stage, stage)


def _color(network: str) -> str:
    return _COLORS.get(network, _SLIM)


def widths_chart(widths: Mapping[str, Mapping[str, int]], groups: Mapping[str, Sequence[str]]) -> str:
    """The fraction of its channels that each tie keeps, group by group. The last network is the slim one.

    Bars show fractions, so that layers of 8 and of 2048 channels are equally visible; numbers are text.
    """
    ties = [tie for members in groups.values() for tie in members]
    slim = list(widths)[-1]
    before, after = widths["original"], widths[slim]
    kept = {name: [100 * of_tie[tie] / before[tie] for tie in ties] for name, of_tie in widths.items()}
    places = range(len(ties))
    with _figure(0.8 + 0.24 * len(ties)) as figure:
        axes = figure.subplots()
        axes.barh(places, kept["original"], height=0.84, color="#d9d9d9", label="original")
        for network in (name for name in widths if name not in ("original", slim)):
            half = 0.42 if network == "uniform" else 0.3
            ends = [place - half for place in places], [place + half for place in places]
            # Over bars of any color: a line in the color of the network with a white edge.
            axes.vlines(kept[network], *ends, color="white", linewidth=3.4, zorder=3)
            axes.vlines(kept[network], *ends, color=_color(network), linewidth=1.8, zorder=4, label=network)
        axes.barh(places, kept[slim], height=0.6, color=_SLIM, label=label(slim))
        for place, tie in enumerate(ties):
            axes.text(1, place, str(after[tie]), color="white", va="center", fontsize=7.5, zorder=5)
            end = max(100, kept[slim][place]) + 1
            axes.text(end, place, f"of {before[tie]}", color="#555555", va="center", fontsize=7.5)
        _mark_groups(axes, groups)
        axes.set_yticks(places, ties, fontsize=7.5)
        axes.set_ylim(len(ties) - 0.5, -0.5)
        axes.margins(x=0.08)
        axes.set_xlabel("% of the channels")
        axes.tick_params(axis="y", length=0)
        figure.legend(loc="outside upper right", ncols=len(widths))
        return _svg(figure, "widths", "Channels of each tie in each network")


def _mark_groups(axes: Axes, groups: Mapping[str, Sequence[str]]) -> None:
    """Shade every second group and write its name at the right edge."""
    start = -0.5
    for number, (group, ties) in enumerate(groups.items()):
        shade = "#f3f3f0" if number % 2 else "#fbfbfa"
        axes.axhspan(start, start + len(ties), color=shade, zorder=-2, linewidth=0)
        style: Any = {"fontsize": 8.5, "fontweight": "bold", "color": "#444444", "va": "center"}
        middle = start + len(ties) / 2
        axes.text(1.01, middle, group, transform=axes.get_yaxis_transform(), **style)
        start += len(ties)


def groups_chart(macs: Mapping[str, Mapping[str, int]]) -> str:
    """The MACs of each group, network by network."""
    groups = list(dict.fromkeys(group for values in macs.values() for group in values))
    with _figure(0.9 + 0.62 * len(groups)) as figure:
        axes = figure.subplots()
        _group_bars(axes, groups, macs, "", "MACs")
        axes.locator_params(axis="x", nbins=6)
        axes.xaxis.set_major_formatter(lambda value, _: format_count(value))
        handles, names = axes.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper right", ncols=len(names))
        axes.set_yticks(range(len(groups)), groups)
        axes.invert_yaxis()
        return _svg(figure, "groups", "Of each group: MACs")


def table_chart(table: Table, name: str) -> str:
    """The numbers of a table: bars for each row, a panel for each column; or lines over the first column."""
    if table.chart == "lines":
        axis, *titles = table.columns
        curves = {
            title: [(_finite(row[0]), _finite(row[place])) for row in table.rows]
            for place, title in enumerate(titles, 1)
        }
        return _lines_chart(curves, axis, table.title, name)
    names = [str(row[0]) for row in table.rows]
    columns = {
        title: {str(row[0]): _finite(row[place]) for row in table.rows if row[place] is not None}
        for place, title in enumerate(table.columns)
        if any(isinstance(row[place], float) for row in table.rows)
    }
    with _figure(0.9 + 0.4 * len(names)) as figure:
        panels = figure.subplots(1, max(1, len(columns)), sharey=True, squeeze=False)[0]
        for axes, (title, values) in zip(panels, columns.items(), strict=False):
            _group_bars(axes, names, {"": values}, "{:.3g}", title)
        panels[0].set_yticks(range(len(names)), names)
        panels[0].invert_yaxis()
        return _svg(figure, name, f"{table.title}: {', '.join(columns)}")


def _lines_chart(
    curves: Mapping[str, Sequence[tuple[float, float]]], axis: str, title: str, name: str
) -> str:
    with _figure(2.9) as figure:
        axes = figure.subplots()
        for number, (line, points) in enumerate(curves.items()):
            color = _SEQUENCE[number % len(_SEQUENCE)]
            axes.plot(*zip(*points, strict=True), color=color, label=line)
        axes.set_xlabel(axis)
        axes.set_title(title)
        handles, names = axes.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside right upper")
        return _svg(figure, name, f"{title}: {', '.join(curves)}")


def _finite(value: Cell) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < LARGEST else 0.0


def _group_bars(
    axes: Axes,
    groups: Sequence[str],
    series: Mapping[str, Mapping[str, float]],
    text: str,
    title: str,
) -> None:
    thickness = 0.8 / max(2, len(series))
    for number, (network, values) in enumerate(series.items()):
        offset = (number - (len(series) - 1) / 2) * thickness
        places = [place + offset for place in range(len(groups))]
        lengths = [values.get(group, 0) for group in groups]
        bars = axes.barh(
            places, lengths, height=0.92 * thickness, color=_color(network), label=label(network)
        )
        if text:
            axes.bar_label(
                bars,
                [text.format(values[group]) if group in values else "" for group in groups],
                padding=3,
                fontsize=8,
            )
            axes.margins(x=0.22)
            axes.set_xticks([])
    axes.set_title(title)
    axes.tick_params(axis="y", length=0)


def importance_chart(stages: Mapping[str, Mapping[str, Curve]]) -> str:
    """Importance of each group over the epochs, a panel for each round of the backbone."""
    groups = list(dict.fromkeys(group for curves in stages.values() for group in curves))
    with _figure(2.9) as figure:
        row = figure.subplots(1, len(stages), sharey=True, squeeze=False)[0]
        for axes, (stage, curves) in zip(row, stages.items(), strict=True):
            for group, curve in curves.items():
                number = groups.index(group)
                style = {
                    "color": _SEQUENCE[number % len(_SEQUENCE)],
                    "marker": _MARKERS[number % len(_MARKERS)],
                }
                _line(axes, curve, group, style)
            axes.set_title(stage)
            axes.set_xlabel("epoch")
        row[0].set_ylabel("importance")
        handles, names = row[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside right upper")
        return _svg(figure, "importance", "Importance of each group over the epochs")


def curves_chart(panels: Mapping[str, Mapping[str, Curve]]) -> str:
    """Curves over the epochs, a panel for each measured quantity and a line in it for each stage."""
    with _figure(2.9) as figure:
        row = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (title, stages) in zip(row, panels.items(), strict=True):
            for stage, curve in stages.items():
                kind, _, number = stage.partition("-")
                style = {
                    "color": _color(kind),
                    "linestyle": "-." if number else _DASHES.get(kind, "-"),
                    "linewidth": 1.5 if kind in _COLORS else 2,
                    "marker": "o" if len(curve) == 1 else "",
                }
                _line(axes, curve, label(stage), style)
            axes.set_title(title)
            axes.set_xlabel("epoch")
        handles, names = row[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper right", ncols=len(names))
        return _svg(figure, "curves", "Loss and accuracy of each stage over the epochs")


def budget_chart(curves: Mapping[str, Sequence[tuple[float, float]]], original: float, title: str) -> bytes:
    """Accuracy against MACs, both in percent, as PNG. The dashed line is the original."""
    buffer = io.BytesIO()
    with _figure(4.5) as figure:
        axes = figure.subplots()
        axes.axhline(original, color=_COLORS["original"], linestyle="--", linewidth=1.0, label="original")
        for place, (name, curve) in enumerate(curves.items()):
            if curve:
                macs, values = zip(*curve, strict=True)
                axes.plot(macs, values, color=_SEQUENCE[place], marker=_MARKERS[place], label=name)
        axes.invert_xaxis()
        axes.set_xlabel("% of the MACs")
        axes.set_ylabel("top-1, %")
        axes.set_title(title)
        axes.legend()
        figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _line(axes: Axes, curve: Curve, name: str, style: Mapping[str, Any]) -> None:
    """One curve; numbers that are not finite, or too large for an axis, leave a gap."""
    from matplotlib.ticker import MaxNLocator

    epochs = [epoch for epoch, _ in curve]
    values = [value if abs(value) < LARGEST else math.nan for _, value in curve]
    spacing = max(1, len(curve) // 12)
    axes.plot(epochs, values, label=name, markersize=4, markevery=spacing, **style)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    # A single epoch has no width of its own.
    axes.set_xlim(min(axes.get_xlim()[0], epochs[0] - 0.5), max(axes.get_xlim()[1], epochs[-1] + 0.5))


@contextmanager
def _figure(height: float) -> Iterator[Figure]:
    """An empty figure in the style of the page, whatever the settings of matplotlib on this machine are."""
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "font.size": 9.0,
        "axes.titlesize": 9.0,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#999999",
        "legend.frameon": False,
        "text.parse_math": False,  # a $ in the name of a layer is a $
        "svg.fonttype": "none",
    }
    defaults: dict[Any, Any] = {
        name: value for name, value in matplotlib.rcParamsDefault.items() if name != "backend"
    }
    with matplotlib.rc_context({**defaults, **style}):
        yield Figure(figsize=(_WIDTH, height), layout="constrained")


def _svg(figure: Figure, name: str, title: str) -> str:
    """The figure as an SVG element. Its ids begin with its name, so that several fit on one page."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}), warnings.catch_warnings():
        # The browser has the letters that the font of matplotlib lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")),
        )
    text = buffer.getvalue()
    text = re.sub(
        r"<[^>]+>",
        lambda tag: re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", tag[0]),
        text[text.index("<svg") :],
    )
    # Inside HTML the namespaces are known, and an address in the page would look like something to fetch.
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text, count=2)
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1).strip()
