"""Tables of keys that sequences share."""

from __future__ import annotations

from tables.table import Cell, Row, Table, figure, heads, number, us

PREFIX: dict[str, Cell | str] = {"batch": "batch", "heads": heads, "prefix": "prefix", "suffix": "suffix"}


def tree_ratio(r: Row) -> str:
    return "-" if r["ratio"] is None else f"{r['ratio']:.2f} of {r['best']}"


TABLES = {
    "shared_prefix": Table(
        "shared_prefix",
        {
            **PREFIX,
            "expanded": us("expanded"),
            "cascade": us("cascade"),
            "aten": us("aten"),
            "FA3": us("fa3"),
            "FA3, paged": us("paged"),
            "tatten": us("tatten"),
            "floor": figure("floor_us"),
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
    "best_of_n": Table("best_of_n", {"n": "n", "ms": figure("with_ms", 2), "floor ms": figure("floor_ms", 2)}),
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
