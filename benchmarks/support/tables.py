"""The tables of docs/benchmarks.md, made from the JSON of the benchmarks.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`, and begins with the command, machine and date
of its figures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.results import NotRecorded, ResultsError, need, read

Row = dict[str, Any]
Cell = Callable[[Row], object]
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


@dataclass(frozen=True)
class Table:
    """Columns of a file's rows, by their heads."""

    file: str
    columns: dict[str, Cell | str]  # a string is the key of the row
    only: Callable[[Row], bool] = lambda r: True  # which rows are shown


def number(x: float | None, digits: int = 1) -> str:
    """A figure with so many digits after the point, or `-` where it was not measured."""
    return "-" if x is None else f"{x:.{digits}f}"


def heads(r: Row) -> str:
    return f"{r['q_heads']}/{r['kv_heads']}"


def us(name: str, digits: int = 1) -> Cell:
    return lambda r: number(r["us"].get(name), digits)


def figure(name: str, digits: int = 1) -> Cell:
    return lambda r: number(r[name], digits)


def faster(slow: str, fast: str) -> Cell:
    return lambda r: number(r[slow] / r[fast], 2)


STATIC_CACHE: dict[str, Cell | str] = {
    "dtype": "dtype",
    "batch": "batch",
    "heads": heads,
    "head_dim": "head_dim",
    "cache": "max_cache_len",
    "used": lambda r: f"{r['used']}{', padded' * r['padded']}",
    "Inductor ms": figure("inductor_ms", 2),
    "tatten ms": figure("tatten_ms", 2),
    "byte floor ms": figure("floor_ms", 2),
    "speedup": faster("inductor_ms", "tatten_ms"),
}
UNIFORM: dict[str, Cell | str] = {
    "batch": lambda r: len(r["lengths"]),
    "heads": heads,
    "head_dim": "head_dim",
    "keys": "name",
    "KV MB": figure("kv_mb", 0),
    "cuDNN": us("cudnn"),
    "flash": us("flash"),
    "FA3": us("fa3"),
    "tatten": us("auto"),
    "floor": figure("floor_us"),
}
PREFIX: dict[str, Cell | str] = {"batch": "batch", "heads": heads, "prefix": "prefix", "suffix": "suffix"}


def fa3_best(r: Row) -> str:
    """FlashAttention-3 with the splits that suit it best."""
    found = [r["us"][name] for name in ("fa3", "fa3_8", "fa3_32") if name in r["us"]]
    return number(min(found, default=None), 0)


def tree_ratio(r: Row) -> str:
    return "-" if r["ratio"] is None else f"{r['ratio']:.2f} of {r['best']}"


def share(r: Row) -> str:
    return "all" if r["full"] else "an eighth"


def ms(name: str, digits: int = 2) -> Cell:
    return lambda r: number(r["ms"].get(name), digits)


def error(name: str) -> Cell:
    return lambda r: f"{r[name]:.1e}"


