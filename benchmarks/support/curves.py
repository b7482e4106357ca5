"""The two themes of a page, and curves on logarithmic axes in their colours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter


@dataclass(frozen=True)
class Theme:
    """Colours of a page: its text, its lines, and the colour of each implementation."""

    suffix: str
    text: str
    line: str
    ours: str
    others: dict[str, str]


LIGHT = Theme(
    "",
    "#1f2328",
    "#d1d9e0",
    "#0b57d0",
    {"PyTorch": "#d1242f", "cuDNN": "#1a7f37", "flash": "#9a6700", "FA3": "#8250df", "cascade": "#6e7781"},
)
DARK = Theme(
    "-dark",
    "#f0f6fc",
    "#3d444d",
    "#58a6ff",
    {"PyTorch": "#ff7b72", "cuDNN": "#3fb950", "flash": "#d29922", "FA3": "#bc8cff", "cascade": "#9198a1"},
)


def thousands(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else f"{n / 1000:.0f}k" if n >= 1000 else str(n)


def log_axis(scale: Callable[[str], None], ax: Axes, theme: Theme) -> None:
    """Make an axis logarithmic, and give it the page's colours."""
    scale("log")
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.tick_params(which="both", colors=theme.text, length=0, labelsize=8.5)
    ax.grid(axis="x", color=theme.line, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.set_facecolor("none")
    for spine in ax.spines.values():
        spine.set_visible(False)


def headline(figure: Figure, text: str, theme: Theme) -> None:
    figure.suptitle(text, color=theme.text, fontsize=11)


@dataclass(frozen=True)
class Line:
    """A curve that `lines` draws."""

    label: str
    points: list[tuple[int, float]]
    color: str
    style: str = "-"
    where: tuple[int, int, str] = (-12, 10, "right")  # its label, from the point in the middle: right, up, alignment


def lines(drawn: list[Line], unit: str, below: str, theme: Theme) -> Figure:
    """Draw curves on logarithmic axes, each with its label beside it."""
    figure = Figure(figsize=(6.4, 3.4))
    figure.subplots_adjust(left=0.11, right=0.97, bottom=0.15, top=0.9)
    ax = figure.add_subplot()
    log_axis(ax.set_xscale, ax, theme)
    ax.set_yscale("log")
    ax.grid(axis="y", color=theme.line, linewidth=0.6)
    for line in drawn:
        ax.plot(*zip(*line.points, strict=True), line.style, marker="o", markersize=4, color=line.color)
        at, (right, up, side) = line.points[len(line.points) // 2], line.where
        ax.annotate(line.label, at, (right, up), textcoords="offset points", ha=side, color=line.color, fontsize=9)
    ticks = sorted({x for line in drawn for x, _ in line.points})
    ax.set_xticks(ticks, [thousands(n) for n in ticks])
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}{unit}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel(below, color=theme.text, fontsize=9)
    return figure
