"""The picture of `docs/paged.md`: two rows of a block table, the pages of the pool that they name, and one in both."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from support.curves import Theme

PAGE = 16
TABLE, LENS = [[7, 3, 99], [7, 12, -1]], [41, 20]
LEFT_OF = {0: 0.0, 3: 24.0, 7: 48.0, 12: 72.0, 99: 96.0}  # pages of the pool
WIDTH, CELL = 20.0, 7.0
ROWS_AT, BOTTOM = [20.0, 66.0], 18.0
MARKED = 0, 20  # a sequence, and a key of it


def pages(theme: Theme) -> Figure:
    """Draw the table above the pool, with an arrow from each entry to its page."""
    figure = Figure(figsize=(9.6, 2.9))
    ax = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    ax.set(xlim=(-4, 120), ylim=(-9, 28))
    ax.axis("off")
    colors = [theme.ours, theme.others["PyTorch"]]
    used, owner = _slots()
    for page, left in LEFT_OF.items():
        holders = owner.get(page, set())
        color = theme.line if not holders else theme.others["FA3"] if len(holders) == 2 else colors[min(holders)]
        _draw_page(ax, left, used.get(page, 0), color, theme)
        named = f"page {page}" + (", in both" if len(holders) == 2 else "")
        ax.text(left + WIDTH / 2, -2.4, named, ha="center", va="center", color=theme.text, fontsize=9)
        if page != 99:
            ax.text(left + WIDTH + 2, 2.5, "...", ha="center", va="center", color=theme.text, fontsize=9)
    for b in range(len(TABLE)):
        _draw_row(ax, b, colors[b], theme)
    page, slot = TABLE[MARKED[0]][MARKED[1] // PAGE], MARKED[1] % PAGE
    x, step = LEFT_OF[page], WIDTH / PAGE
    ax.add_patch(Rectangle((x + slot * step, 0), step, 5, facecolor=theme.text, linewidth=0))
    label = f"key {MARKED[1]} of sequence {MARKED[0]} is key[{page}, {slot}]: {MARKED[1]} = 1 x {PAGE} + {slot}"
    ax.annotate(
        label,
        (x + (slot + 0.5) * step, 0),
        (x - 1, -7),
        color=theme.text,
        fontsize=9,
        va="center",
        arrowprops={"arrowstyle": "-", "color": theme.text, "linewidth": 0.8, "relpos": (0.17, 1)},
    )
    return figure


def _slots() -> tuple[dict[int, int], dict[int, set[int]]]:
    """Return how many keys of each page are in use, and which sequences have it."""
    used: dict[int, int] = {}
    owner: dict[int, set[int]] = {}
    for b, (row, length) in enumerate(zip(TABLE, LENS, strict=True)):
        for i in range(-(-length // PAGE)):
            used[row[i]] = max(used.get(row[i], 0), min(PAGE, length - i * PAGE))
            owner.setdefault(row[i], set()).add(b)
    return used, owner


def _draw_page(ax: Axes, left: float, used: int, color: str, theme: Theme) -> None:
    step = WIDTH / PAGE
    for slot in range(PAGE):
        filled = {"facecolor": color, "alpha": 0.75} if slot < used else {"facecolor": "none"}
        ax.add_patch(Rectangle((left + slot * step, 0), step, 5, edgecolor="none", **filled))
        if slot:
            ax.plot([left + slot * step] * 2, [0, 5], color=theme.line, linewidth=0.5)
    ax.add_patch(Rectangle((left, 0), WIDTH, 5, facecolor="none", edgecolor=theme.text, linewidth=1))


def _draw_row(ax: Axes, b: int, color: str, theme: Theme) -> None:
    """Draw a row of the table, and the arrows of its entries."""
    left, row = ROWS_AT[b], TABLE[b]
    label = f"block_table[{b}]: sequence {b}, {LENS[b]} keys"
    ax.text(left + 1.5 * CELL, BOTTOM + 6.3, label, ha="center", color=color, fontsize=10)
    for i, entry in enumerate(row):
        middle = left + CELL * (i + 0.5)
        ax.add_patch(Rectangle((middle - CELL / 2, BOTTOM), CELL, 5, facecolor="none", edgecolor=theme.text))
        ax.text(middle, BOTTOM + 2.4, str(entry), ha="center", va="center", color=theme.text, fontsize=10)
        if i * PAGE < LENS[b]:
            stop = LEFT_OF[entry] + WIDTH / 2 + 2 * (b - 0.5), 5.4
            style = {"arrowstyle": "-|>", "mutation_scale": 9, "color": color, "linewidth": 1.2}
            ax.add_patch(FancyArrowPatch((middle, BOTTOM), stop, shrinkA=0, shrinkB=0, **style))
