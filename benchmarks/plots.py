"""Draw the pictures of docs/img, and fill the tables of docs/benchmarks.md, from the figures that were recorded.

    python benchmarks/plots.py          # needs matplotlib: pip install "tatten[draw]"

Each picture is drawn twice, for light and for dark pages. From the same figures the same bytes are written, for
which margins are fixed: matplotlib's layout engines differ in the last digit from run to run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from support import results
from support.tables import Row, fill, heads

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Theme:
    """Colours of a page: its text, its lines, and what is drawn for each implementation."""

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
MARKERS = {"PyTorch": "X", "cuDNN": "s", "flash": "^", "FA3": "D", "cascade": "v"}


@dataclass(frozen=True)
class Case:
    """A line of a panel: times over the floor, by implementation."""

    name: str
    tatten: float
    others: dict[str, float]


def case(name: str, r: Row, ours: str, others: dict[str, str]) -> Case:
    """`others` maps the columns of the row to what they are drawn as; columns that were not measured are left out."""
    us, floor = r["us"], r["floor_us"]
    found: dict[str, float] = {}
    for column, drawn in others.items():
        if column in us:
            found[drawn] = min(us[column] / floor, found.get(drawn, float("inf")))
    return Case(name, us[ours] / floor, found)


def thousands(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else f"{n / 1000:.0f}k" if n >= 1000 else str(n)


def steps() -> list[Case]:
    """Decode steps of a compiled model."""
    found = []
    for r in results.select(RESULTS / "static_cache.json", ("inductor_ms", "tatten_ms", "floor_ms")):
        name = f"{r['batch']} x {thousands(r['used'])} of {thousands(r['max_cache_len'])} slots"
        found.append(Case(name, r["tatten_ms"] / r["floor_ms"], {"PyTorch": r["inductor_ms"] / r["floor_ms"]}))
    return found


def ragged() -> list[Case]:
    columns = {"sdpa": "PyTorch", "fa3": "FA3", "fa3_8": "FA3", "fa3_32": "FA3"}
    found = []
    for r in results.select(RESULTS / "decode_ragged.json", ("us", "floor_us", "name")):
        count = "" if "one" in r["name"] else f"{len(r['lengths'])} x "
        found.append(case(f"{count}{r['name']}, {heads(r)}", r, "auto", columns))
    return found


def uniform() -> list[Case]:
    columns = {"cudnn": "cuDNN", "flash": "flash", "fa3": "FA3"}
    return [
        case(f"{len(r['lengths'])} x {thousands(int(r['name']))}, {heads(r)}", r, "auto", columns)
        for r in results.select(RESULTS / "decode_nine.json", ("us", "floor_us", "name"))
    ]


def prefixes() -> list[Case]:
    columns = {"expanded": "PyTorch", "cascade": "cascade", "aten": "flash", "fa3": "FA3"}
    return [
        case(f"{r['batch']} x ({thousands(r['prefix'])} + {r['suffix']}), {heads(r)}", r, "tatten", columns)
        for r in results.select(RESULTS / "shared_prefix.json", ("us", "floor_us"))
    ]


def panel(ax: Axes, title: str, cases: list[Case], theme: Theme) -> None:
    """Time over the floor, one line for each case, the fastest at the left."""
    for y, c in enumerate(cases):
        values = [c.tatten, *c.others.values()]
        ax.plot([min(values), max(values)], [y, y], color=theme.line, linewidth=2.5, zorder=1)
        for name, x in c.others.items():
            ax.scatter(x, y, s=26, marker=MARKERS[name], color=theme.others[name], linewidths=0, zorder=3)
        ax.scatter(c.tatten, y, s=80, color=theme.ours, linewidths=0, zorder=2)  # others show where they are as fast
    ax.set_yticks(range(len(cases)), [c.name for c in cases])
    ax.set_ylim(len(cases) - 0.5, -0.5)
    ax.set_title(title, loc="left", color=theme.text, fontsize=10, fontweight="bold")
    ax.axvline(1, color=theme.text, linewidth=1, linestyle=(0, (2, 2)), zorder=0)
    log_axis(ax.set_xscale, ax, theme)
    drawn = [x for c in cases for x in (c.tatten, *c.others.values())]
    largest = max(drawn)
    ticks = [t for t in (1, 1.5, 2, 3, 5, 10, 20, 50) if t < 1.2 * largest]
    ax.set_xticks(ticks, [f"{t:g}x" for t in ticks])
    ax.set_xlim(min(0.9, 0.95 * min(drawn)), max(1.3 * largest, 2))


def log_axis(scale: Callable[[str], None], ax: Axes, theme: Theme) -> None:
    """Make an axis logarithmic, and give all the page's colours."""
    scale("log")
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.tick_params(which="both", colors=theme.text, length=0, labelsize=8.5)
    ax.grid(axis="x", color=theme.line, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.set_facecolor("none")
    for spine in ax.spines.values():
        spine.set_visible(False)


LABELS = {
    "PyTorch": "PyTorch",
    "cuDNN": "cuDNN",
    "flash": "FlashAttention-2",
    "FA3": "FlashAttention-3",
    "cascade": "FlashInfer cascade",
}


def device(name: str) -> str:
    return str(results.read(RESULTS / f"{name}.json")["device"])


def headline(figure: Figure, text: str, theme: Theme) -> None:
    figure.suptitle(text, color=theme.text, fontsize=11)


def legend(figure: Figure, names: list[str], theme: Theme, labels: dict[str, str]) -> None:
    """One line below the panels."""
    ax = figure.axes[0]
    handles = [ax.scatter([], [], s=80, color=theme.ours, label="tatten", linewidths=0)]
    for name in names:
        drawn = {"marker": MARKERS[name], "color": theme.others[name], "label": labels[name]}
        handles.append(ax.scatter([], [], s=26, linewidths=0, **drawn))
    figure.legend(
        handles=handles, loc="lower center", ncols=len(handles), frameon=False, labelcolor=theme.text, fontsize=9
    )


def speed_over_floor(theme: Theme) -> Figure:
    """Plain decode: the step of a model, ragged lengths, equal lengths."""
    left = [("A model's step, static cache", steps()), ("Ragged lengths", ragged())]
    right = uniform()
    figure = Figure(figsize=(9.6, 4.6))
    where = {"left": 0.225, "right": 0.985, "bottom": 0.13, "top": 0.87, "wspace": 0.4, "hspace": 0.35}
    grid = figure.add_gridspec(2, 2, height_ratios=[len(cases) for _, cases in left], **where)
    for i, (title, cases) in enumerate(left):
        panel(figure.add_subplot(grid[i, 0]), title, cases, theme)
    panel(figure.add_subplot(grid[:, 1]), "Equal lengths, no mask", right, theme)
    headline(figure, f"Time over the byte floor, {device('decode_nine')}, bfloat16 (less is better)", theme)
    labels = {**LABELS, "PyTorch": "PyTorch (Inductor, SDPA)"}
    legend(figure, ["PyTorch", "cuDNN", "flash", "FA3"], theme, labels)
    return figure


def shared_prefix(theme: Theme) -> Figure:
    """Attention to a prefix that all sequences share."""
    figure, cases = Figure(figsize=(9.6, 3.8)), prefixes()
    figure.subplots_adjust(left=0.18, right=0.985, bottom=0.16, top=0.84)
    panel(figure.add_subplot(), "Sequences x (shared prefix + own suffix), query/kv heads", cases, theme)
    headline(figure, f"A shared prefix: time over the floor, {device('shared_prefix')} (less is better)", theme)
    labels = {**LABELS, "PyTorch": "SDPA, prefix copied", "flash": "PyTorch's flash, merged", "FA3": "FA3, merged"}
    names = [name for name in ("PyTorch", "cascade", "flash", "FA3") if any(name in c.others for c in cases)]
    legend(figure, names, theme, labels)
    return figure


def tree_vs_ring(theme: Theme) -> Figure:
    """Attention of one query to a context on two GPUs, by its length."""
    rows = results.select(RESULTS / "tree_latency.json", ("length", "us"), section="latency")
    figure = Figure(figsize=(6.4, 3.4))
    figure.subplots_adjust(left=0.11, right=0.97, bottom=0.15, top=0.9)
    ax = figure.add_subplot()
    log_axis(ax.set_xscale, ax, theme)
    ax.set_yscale("log")
    ax.grid(axis="y", color=theme.line, linewidth=0.6)
    drawn = (  # what, as what, where its label stands
        ("ring", "ring attention", theme.others["PyTorch"], "-", (-12, 10, "right")),
        ("tree:push", "tatten: merged by push", theme.ours, "-", (-12, 10, "right")),
        ("local", "its own shard only", theme.text, ":", (8, -12, "left")),
    )
    lengths = [r["length"] for r in rows]
    middle = len(rows) // 2
    for column, label, color, style, (right, up, side) in drawn:
        times = [r["us"][column] for r in rows]
        ax.plot(lengths, times, style, marker="o", markersize=4, color=color)
        at = lengths[middle], times[middle]
        ax.annotate(label, at, (right, up), textcoords="offset points", ha=side, color=color, fontsize=9)
    ax.set_xticks(lengths, [thousands(n) for n in lengths])
    ax.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g} us"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("keys in the context", color=theme.text, fontsize=9)
    ranks = rows[0]["ranks"]
    headline(figure, f"Attention of one query over {ranks} x {device('tree_latency')}", theme)
    return figure


PICTURES = {"speed_over_floor": speed_over_floor, "shared_prefix": shared_prefix, "tree_vs_ring": tree_vs_ring}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    matplotlib.rcParams["svg.hashsalt"] = "tatten"
    images = ROOT / "docs" / "img"
    images.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        for theme in (LIGHT, DARK):
            path = images / f"{name}{theme.suffix}.svg"
            draw(theme).savefig(path, transparent=True, metadata={"Date": None})
            print(path.relative_to(ROOT))
    page = ROOT / "docs" / "benchmarks.md"
    page.write_text(fill(page.read_text(), RESULTS))
    print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
