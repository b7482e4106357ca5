"""Tables of attention of each sequence to keys of its own, and of what a call of it costs the host."""

from __future__ import annotations

from tables.table import Cell, Row, Table, figure, heads, number, us

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


def lengths(r: Row) -> str:
    name: str = r["name"]
    return name if "one" in name else f"{len(r['lengths'])} x {name}"


def fa3_best(r: Row) -> str:
    """Return the time of FlashAttention-3 with the number of splits that suits it best."""
    us_of_splits = [r["us"][name] for name in ("fa3", "fa3_8", "fa3_32") if name in r["us"]]
    return number(min(us_of_splits, default=None), 0)


TABLES = {
    "decode_ragged": Table(
        "decode_ragged",
        {
            "lengths": lengths,
            "heads": heads,
            "SDPA": us("sdpa", 0),
            "FA3": fa3_best,
            "tatten": us("auto", 0),
            "floor": figure("floor_us", 0),
        },
    ),
    "decode_invariant": Table(
        "decode_invariant",
        {
            "lengths": lengths,
            "heads": heads,
            "tatten": us("auto", 0),
            "batch-invariant": us("invariant", 0),
            "floor": figure("floor_us", 0),
            "times as long": lambda r: number(r["us"]["invariant"] / r["us"]["auto"], 2),
        },
    ),
    "decode_nine": Table("decode_nine", UNIFORM),
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
    "overhead": Table(
        "overhead", {"call": "call", "us": figure("us", 0), "over SDPA": lambda r: number(r["over_sdpa"], 2)}
    ),
    "launches": Table(
        "launches",
        {
            "op": "call",
            "called": us("called", 0),
            "launched": us("launched", 0),
            "launched to called": figure("ratio", 2),
        },
    ),
}