STEP: dict[str, Cell | str] = {
    "Inductor ms": figure("inductor_ms", 2),
    "tatten ms": figure("tatten_ms", 2),
    "byte floor ms": figure("floor_ms", 2),
    "times as fast": figure("faster", 2),
    "error, Inductor": error("inductor_error"),
    "error, tatten": error("tatten_error"),
}
AOTI = {
    "batch": "batch",
    "heads": heads,
    "head_dim": "head_dim",
    "cache": "max_cache_len",
    "used": "used",
    "layers": "layers",
    "Inductor's package ms": figure("inductor_ms", 1),
    "tatten's package ms": figure("tatten_ms", 1),
    "compiled ms": figure("compiled_ms", 1),
}
GENERATE: dict[str, Cell | str] = {
    "mode": "mode",
    "batch": "batch",
    "layers": "layers",
    "slots": "capacity",
    "used": "used",
    "Inductor ms": lambda r: number(r["token_ms"]["inductor"], 2),
    "tatten ms": lambda r: number(r["token_ms"]["tatten"], 2),
    "byte floor ms": figure("floor_ms", 2),
    "tatten to Inductor": figure("ratio", 2),
    "compile s, Inductor": lambda r: number(r["compile_s"]["inductor"], 0),
    "compile s, tatten": lambda r: number(r["compile_s"]["tatten"], 0),
}
MERGE = {
    "rows (queries times heads)": "rows",
    "three all-reduces": us("all_reduce"),
    "one all-gather": us("all_gather"),
    "push": us("push"),
}
ARMS = {"sdpa": "a call of the model", "alone": "`cache.prefill`, one rank", "striped": "`cache.prefill`"}
TABLES = {
    "static_cache": Table("static_cache", STATIC_CACHE),
    "static_cache_cpu": Table("static_cache_cpu", STATIC_CACHE),
    "latent_cpu": Table(
        "latent_cpu",
        {
            "dtype": "dtype",
            "batch": "batch",
            "heads": "heads",
            "cache": "max_cache_len",
            "used": "used",
            "Inductor ms": figure("inductor_ms", 0),
            "tatten ms": figure("tatten_ms"),
            "byte floor ms": figure("floor_ms"),
            "times as fast": figure("faster"),
        },
    ),
    "latent_kernel": Table(
        "latent_kernel",
        {
            "heads": "heads",
            "batch": "batch",
            "latents": "length",
            "FA3": us("fa3"),
            "tatten": us("tatten"),
            "tatten, output in float32": us("unrounded"),
            "floor": lambda r: number(max(r["bytes_us"], r["flops_us"])),
            "tatten to FA3": figure("ratio", 2),
        },
    ),
    "latent_step": Table(
        "latent_step", {"batch": "batch", "heads": "heads", "cache": "max_cache_len", "used": "used", **STEP}
    ),
    "latent_sharded": Table(
        "latent_sharded",
        {
            "heads": "heads",
            "latents": "length",
            "all on one GPU": us("local"),
            "sharded": us("sharded"),
            "more than half": figure("over_share_us"),
        },
    ),
    "written_out_steps": Table(
        "written_out",
        {"model": "model", "batch": "batch", "cache": "slots", "used": "used", **STEP},
        lambda r: r["section"] == "step",
    ),
    "written_out_layers": Table(
        "written_out",
        {
            "form": "form",
            "slots": "keys",
            "used": share,
            "Inductor us": figure("inductor_us"),
            "tatten us": figure("tatten_us"),
            "floor us": figure("floor_us"),
            "times as fast": figure("faster", 2),
        },
        lambda r: r["section"] == "layer" and r["batch"] == 8,
    ),
    "quantised": Table(
        "quantised",
        {
            "cache": "cache",
            "batch": "batch",
            "slots": "capacity",
            "used": "used",
            "layers": "layers",
            "ms a token": figure("token_ms", 2),
            "tokens/s": figure("tokens_per_s", 0),
            "times as fast": figure("faster", 2),
            "of the bytes": figure("of_16_bits", 2),
            "error of logits": figure("logits_error", 2),
        },
    ),
    "encoder_decoder": Table(
        "encoder_decoder",
        {
            "model": "model",
            "sources": "batch",
            "layers": "layers",
            "Inductor ms": ms("inductor"),
            "Inductor, stored once ms": ms("both"),
            "tatten ms": ms("tatten"),
            "times as fast": figure("faster", 2),
            "MB, Inductor": lambda r: number(r["held_bytes"]["inductor"] / 1e6, 0),
            "MB, tatten": lambda r: number(r["held_bytes"]["tatten"] / 1e6, 0),
        },
    ),
    "eager_step": Table(
        "eager_step",
        {
            "model": "model",
            "batch": "batch",
            "cache": "capacity",
            "used": "used",
            "eager ms": ms("eager"),
            "sdpa ms": ms("sdpa"),
            "tatten ms": ms("tatten"),
            "logits differ, tatten": lambda r: number(r["error"]["tatten"], 2),
        },
    ),
    "decode_nine": Table("decode_nine", UNIFORM),
    "decode_ragged": Table(
        "decode_ragged",
        {
            "lengths": lambda r: f"{len(r['lengths'])} x {r['name']}" if "one" not in r["name"] else r["name"],
            "heads": heads,
            "SDPA": us("sdpa", 0),
            "FA3": fa3_best,
            "tatten": us("auto", 0),
            "floor": figure("floor_us", 0),
        },
    ),
    "decode_static": Table(
        "decode_static",
        {
            "batch": lambda r: len(r["lengths"]),
            "used": "name",
            "SDPA, mask": us("sdpa"),
            "tatten, mask": us("auto"),
            "tatten, a layer": us("layer"),
            "tatten, exact length": us("exact"),
            "floor": figure("floor_us"),
        },
    ),
    "float8": Table(
        "float8",
        {
            "query": "dtype",
            "batch": "batch",
            "heads": heads,
            "head_dim": "head_dim",
            "keys": "keys",
            "upcast": us("upcast", 0),
            "16 bits": us("16 bits", 0),
            "float8": us("float8", 0),
            "floor": us("floor", 0),
        },
    ),
    "generate": Table("generate", GENERATE),
    "generate_architectures": Table("generate_architectures", {"model": "model", **GENERATE}),
    "generate_batch8": Table("generate_batch8", GENERATE),
    "aoti": Table("aoti", AOTI),
    "aoti_cuda": Table("aoti_cuda", AOTI),
    "overhead": Table(
        "overhead", {"call": "call", "us": figure("us", 0), "over SDPA": lambda r: number(r["over_sdpa"], 2)}
    ),
    "lean_paper": Table(
        "lean_paper",
        {
            "heads": "heads",
            "keys": "context",
            "head_dim": "head_dim",
            "unsplit": figure("fa2_us"),
            "fixed splits": figure("fixed_us"),
            "tatten": figure("lean_us"),
            "floor": figure("floor_us"),
            "times as fast as unsplit": figure("over_fa2", 2),
            "as fixed splits": figure("over_fixed", 2),
        },
    ),
    "shared_prefix": Table(
        "shared_prefix",
        {
            **PREFIX,
            "expanded": us("expanded"),
            "cascade": us("cascade"),
            "aten": us("aten"),
            "FA3": us("fa3"),
            "tatten": us("tatten"),
            "floor": figure("floor_us"),
        },
    ),
    "prefix_trees": Table(
        "prefix_trees",
        {
            "from": lambda r: {"pat": "PAT", "fasttree": "FastTree"}[r["source"]],
            "nodes": lambda r: ", ".join(map(str, r["nodes"])),
            "tokens of a node": lambda r: ", ".join(map(str, r["lengths"])),
            "heads": heads,
            "FA3": us("fa3"),
            "cuDNN": us("cudnn"),
            "flash": us("flash"),
            "picked": us("picked"),
            "cascade": us("cascade"),
            "tatten": us("tatten"),
            "floor": figure("floor_us"),
            "tatten to the best": tree_ratio,
        },
    ),
    "prefix_groups": Table(
        "prefix_groups",
        {
            "sequences": "batch",
            "groups": "groups",
            "given as": "given",
            "us": figure("us"),
            "floor": figure("floor_us"),
            "to regular blocks": figure("over_regular", 3),
            "us more": figure("added_us"),
        },
    ),
    "shared_prefix_cpu": Table(
        "shared_prefix_cpu",
        {
            "dtype": "dtype",
            **PREFIX,
            "expanded": us("expanded", 0),
            "Inductor": us("inductor", 0),
            "tatten": us("tatten", 0),
            "floor": figure("floor_us", 0),
            "times faster than expanded": lambda r: number(r["us"]["expanded"] / r["us"]["tatten"]),
            "than Inductor": lambda r: number(r["us"]["inductor"] / r["us"]["tatten"], 0),
        },
    ),
    "best_of_n": Table("best_of_n", {"n": "n", "ms": figure("with_ms", 2), "floor ms": figure("floor_ms", 2)}),
    "tree_merge": Table("tree_merge", MERGE),
    "tree_merge_8": Table("tree_merge_8", MERGE),
    "tree_latency": Table(
        "tree_latency",
        {
            "keys": "length",
            "own shard only": us("local"),
            "merged by push": us("tree:push"),
            "ring": us("ring", 0),
        },
    ),
    "tree_bytes": Table(
        "tree_bytes",
        {
            "keys": "length",
            "arm": "arm",
            "bytes, as collectives are called": figure("bytes", 0),
            "bytes, by NVLink's counters": figure("nvlink_bytes", 0),
        },
    ),
    "sharded_prefix": Table(
        "sharded_prefix",
        {
            "batch": "batch",
            "heads": heads,
            "prefix": "prefix",
            "suffix": "suffix",
            "all on one GPU": us("one"),
            "a rank's part": us("local"),
            "sharded": us("sharded"),
            "floor of a part": figure("floor_us"),
            "merge adds": figure("over_local"),
            "part on each rank": lambda r: ", ".join(number(x) for x in r["rank_us"]),
        },
    ),
    "sharded_step": Table(
        "sharded_step",
        {
            "prefix": "prefix",
            "n": "batch",
            **{
                f"{shown} ms (floor)": lambda r, arm=arm: f"{number(r['ms'][arm], 2)} ({number(r['floor_ms'][arm], 2)})"
                for arm, shown in (("one", "one GPU"), ("sequence", "sequence sharded"), ("heads", "heads sharded"))
            },
            "times as fast as one GPU": figure("faster", 2),
        },
    ),
    "tree_table1": Table(
        "tree_table1",
        {
            "keys": "length",
            "arm": "arm",
            "prefill s": figure("prefill_s", 2),
            "ms a step": lambda r: number(1e3 * r["decode_s"] / (len(r["tokens"]) - 1)),
            "10 tokens s": lambda r: number(r["prefill_s"] + r["decode_s"], 2),
        },
    ),
    "prefill": Table(
        "prefill",
        {
            "tokens": "length",
            "by": lambda r: ARMS[r["arm"]],
            "GPUs": "ranks",
            "s": figure("s", 2),
            "floor s": figure("floor_s", 2),
            "times as fast as a call on one GPU": lambda r: number(r["faster"]["sdpa"], 2),
            "GB sent by a GPU": lambda r: number(r["ring_bytes"] / 1e9),
            "most GiB on a GPU": figure("gib"),
            "logits differ": error("difference"),
        },
    ),
    "prefill_long": Table(
        "prefill_long",
        {
            "tokens": "length",
            "GPUs": "ranks",
            "chunk": "chunk",
            "s": figure("s"),
            "floor s": figure("floor_s"),
            "tokens/s": lambda r: number(r["length"] / r["s"], 0),
            "GB sent by a GPU": lambda r: number(r["ring_bytes"] / 1e9),
            "most GiB on a GPU": figure("gib"),
            "logits": lambda r: "finite" if r["finite"] else "not finite",
        },
    ),
    "rollouts": Table(
        "rollouts",
        {
            "samples": "samples",
            **{
                f"{shown} tokens/s": lambda r, arm=arm: number(r["tokens_per_second"][arm], 0)
                for arm, shown in (("inductor", "generate, Inductor"), ("tatten", "generate, tatten"), ("fork", "fork"))
            },
            "times Inductor's": lambda r: number(r["tokens_per_second"]["fork"] / r["tokens_per_second"]["inductor"]),
            "times tatten's `generate`": lambda r: number(
                r["tokens_per_second"]["fork"] / r["tokens_per_second"]["tatten"]
            ),
            "tokens prefilled, generate": lambda r: r["prefilled"]["tatten"],
            "tokens prefilled, fork": lambda r: r["prefilled"]["fork"],
            "KV GB, generate": lambda r: number(r["kv_bytes"]["tatten"] / 1e9),
            "KV GB, fork": lambda r: number(r["kv_bytes"]["fork"] / 1e9),
        },
    ),
}


