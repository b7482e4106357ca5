"""What docs/benchmarks.md claims, each with the figure that has to bear it out.

A claim that a new run does not support is mended in the page and here together: `said` is the page's own words.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
OURS = ("auto", "triton")


@dataclass(frozen=True)
class Claim:
    """A bound on a figure of the rows of `<file>.json`; a run may miss it by the fraction `within`."""

    name: str
    file: str
    rows: int  # of a complete run, at least
    figure: Callable[[list[Row]], float]
    said: str
    at_most: float | None = None
    at_least: float | None = None
    within: float = 0.05

    def holds(self, figure: float) -> bool:
        """Whether the figure supports the claim; NaN never does."""
        return (self.at_most is None or figure <= self.at_most * (1 + self.within)) and (
            self.at_least is None or figure >= self.at_least * (1 - self.within)
        )

    @property
    def bound(self) -> str:
        named = (("at most", self.at_most), ("at least", self.at_least))
        bounds = (f"{name} {bound:g}" for name, bound in named if bound is not None)
        return f"{' and '.join(bounds)}, within {self.within:.0%}"


def to_peers(r: Row) -> float:
    """Ours over the best of the others."""
    return r["us"]["auto"] / min(us for name, us in r["us"].items() if name not in OURS)


def over(ours: str, *others: str) -> Callable[[Row], float]:
    """One column over the least of others; the first of them has to be there."""
    return lambda r: r["us"][ours] / min(r["us"][others[0]], *(r["us"].get(x, float("inf")) for x in others))


def slower(key: str, than: str) -> Callable[[Row], float]:
    return lambda r: r[key] / r[than]


def over_push(merge: str) -> Callable[[Row], float]:
    return lambda r: r["us"][merge] / r["us"]["push"]


def geomean(ratio: Callable[[Row], float]) -> Callable[[list[Row]], float]:
    return lambda rows: statistics.geometric_mean(map(ratio, rows))


def largest(ratio: Callable[[Row], float]) -> Callable[[list[Row]], float]:
    return lambda rows: max(map(ratio, rows), key=lambda x: (math.isnan(x), x))


def least(ratio: Callable[[Row], float]) -> Callable[[list[Row]], float]:
    return lambda rows: min(map(ratio, rows), key=lambda x: (not math.isnan(x), x))


def one(key: str, value: object, figure: Callable[[Row], float]) -> Callable[[list[Row]], float]:
    """The figure of the row of which `key` is `value`; a ValueError if there is another number of them than one."""

    def found(rows: list[Row]) -> float:
        (row,) = (r for r in rows if r[key] == value)
        return figure(row)

    return found


def one_call(groups: str, given: str, figure: str) -> Callable[[list[Row]], float]:
    """A figure of `prefix_trees.py`'s groups, by which they are and how they are given."""
    return lambda rows: one("given", given, lambda r: r[figure])([r for r in rows if r["groups"] == groups])


def compiling(r: Row) -> float:
    """Seconds of compiling over Inductor's."""
    return r["compile_s"]["tatten"] / r["compile_s"]["inductor"]


def those(only: Callable[[Row], bool], figure: Callable[[list[Row]], float]) -> Callable[[list[Row]], float]:
    return lambda rows: figure([r for r in rows if only(r)])


def spread(values: Iterable[float]) -> float:
    """The largest over the least."""
    found = list(values)
    return max(found) / min(found)


def host(call: str) -> Callable[[list[Row]], float]:
    return one("call", call, lambda r: r["over_sdpa"])


def fork_over(backend: str) -> Callable[[Row], float]:
    return lambda r: r["tokens_per_second"]["fork"] / r["tokens_per_second"][backend]


def to_same_function(r: Row) -> float:
    """A step in eager mode over the best that computes the same: SDPA lacks Gemma 2's soft cap."""
    ms = r["ms"]
    return ms["tatten"] / min(
        ms[name] for name in ("eager", "sdpa") if name in ms and (name, r["model"]) != ("sdpa", "gemma2")
    )


