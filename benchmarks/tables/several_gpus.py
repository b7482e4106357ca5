"""Tables of keys that several GPUs share."""

from __future__ import annotations

from tables.table import Table, error, figure, heads, number, us

MERGE = {
    "rows (queries times heads)": "rows",
    "three all-reduces": us("all_reduce"),
    "one all-gather": us("all_gather"),
    "push": us("push"),
}

ARMS = {"sdpa": "a call of the model", "alone": "`cache.prefill`, one rank", "striped": "`cache.prefill`"}

TABLES = {
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
}
