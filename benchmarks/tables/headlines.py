"""The headlines of docs/benchmarks.md: a sentence about all rows of some files, and a small table of a few of them."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support.results import read

from tables.table import Cell, Row, heads, lines_of, number

MOST_ROWS = 5  # of more rows, the fastest, the median and the slowest are shown


@dataclass(frozen=True)
class Headline:
    """Ours beside the best of the others. `said` is a format string that may name the figures of `figures`."""

    files: tuple[str, ...]
    said: str
    case: dict[str, Cell | str]  # columns that distinguish the rows
    peer: str
    unit: str
    theirs: Callable[[Row], float]
    ours: Callable[[Row], float]
    bound: Callable[[Row], float] | None = None  # the least time of ours, or its greatest rate
    bound_name: str = "floor"
    only: Callable[[Row], bool] = lambda r: True
    digits: int = 1

    def faster(self, r: Row) -> float:
        """Return how many times as fast ours is; more of a rate is faster, and less of a time."""
        ratio = self.theirs(r) / self.ours(r)
        return 1 / ratio if self.unit.endswith("/s") else ratio

    def figures(self, rows: list[Row]) -> dict[str, float]:
        faster = [self.faster(r) for r in rows]
        figures = {"least": min(faster), "most": max(faster), "mean": statistics.geometric_mean(faster)}
        if self.bound is not None:
            over = [self.ours(r) / self.bound(r) for r in rows]
            figures |= {"least_over": min(over), "most_over": max(over)}
        return figures

    def markdown(self, folder: Path) -> str:
        """Return the headline as it stands in the page; raise ResultsError if a file is missing."""
        data = [read(folder / f"{name}.json") for name in self.files]
        rows = [r for d in data for r in d["rows"] if self.only(r)]
        ranks = rows[0].get("ranks", 1)
        devices = " and ".join(dict.fromkeys(d["device"] for d in data))
        device = f"{ranks} x {devices}" if ranks > 1 else devices
        said = textwrap.fill(f"**{device}.** {self.said.format(**self.figures(rows))}", 120, break_on_hyphens=False)
        shown = sorted(rows, key=self.faster, reverse=True)
        if len(rows) > MOST_ROWS:
            shown = [shown[0], shown[len(rows) // 2], shown[-1]]
        times = {f"{self.peer} {self.unit}": self.theirs, f"tatten {self.unit}": self.ours}
        if self.bound is not None:
            times[f"{self.bound_name} {self.unit}"] = self.bound
        columns = self.case | {name: lambda r, time=time: number(time(r), self.digits) for name, time in times.items()}
        columns["times as fast"] = lambda r: number(self.faster(r), 2)
        return f"{said}\n\n{lines_of(columns, shown)}\n"


def best_other(*ours: str) -> Callable[[Row], float]:
    """Return a function of a row: the least time of those that are not ours."""
    return lambda r: min(us for name, us in r["us"].items() if name not in ours)


def us(name: str) -> Callable[[Row], float]:
    return lambda r: r["us"][name]


def field(name: str) -> Callable[[Row], float]:
    return lambda r: r[name]


def model(r: Row) -> str:
    names = {"gpt_oss": "gpt-oss-20b", "gemma2": "Gemma-2-9b"}
    return names.get(r.get("model", ""), "DeepSeek-V3" if r.get("section") == "step" else "Llama-3.1-8B")


STEP = {"theirs": field("inductor_ms"), "ours": field("tatten_ms"), "bound": field("floor_ms")}

HEADLINES = {
    "headline_steps": Headline(
        ("static_cache", "written_out", "latent_step"),
        "A decode step in the shapes of four models is {least:.2f} to {most:.2f} times as fast as with Inductor. It "
        "takes {least_over:.2f} to {most_over:.2f} times its byte floor.",
        {"model": model, "batch": "batch", "used": lambda r: f"{r['used']} of {r.get('slots') or r['max_cache_len']}"},
        "Inductor",
        "ms",
        **STEP,
        only=lambda r: r.get("section") != "layer",
        digits=2,
    ),
    "headline_generate": Headline(
        ("generate", "generate_cpp_wrapper", "generate_batch8"),
        "A token of `generate` by wall clock, with all 32 layers in the shape of Llama-3.1-8B, is {least:.2f} to "
        "{most:.2f} times as fast as with Inductor. It takes {least_over:.2f} to {most_over:.2f} times its byte "
        "floor.",
        {"mode": "mode", "batch": "batch"},
        "Inductor",
        "ms",
        lambda r: r["token_ms"]["inductor"],
        lambda r: r["token_ms"]["tatten"],
        field("floor_ms"),
        digits=2,
    ),
    "headline_cpu": Headline(
        ("static_cache_cpu",),
        "A decode step of a Llama of about 100M parameters is {least:.2f} to {most:.2f} times as fast as with "
        "Inductor. It takes {least_over:.1f} to {most_over:.1f} times its byte floor.",
        {"dtype": "dtype", "batch": "batch", "heads": heads, "used": lambda r: f"{r['used']} of {r['max_cache_len']}"},
        "Inductor",
        "ms",
        **STEP,
    ),
    "headline_ragged": Headline(
        ("decode_ragged",),
        "Attention over sequences of different lengths is {least:.2f} to {most:.2f} times as fast as FlashAttention-3 "
        "at the best of three settings of its splits. It takes {least_over:.2f} to {most_over:.2f} times its byte "
        "floor.",
        {"batch": lambda r: len(r["lengths"]), "lengths": "name", "heads": heads},
        "FlashAttention-3",
        "us",
        best_other("auto", "triton", "sdpa"),
        us("auto"),
        field("floor_us"),
        digits=0,
    ),
    "headline_equal": Headline(
        ("decode_nine",),
        "Attention over sequences of equal length without a mask is {least:.2f} to {most:.2f} times as fast as the "
        "best of cuDNN, FlashAttention-2 and FlashAttention-3, {mean:.2f} times in geometric mean. It takes "
        "{least_over:.2f} to {most_over:.2f} times its byte floor.",
        {"batch": lambda r: len(r["lengths"]), "keys": "name", "heads": heads, "head_dim": "head_dim"},
        "best other",
        "us",
        best_other("auto", "triton"),
        us("auto"),
        field("floor_us"),
    ),
    "headline_prefix": Headline(
        ("shared_prefix",),
        "Attention to a prefix that the batch shares is {least:.2f} to {most:.2f} times as fast as the best other, "
        "{mean:.2f} times in geometric mean. It takes {least_over:.2f} to {most_over:.2f} times its floor.",
        {"batch": "batch", "prefix": "prefix", "suffix": "suffix", "heads": heads},
        "best other",
        "us",
        best_other("tatten", "op"),
        us("tatten"),
        field("floor_us"),
    ),
    "headline_trees": Headline(
        ("prefix_trees",),
        "Attention to trees of prefixes is {least:.2f} to {most:.2f} times as fast as the best composition of "
        "FlashAttention-3, cuDNN and PyTorch's flash attention, {mean:.2f} times in geometric mean.",
        {
            "nodes": lambda r: ", ".join(map(str, r["nodes"])),
            "tokens of a node": lambda r: ", ".join(map(str, r["lengths"])),
            "heads": heads,
        },
        "best composition",
        "us",
        best_other("tatten"),
        us("tatten"),
        field("floor_us"),
    ),
    "headline_rollouts": Headline(
        ("rollouts",),
        "Rollouts from a shared prefix draw {least:.1f} to {most:.1f} times the tokens per second of `generate` "
        "compiled by Inductor.",
        {"samples": "samples"},
        "Inductor",
        "tokens/s",
        lambda r: r["tokens_per_second"]["inductor"],
        lambda r: r["tokens_per_second"]["fork"],
        digits=0,
    ),
    "headline_latents": Headline(
        ("latent_kernel_h100",),
        "DeepSeek-V3's latent attention is {least:.2f} to {most:.2f} times as fast as the better of FlashMLA and "
        "FlashAttention-3, {mean:.2f} times in geometric mean. It takes {least_over:.2f} to {most_over:.2f} times its "
        "floor.",
        {"heads": "heads", "batch": "batch", "latents": "length"},
        "best other",
        "us",
        best_other("tatten", "unrounded"),
        us("tatten"),
        lambda r: max(r["bytes_us"], r["flops_us"]),
    ),
    "headline_gpus": Headline(
        ("tree_latency",),
        "Attention of one query to a context on two GPUs is {least:.1f} to {most:.1f} times as fast as ring "
        "attention. It takes {least_over:.2f} to {most_over:.2f} times as long as attention to one GPU's own shard.",
        {"keys": "length"},
        "ring",
        "us",
        us("ring"),
        us("tree:push"),
        us("local"),
        "own shard",
    ),
}