CLAIMS = [
    Claim(
        "model step against Inductor",
        "static_cache",
        4,
        least(slower("inductor_ms", "tatten_ms")),
        "at least 2.4 times as fast as Inductor's",
        at_least=2.4,
    ),
    Claim(
        "model step over its floor",
        "static_cache",
        4,
        largest(slower("tatten_ms", "floor_ms")),
        "at most 1.6 times its byte floor",
        at_most=1.6,
    ),
    Claim(
        "ragged, worst against FA3",
        "decode_ragged",
        5,
        largest(over("auto", "fa3", "fa3_8", "fa3_32")),
        "at most 0.98 times as long as FlashAttention-3",
        at_most=0.98,
    ),
    Claim(
        "ragged, mean against FA3",
        "decode_ragged",
        5,
        geomean(over("auto", "fa3", "fa3_8", "fa3_32")),
        "0.89 times in geometric mean",
        at_most=0.89,
    ),
    Claim(
        "equal lengths, worst",
        "decode_nine",
        9,
        largest(to_peers),
        "at most 1.01 times as long as the best",
        at_most=1.01,
    ),
    Claim("equal lengths, mean", "decode_nine", 9, geomean(to_peers), "0.98 times in geometric mean", at_most=0.98),
    Claim("grid, mean", "decode_grid", 63, geomean(to_peers), "0.97 over the 63 shapes", at_most=0.97),
    Claim(
        "masked layer over the exact length",
        "decode_static",
        6,
        largest(over("layer", "exact")),
        "at most 1.2 times as long",
        at_most=1.2,
    ),
    Claim(
        "a mask found in the call",
        "decode_static",
        6,
        largest(lambda r: r["us"]["auto"] - r["us"]["layer"]),
        "at most 11 us",
        at_most=11,
        within=0.15,
    ),
    Claim(
        "float8, head_dim 128",
        "float8",
        12,
        those(lambda r: r["head_dim"] == 128 and r["keys"] > 1024, largest(over("float8", "16 bits"))),
        "at most 0.71 of the time",
        at_most=0.71,
    ),
    Claim(
        "float8, head_dim 64",
        "float8",
        12,
        those(lambda r: r["head_dim"] == 64, largest(over("float8", "16 bits"))),
        "0.91 at head_dim 64",
        at_most=0.91,
    ),
    Claim(
        "host, a call",
        "overhead",
        15,
        host("decode_attention"),
        "2.1 times what SDPA costs",
        at_most=2.1,
        within=0.15,
    ),
    Claim(
        "host, a mask",
        "overhead",
        15,
        host("decode_attention, attn_mask"),
        "4.7 times with a mask",
        at_most=4.7,
        within=0.15,
    ),
    Claim(
        "host, two segments",
        "overhead",
        15,
        host("bifurcated_attention, two segments"),
        "5 times for two segments",
        at_most=5,
        within=0.15,
    ),
    Claim(
        "host, compiled",
        "overhead",
        15,
        host("decode_attention, compiled"),
        "0.69 of what Inductor's SDPA costs",
        at_most=0.69,
        within=0.15,
    ),
    Claim(
        "host, compiled with a mask",
        "overhead",
        15,
        host("decode_attention, compiled, attn_mask"),
        "0.36 with a mask that all layers share",
        at_most=0.36,
        within=0.15,
    ),
    Claim(
        "fixed splits, figure 7a",
        "lean_paper",
        20,
        those(lambda r: "7a" in r["figures"], lambda rows: statistics.fmean(r["over_fixed"] for r in rows)),
        "1.23 times as fast on average at head_dim 64",
        at_least=1.23,
    ),
    Claim(
        "fixed splits, figure 9",
        "lean_paper",
        20,
        those(lambda r: "9" in r["figures"], lambda rows: statistics.fmean(r["over_fixed"] for r in rows)),
        "1.10 at 128",
        at_least=1.10,
    ),
    Claim(
        "shared prefix, worst against compositions",
        "shared_prefix",
        9,
        largest(over("tatten", "fa3", "aten", "flash")),
        "at most 1.01 times as long as the best composition",
        at_most=1.01,
    ),
    Claim(
        "shared prefix, mean against compositions",
        "shared_prefix",
        9,
        geomean(over("tatten", "fa3", "aten", "flash")),
        "0.88 times in geometric mean",
        at_most=0.88,
    ),
    Claim(
        "best of n over its floor",
        "best_of_n",
        7,
        largest(slower("with_ms", "floor_ms")),
        "at most 2.1 times its floor",
        at_most=2.1,
    ),
    Claim(
        "rollouts against Inductor",
        "rollouts",
        1,
        one("samples", 16, fork_over("inductor")),
        "at least 6 times the tokens per second of `generate` compiled by Inductor",
        at_least=6,
        within=0,
    ),
    Claim(
        "rollouts against generate by tatten",
        "rollouts",
        1,
        one("samples", 16, fork_over("tatten")),
        "twice those of the same compiled by tatten",
        at_least=2,
        within=0,
    ),
    Claim(
        "push against three all-reduces",
        "tree_merge",
        4,
        least(over_push("all_reduce")),
        "at least 8 times as fast as three all-reduces",
        at_least=8,
    ),
    Claim(
        "push against one all-gather",
        "tree_merge",
        4,
        least(over_push("all_gather")),
        "2.5 times as fast as one all-gather",
        at_least=2.5,
    ),
    Claim(
        "push against three all-reduces, eight GPUs",
        "tree_merge_8",
        4,
        least(over_push("all_reduce")),
        "at least 5 times as fast as three all-reduces",
        at_least=5,
    ),
    Claim(
        "push against one all-gather, eight GPUs",
        "tree_merge_8",
        4,
        least(over_push("all_gather")),
        "3.5 times as fast as one all-gather",
        at_least=3.5,
    ),
    Claim(
        "what the merge adds",
        "tree_latency",
        6,
        largest(lambda r: r["us"]["tree:push"] - r["us"]["local"]),
        "at most 6 us",
        at_most=6,
        within=0.15,
    ),
    Claim(
        "merged attention against the ring",
        "tree_latency",
        6,
        least(lambda r: r["us"]["ring"] / r["us"]["tree:push"]),
        "at least 12 times as fast as ring attention",
        at_least=12,
    ),
    Claim(
        "bytes that push sends, by length",
        "tree_bytes",
        20,
        those(lambda r: r["arm"] == "tree:push", lambda rows: spread(r["bytes"] for r in rows)),
        "the same at every length",
        at_most=1,
        within=0,
    ),
    Claim(
        "a step of Llama-3.1-8B against the ring",
        "tree_table1",
        2,
        lambda rows: (
            one("arm", "ring", lambda r: r["decode_s"])(rows) / one("arm", "tree:push", lambda r: r["decode_s"])(rows)
        ),
        "5 times as fast as with the ring",
        at_least=5,
    ),
    Claim(
        "generate, default mode",
        "generate",
        2,
        those(lambda r: r["batch"] == 1, one("mode", "default", lambda r: r["ratio"])),
        "0.85 of the time of Inductor's in default mode",
        at_most=0.85,
    ),
    Claim(
        "generate, CUDA graphs",
        "generate",
        2,
        those(lambda r: r["batch"] == 1, one("mode", "reduce-overhead", lambda r: r["ratio"])),
        "0.71 with CUDA graphs",
        at_most=0.71,
    ),
    Claim(
        "generate of 8 sequences, default mode",
        "generate_batch8",
        2,
        one("mode", "default", lambda r: r["ratio"]),
        "0.40 of Inductor's time in default mode",
        at_most=0.405,
    ),
    Claim(
        "generate of 8 sequences, cpp_wrapper",
        "generate_batch8",
        2,
        one("mode", "cpp_wrapper", lambda r: r["ratio"]),
        "0.28 with `cpp_wrapper`",
        at_most=0.28,
    ),
    Claim(
        "generate of few layers, worst row",
        "generate_architectures",
        16,
        largest(lambda r: r["ratio"]),
        "in every row a token takes at most 1.02 times as long as with Inductor",
        at_most=1.02,
        within=0,
    ),
    Claim(
        "generate of few layers, compiling",
        "generate_architectures",
        16,
        geomean(compiling),
        "compiling at most 1.1 times as long in geometric mean",
        at_most=1.1,
        within=0,
    ),
    Claim(
        "package, to Inductor's",
        "aoti",
        3,
        largest(slower("tatten_ms", "inductor_ms")),
        "at most 0.3 of the time of Inductor's own package",
        at_most=0.3,
    ),
    Claim(
        "package, to the compiled step",
        "aoti",
        3,
        largest(slower("tatten_ms", "compiled_ms")),
        "no longer than the same step under `torch.compile` with `cpp_wrapper`",
        at_most=1.0,
    ),
    Claim(
        "package on a GPU, to Inductor's",
        "aoti_cuda",
        1,
        largest(slower("tatten_ms", "inductor_ms")),
        "0.42 of the time of Inductor's package",
        at_most=0.42,
    ),
    Claim(
        "package on a GPU, to the compiled step",
        "aoti_cuda",
        1,
        largest(slower("tatten_ms", "compiled_ms")),
        "0.76 of that of the compiled step",
        at_most=0.76,
    ),
    Claim(
        "trees, worst",
        "prefix_trees",
        125,
        largest(lambda r: r["ratio"]),
        "with no tree more than 1.08 times",
        at_most=1.08,
    ),
    Claim(
        "trees, mean",
        "prefix_trees",
        125,
        geomean(lambda r: r["ratio"]),
        "0.74 times as long as the best of the others in geometric mean over all trees",
        at_most=0.74,
    ),
    Claim(
        "groups, samples dropped",
        "prefix_groups",
        8,
        one_call("dropped", "groups", "over_regular"),
        "115 of the 128 at most 1.06 times as long as all of them",
        at_most=1.06,
    ),
    Claim(
        "groups, aligned rows",
        "prefix_groups",
        8,
        one_call("regular", "groups", "added_us"),
        "aligned groups whose rows are arranged beforehand at most 2 us longer than blocks",
        at_most=2,
        within=0.15,
    ),
    Claim(
        "what the merge adds to a sharded prefix",
        "sharded_prefix",
        2,
        one("prefix", 131072, lambda r: r["over_local"]),
        "it adds 9",
        at_most=9,
        within=0.15,
    ),
    Claim(
        "ranks of a sharded prefix",
        "sharded_prefix",
        2,
        one("prefix", 1 << 20, lambda r: r["spread"]),
        "ranks are within 3% of each other",
        at_most=1.03,
        within=0,
    ),
    Claim(
        "a prefill on two GPUs",
        "prefill",
        9,
        those(lambda r: r["length"] == 131072, one("arm", "striped", lambda r: min(r["faster"].values()))),
        "two GPUs at least 1.85 times as fast as one",
        at_least=1.85,
        within=0,
    ),
    Claim(
        "a million tokens",
        "prefill_long",
        1,
        one("length", 1 << 20, lambda r: float(r["finite"])),
        "a million tokens in chunks end in finite logits",
        at_least=1,
        within=0,
    ),
    Claim(
        "a step over a sharded prefix",
        "sharded_step",
        4,
        those(lambda r: r["prefix"] >= 32 << 10, least(lambda r: r["faster"])),
        "faster than one GPU from a prefix of 32k on",
        at_least=1,
        within=0,
    ),
    Claim(
        "model step on a CPU, worst",
        "static_cache_cpu",
        8,
        least(slower("inductor_ms", "tatten_ms")),
        "costs up to 8%",
        at_least=0.92,
        within=0.1,
    ),
    Claim(
        "latent attention on a CPU against Inductor",
        "latent_cpu",
        2,
        least(lambda r: r["faster"]),
        "at least 8 times as fast",
        at_least=8,
    ),
    Claim(
        "latent kernel, worst against FA3",
        "latent_kernel",
        10,
        largest(lambda r: r["ratio"]),
        "up to 1.13 times as long as FlashAttention-3",
        at_most=1.13,
    ),
    Claim(
        "latent kernel, 16 heads against FA3",
        "latent_kernel",
        10,
        those(lambda r: r["heads"] == 16, largest(lambda r: r["ratio"])),
        "at most 0.97 times as long with 16 heads",
        at_most=0.97,
    ),
    Claim(
        "latent kernel, mean against FA3",
        "latent_kernel",
        10,
        geomean(lambda r: r["ratio"]),
        "geometric mean over all rows is 0.95",
        at_most=0.954,
    ),
    Claim(
        "latent step against Inductor",
        "latent_step",
        3,
        least(lambda r: r["faster"]),
        "4.7 to 14.3 times as fast as Inductor's",
        at_least=4.7,
    ),
    Claim(
        "latent step over its floor",
        "latent_step",
        3,
        largest(slower("tatten_ms", "floor_ms")),
        "at most 2.1 times its floor",
        at_most=2.1,
    ),
    Claim(
        "sharded latents over half of one GPU's time",
        "latent_sharded",
        2,
        largest(lambda r: r["over_share_us"]),
        "half that time and 25 to 28 us more",
        at_most=28,
    ),
    Claim(
        "sharded latents against one GPU",
        "latent_sharded",
        2,
        least(lambda r: r["us"]["local"] / r["us"]["sharded"]),
        "at least 1.35 times as fast as one",
        at_least=1.35,
    ),
    Claim(
        "written out, layers with repeated heads",
        "written_out",
        100,
        those(lambda r: r["section"] == "layer" and r["form"] != "one_to_one", least(lambda r: r["faster"])),
        "at least 1.65 times as fast as Inductor in all 72 rows",
        at_least=1.65,
    ),
    Claim(
        "written out, layers with a kv head for each query head",
        "written_out",
        100,
        those(lambda r: r.get("form") == "one_to_one", largest(slower("tatten_us", "inductor_us"))),
        "up to 1.23 times Inductor's time",
        at_most=1.23,
    ),
    Claim(
        "written out, a step of gpt-oss",
        "written_out",
        100,
        those(lambda r: r.get("model") == "gpt_oss", least(lambda r: r["faster"])),
        "gpt-oss is 1.5 times as fast as Inductor's",
        at_least=1.5,
    ),
    Claim(
        "written out, a step of Gemma 2",
        "written_out",
        100,
        those(lambda r: r.get("model") == "gemma2", least(lambda r: r["faster"])),
        "Gemma 2's 1.9 times with 8000 slots used",
        at_least=1.9,
    ),
    Claim(
        "cache in float8 against 16 bits",
        "quantised",
        3,
        one("cache", "float8", lambda r: r["faster"]),
        "1.26 times as many tokens per second in float8",
        at_least=1.26,
    ),
    Claim(
        "cache in int8 against 16 bits",
        "quantised",
        3,
        one("cache", "int8", lambda r: r["faster"]),
        "1.31 in int8",
        at_least=1.31,
    ),
    Claim(
        "bytes of caches in 8 bits",
        "quantised",
        3,
        those(lambda r: r["cache"] != "16 bits", largest(lambda r: r["of_16_bits"])),
        "0.52 of the bytes",
        at_most=0.52,
    ),
    Claim(
        "encoder-decoders, eight sources",
        "encoder_decoder",
        4,
        those(lambda r: r["batch"] == 8, least(lambda r: r["faster"])),
        "with eight sources a step is 1.46 and 1.79 times as fast",
        at_least=1.46,
    ),
    Claim(
        "encoder-decoders, one source",
        "encoder_decoder",
        4,
        those(lambda r: r["batch"] == 1, least(lambda r: r["faster"])),
        "with one source T5-3B's step is slower, 0.90 of Inductor's speed",
        at_least=0.9,
    ),
    Claim(
        "eager steps, one sequence",
        "eager_step",
        6,
        those(lambda r: r["batch"] == 1, largest(to_same_function)),
        "one sequence takes up to 1.05 times as long",
        at_most=1.05,
    ),
    Claim(
        "eager steps, eight sequences",
        "eager_step",
        6,
        those(lambda r: r["batch"] == 8, largest(to_same_function)),
        "eight take 0.54 to 0.92 of the time",
        at_most=0.92,
    ),
    Claim(
        "shared prefix on a CPU against Inductor",
        "shared_prefix_cpu",
        8,
        least(lambda r: r["us"]["inductor"] / r["us"]["tatten"]),
        "at least 17 times as fast as Inductor",
        at_least=17,
        within=0.1,
    ),
]
