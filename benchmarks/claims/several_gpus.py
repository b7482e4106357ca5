"""Claims about keys that several GPUs share."""

from __future__ import annotations

from claims.claim import Claim, largest, least, one, over_push, spread, those

CLAIMS = [
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
        "at most 6.1 us",
        at_most=6.1,
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
        "a step over a sharded prefix",
        "sharded_step",
        4,
        those(lambda r: r["prefix"] >= 32 << 10, least(lambda r: r["faster"])),
        "faster than one GPU from a prefix of 32k on",
        at_least=1,
        within=0,
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
]
