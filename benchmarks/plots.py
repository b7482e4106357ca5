"""Draw the pictures of docs/img, and fill the tables of the pages about benchmarks, from recorded figures.

    python benchmarks/plots.py          # needs matplotlib: pip install "tatten[draw]"

Each picture is drawn twice, for light and for dark pages. From the same figures the same bytes are written, for
which margins are fixed: matplotlib's layout engines differ in the last digit from run to run.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from support import results
from support.curves import DARK, LIGHT, Line, Theme, headline, lines, log_axis, thousands
from support.pages_picture import pages
from tables import PAGES, fill
from tables.table import Row, heads

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


MARKERS = {"PyTorch": "X", "cuDNN": "s", "flash": "^", "FA3": "D", "cascade": "v"}


@dataclass(frozen=True)
class Case:
    """A line of a panel: times over the floor, by implementation."""

    name: str
    tatten: float
    others: dict[str, float]


def case(name: str, r: Row, ours: str, others: dict[str, str]) -> Case:
    """Return a case whose columns `others` maps to the names they are drawn under; missing columns are left out."""
    us, floor = r["us"], r["floor_us"]
    over_floor: dict[str, float] = {}
    for column, drawn in others.items():
        if column in us:
            over_floor[drawn] = min(us[column] / floor, over_floor.get(drawn, float("inf")))
    return Case(name, us[ours] / floor, over_floor)


def steps() -> list[Case]:
    """Return the cases of decode steps of a compiled model."""
    cases = []
    for r in results.select(RESULTS / "static_cache.json", ("inductor_ms", "tatten_ms", "floor_ms")):
        name = f"{r['batch']} x {thousands(r['used'])} of {thousands(r['max_cache_len'])} slots"
        cases.append(Case(name, r["tatten_ms"] / r["floor_ms"], {"PyTorch": r["inductor_ms"] / r["floor_ms"]}))
    return cases


def ragged() -> list[Case]:
    columns = {"sdpa": "PyTorch", "fa3": "FA3", "fa3_8": "FA3", "fa3_32": "FA3"}
    cases = []
    for r in results.select(RESULTS / "decode_ragged.json", ("us", "floor_us", "name")):
        count = "" if "one" in r["name"] else f"{len(r['lengths'])} x "
        cases.append(case(f"{count}{r['name']}, {heads(r)}", r, "auto", columns))
    return cases


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
    """Draw times over the floor, one line for each case, the fastest at the left."""
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


LABELS = {
    "PyTorch": "PyTorch",
    "cuDNN": "cuDNN",
    "flash": "FlashAttention-2",
    "FA3": "FlashAttention-3",
    "cascade": "FlashInfer cascade",
}


def device(name: str) -> str:
    return str(results.read(RESULTS / f"{name}.json")["device"])


def legend(figure: Figure, names: list[str], theme: Theme, labels: dict[str, str]) -> None:
    """Draw the legend, one line below the panels."""
    ax = figure.axes[0]
    handles = [ax.scatter([], [], s=80, color=theme.ours, label="tatten", linewidths=0)]
    for name in names:
        drawn = {"marker": MARKERS[name], "color": theme.others[name], "label": labels[name]}
        handles.append(ax.scatter([], [], s=26, linewidths=0, **drawn))
    figure.legend(
        handles=handles, loc="lower center", ncols=len(handles), frameon=False, labelcolor=theme.text, fontsize=9
    )


def speed_over_floor(theme: Theme) -> Figure:
    """Draw plain decode: the step of a model, ragged lengths, equal lengths."""
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
    """Draw attention to a prefix that all sequences share."""
    figure, cases = Figure(figsize=(9.6, 3.8)), prefixes()
    figure.subplots_adjust(left=0.18, right=0.985, bottom=0.16, top=0.84)
    panel(figure.add_subplot(), "Sequences x (shared prefix + own suffix), query/kv heads", cases, theme)
    headline(figure, f"A shared prefix: time over the floor, {device('shared_prefix')} (less is better)", theme)
    labels = {**LABELS, "PyTorch": "SDPA, prefix copied", "flash": "PyTorch's flash, merged", "FA3": "FA3, merged"}
    names = [name for name in ("PyTorch", "cascade", "flash", "FA3") if any(name in c.others for c in cases)]
    legend(figure, names, theme, labels)
    return figure


def tree_vs_ring(theme: Theme) -> Figure:
    """Draw attention of one query to a context on two GPUs, by its length."""
    rows = results.select(RESULTS / "tree_latency.json", ("length", "us"), section="latency")

    def points(column: str) -> list[tuple[int, float]]:
        return [(r["length"], r["us"][column]) for r in rows]

    drawn = [
        Line("ring attention", points("ring"), theme.others["PyTorch"]),
        Line("tatten: merged by push", points("tree:push"), theme.ours),
        Line("its own shard only", points("local"), theme.text, ":", (8, -12, "left")),
    ]
    figure = lines(drawn, " us", "keys in the context", theme)
    headline(figure, f"Attention of one query over {rows[0]['ranks']} x {device('tree_latency')}", theme)
    return figure


def sparse(theme: Theme) -> Figure:
    """Draw the bytes that attention reads, by the number of keys: all of them, or those that a top-k picked."""
    keys = "length", "bytes_us", "dense_bytes_us"
    rows = results.select(RESULTS / "sparse_kernel.json", keys, heads=128, batch=1, picks="random")
    rate = results.read(RESULTS / "sparse_kernel.json")["bytes_per_second"] / 1e12  # MB per us
    drawn = [
        Line("all latents", [(r["length"], r["dense_bytes_us"] * rate) for r in rows], theme.others["PyTorch"]),
        Line("tatten: 2048 picks", [(r["length"], r["bytes_us"] * rate) for r in rows], theme.ours),
    ]
    figure = lines(drawn, " MB", "keys of the sequence", theme)
    headline(figure, "Latents that a layer reads for a token, DeepSeek-V3.2's widths (less is better)", theme)
    return figure


def prefill(theme: Theme) -> Figure:
    """Draw the seconds of a prefill, by its length and the number of ranks."""
    keys = "length", "ranks", "s", "floor_s"
    one, all_ranks = (results.select(RESULTS / "prefill.json", keys, arm=arm) for arm in ("sdpa", "striped"))
    if (long := RESULTS / "prefill_long.json").exists():  # a million tokens, which no GPU holds alone
        all_ranks += results.select(long, keys)
    gpus = f"{all_ranks[0]['ranks']} GPUs"
    drawn = [
        Line("one GPU", [(r["length"], r["s"]) for r in one], theme.others["PyTorch"]),
        Line(f"tatten: {gpus}", [(r["length"], r["s"]) for r in all_ranks], theme.ours, "-", (30, -24, "left")),
        Line("its floor", [(r["length"], r["floor_s"]) for r in all_ranks], theme.text, ":", (30, -22, "left")),
    ]
    figure = lines(drawn, " s", "tokens of the prompt", theme)
    headline(figure, f"Prefill at Llama-3.1-8B's shapes, {device('prefill')} (less is better)", theme)
    return figure


def rollouts(theme: Theme) -> Figure:
    """Draw the tokens per second of rollouts, by the number of samples of each prompt."""
    rows = results.select(RESULTS / "rollouts.json", ("samples", "prompts", "tokens_per_second"))

    def points(arm: str) -> list[tuple[int, float]]:
        return [(r["samples"], r["tokens_per_second"][arm]) for r in rows]

    drawn = [
        Line("generate, compiled by Inductor", points("inductor"), theme.others["PyTorch"]),
        Line("generate, compiled by tatten", points("tatten"), theme.ours, "--"),
        Line("tatten: a fork of each prompt", points("fork"), theme.ours),
    ]
    figure = lines(drawn, "", f"samples of each of {rows[0]['prompts']} prompts", theme)
    figure.axes[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    figure.axes[0].margins(y=0.15)  # for the label of the uppermost
    headline(figure, f"Rollouts, tokens per second, {device('rollouts')} (more is better)", theme)
    return figure


PICTURES = {
    "speed_over_floor": speed_over_floor,
    "shared_prefix": shared_prefix,
    "tree_vs_ring": tree_vs_ring,
    "sparse": sparse,
    "prefill": prefill,
    "rollouts": rollouts,
    "pages": pages,
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    matplotlib.rcParams["svg.hashsalt"] = "tatten"
    images = ROOT / "docs" / "img"
    images.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        for theme in (LIGHT, DARK):
            path = images / f"{name}{theme.suffix}.svg"
            try:
                draw(theme).savefig(path, transparent=True, metadata={"Date": None})
            except results.NotRecorded as missing:
                print(f"{path.relative_to(ROOT)} not drawn: {missing}")
            else:
                print(path.relative_to(ROOT))
    for page in PAGES:
        page.write_text(fill(page.read_text(), RESULTS))
        print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
