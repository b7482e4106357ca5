"""Draw how FlashAttention-2, FlashDecoding and Lean Attention distribute tiles over the SMs of a GPU and over time.

    python examples/draw_schedule.py                                  # needs matplotlib: pip install "tatten[draw]"
    python examples/draw_schedule.py --lengths 131072 1024 1024 1024 --kv-heads 8 --out lean.svg

Figure 1 of Lean Attention (arXiv 2405.10480), and below it the same for a batch of real lengths. A tile takes one unit
of time and an SM does one program at a time. The cost of combining partial states is left out; the states are counted.
In Lean the last program that arrives at a work tile combines them, in FlashDecoding a second kernel does.
"""

from __future__ import annotations

import argparse
import heapq
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

# The tests compare the kernels with this schedule.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from stream_k_schedule import Schedule, Visit

PALETTE = ["#4269d0", "#ff725c", "#3ca951", "#a463f2", "#efb118", "#ff8ab7", "#6cc5b0", "#97bbf5", "#9c6b4e", "#9498a0"]
RAGGED = [1400, 2300, 3700, 6100, 10000, 17000, 28000, 61000]  # spread as logarithms of 1k to 64k are


@dataclass(frozen=True)
class Batch:
    """Sequences of `lengths` keys, read in tiles of `block_n` by a GPU of `sms` SMs."""

    title: str
    lengths: Sequence[int]
    kv_heads: int
    sms: int
    block_n: int
    splits: int | None = None  # of FlashDecoding; by default what its heuristic picks

    @property
    def tiles(self) -> tuple[int, ...]:
        return Schedule.of_lengths(self.lengths, self.block_n, self.kv_heads, self.sms).tiles


@dataclass(frozen=True)
class Run:
    """The visits of each SM, with the time at which each began, in units of a tile."""

    name: str
    sms: list[list[tuple[int, Visit]]]
    programs: int

    @property
    def end(self) -> int:
        return max(start + visit.stop - visit.start for sm in self.sms for start, visit in sm)

    @property
    def occupancy(self) -> float:
        """The share of SMs that do any work."""
        return sum(map(bool, self.sms)) / len(self.sms)

    @property
    def efficiency(self) -> float:
        """Return the work divided by the time of all SMs until the last one is done."""
        work = sum(visit.stop - visit.start for sm in self.sms for _, visit in sm)
        return work / (len(self.sms) * self.end)

    @property
    def states(self) -> int:
        return sum(visit.slot is not None for sm in self.sms for _, visit in sm)


def run(name: str, programs: list[list[Visit]], sms: int) -> Run:
    """Start programs in order, each on the SM that is free first."""
    free = [(0, sm) for sm in range(sms)]
    done: list[list[tuple[int, Visit]]] = [[] for _ in range(sms)]
    for program in programs:
        now, sm = heapq.heappop(free)
        for visit in program:
            done[sm].append((now, visit))
            now += visit.stop - visit.start
        heapq.heappush(free, (now, sm))
    return Run(name, done, len(programs))


def split_each_work_tile(tiles: Sequence[int], splits: int) -> list[list[Visit]]:
    """Split all work tiles in the same way: each is a tile space of its own."""
    programs = []
    for work_tile, n in enumerate(tiles):
        schedule = Schedule((n,), splits)
        visits = [visit for program in range(schedule.active_programs) for visit in schedule.visits(program)]
        programs += [[Visit(work_tile, visit.start, visit.stop, visit.slot)] for visit in visits]
    return programs