def provenance(data: dict[str, Any]) -> str:
    """How, where and when the figures were measured."""
    versions = [f"{name} {data[name]}" for name in ("torch", "triton") if data[name]]
    where = ", ".join([data["device"], *versions, data["date"], *([data["note"]] if "note" in data else [])])
    return f"`{data['command']}` — {where}"


def markdown(table: Table, folder: Path) -> str:
    """The table as it stands in the page; raises ResultsError if a column is missing."""
    path = folder / f"{table.file}.json"
    try:
        data = read(path)
    except NotRecorded:
        return f"Not recorded: `{path.name}` is missing.\n"
    lines: list[Sequence[object]] = [list(table.columns), ["---"] * len(table.columns)]
    try:
        rows = [r for r in data["rows"] if table.only(r)]
        if not rows:
            raise ResultsError(f"{path} has no rows for the table")
        need(path, rows, (key for key in table.columns.values() if isinstance(key, str)))
        lines += [[r[c] if isinstance(c, str) else c(r) for c in table.columns.values()] for r in rows]
    except KeyError as error:
        raise ResultsError(f"{path}: a row lacks {error}") from None
    shown = "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
    return f"{provenance(data)}\n\n{shown}\n"


def fill(page: str, folder: Path) -> str:
    """The page with each of its tables made anew."""
    return MARKED.sub(lambda m: f"{m[1]}\n{markdown(TABLES[m[2]], folder)}\n{m[3]}", page)
