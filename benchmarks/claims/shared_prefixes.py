"""Claims about keys that sequences share."""

from __future__ import annotations

from claims.claim import Claim, fork_over, geomean, largest, least, one, one_call, over, slower

CLAIMS = [
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
        "shared prefix on a CPU against Inductor",
        "shared_prefix_cpu",
        8,
        least(lambda r: r["us"]["inductor"] / r["us"]["tatten"]),
        "at least 17 times as fast as Inductor",
        at_least=17,
        within=0.1,
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
        "at least twice those of `generate` compiled by tatten",
        at_least=2,
        within=0,
    ),
]