def heuristic(work_tiles: int, tiles: int, sms: int) -> int:
    """Choose the splits as flash-attn's `num_splits_heuristic` does: the fewest with 85% of the best efficiency."""
    if work_tiles >= 0.8 * sms:
        return 1
    eligible = [n for n in range(1, min(128, sms, tiles) + 1) if n == 1 or -(-tiles // n) != -(-tiles // (n - 1))]
    efficiency = {n: work_tiles * n / sms / -(-work_tiles * n // sms) for n in eligible}
    return next(n for n in eligible if efficiency[n] >= 0.85 * max(efficiency.values()))


def runs(batch: Batch) -> Iterator[Run]:
    tiles, sms = batch.tiles, batch.sms
    splits = batch.splits or heuristic(len(tiles), max(tiles), sms)
    yield run("FlashAttention-2", split_each_work_tile(tiles, 1), sms)
    yield run(f"FlashDecoding, {splits} split" + "s" * (splits > 1), split_each_work_tile(tiles, splits), sms)
    lean = Schedule(tiles, sms)
    yield run("Lean Attention", [lean.visits(program) for program in range(lean.active_programs)], sms)


def shade(batch: Batch, work_tile: int) -> tuple[float, ...]:
    """Choose a colour for each sequence, in two tones for its heads, or one for each head of a single sequence."""
    sequence, head = divmod(work_tile, batch.kv_heads)
    if len(batch.lengths) == 1:
        return to_rgb(PALETTE[head % len(PALETTE)])
    tone = 0.28 * (head % 2)
    return tuple(tone + (1 - tone) * channel for channel in to_rgb(PALETTE[sequence % len(PALETTE)]))


def draw(ax: Axes, batch: Batch, result: Run, end: int) -> None:
    gap = 0.07 if batch.sms <= 16 else 0
    boxes, colors = [], []
    for sm, visits in enumerate(result.sms):
        for begin, visit in visits:
            step = 1 if gap else visit.stop - visit.start
            for left in range(begin, begin + visit.stop - visit.start, step):
                x, y = (left + gap / 2, left + step - gap / 2), (sm + gap, sm + 1 - gap)
                boxes.append([(x[0], y[0]), (x[1], y[0]), (x[1], y[1]), (x[0], y[1])])
                colors.append(shade(batch, visit.work_tile))
                if gap:
                    label = f"{'ABCDEFGHIJ'[visit.work_tile % 10]}{visit.start + left - begin}"
                    ax.text(left + step / 2, sm + 0.5, label, ha="center", va="center", color="white", fontsize=9)
    ax.add_collection(PolyCollection(boxes, facecolors=colors, edgecolors="white", linewidths=0 if gap else 0.15))
    ax.axvline(result.end, color="#333333", linewidth=1, linestyle=(0, (4, 3)))
    merged = f"{result.states} partial states" if result.states else "nothing to combine"
    ax.set_title(result.name, loc="left", fontsize=11, fontweight="bold", pad=20)
    ax.text(
        0, 1.025, f"{result.efficiency:.0%} efficient, {merged}", transform=ax.transAxes, fontsize=9, color="#555555"
    )
    ax.set(xlim=(0, end * 1.02), ylim=(batch.sms, 0), facecolor="#f2f2f2", xlabel="time, tiles")
    if gap:
        ax.set_yticks([sm + 0.5 for sm in range(batch.sms)], [str(sm) for sm in range(batch.sms)])
        ax.xaxis.get_major_locator().set_params(integer=True)
    ax.tick_params(length=0, labelsize=8)
    ax.spines[:].set_visible(False)


def picture(batches: list[Batch]) -> Figure:
    figure = Figure(figsize=(13, 8.6), layout="constrained")
    parts = figure.subfigures(len(batches), height_ratios=[1, 1.9][: len(batches)], hspace=0.04)
    for part, batch in zip(parts, batches, strict=True):
        results = list(runs(batch))
        part.suptitle(batch.title, x=0.012, ha="left", fontsize=12)
        axes = part.subplots(1, len(results), sharey=True)
        for ax, result in zip(axes, results, strict=True):
            draw(ax, batch, result, max(r.end for r in results))
        axes[0].set_ylabel("SM")
    return figure


def table(batch: Batch) -> str:
    results = list(runs(batch))
    lines = [
        f"{r.name:24} {r.programs:9} {r.occupancy:9.0%} {r.end:9} {r.efficiency:11.1%} "
        f"{results[0].end / r.end:7.2f}x {r.states:15}"
        for r in results
    ]
    head = "schedule                  programs  busy SMs      time  efficiency  speedup  partial states"
    return "\n".join([batch.title, head, *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=RAGGED, help="keys of each sequence")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--programs", type=int, default=132, help="SMs, one program on each")
    parser.add_argument("--block-n", type=int, default=128, help="keys of a tile")
    parser.add_argument("--splits", type=int, help="of FlashDecoding; default: what flash-attn's heuristic picks")
    parser.add_argument(
        "--out", type=Path, default=Path(tempfile.gettempdir()) / "schedule.png", help="png, svg or pdf"
    )
    args = parser.parse_args()

    toy = Batch("Figure 1 of the paper: two heads of five tiles on five SMs", [5], 2, 5, 1, splits=2)
    shown = f"{len(args.lengths)} sequences of {min(args.lengths)} to {max(args.lengths)} keys"
    title = f"{shown}, {args.kv_heads} kv heads, tiles of {args.block_n} keys, {args.programs} SMs"
    real = Batch(title, args.lengths, args.kv_heads, args.programs, args.block_n, args.splits)
    print(f"{table(toy)}\n\n{table(real)}")
    picture([toy, real]).savefig(args.out, dpi=160)
    print(f"\nwrote {args.out}")


if __name__ == "__main__":
    main()
