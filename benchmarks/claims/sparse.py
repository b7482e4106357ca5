"""Claims about attention to picked keys, the scores that they are picked by, and a layer of both."""

from __future__ import annotations

from collections.abc import Callable

from claims.claim import Claim, Row, geomean, largest, over, those

ROWS = {"sparse_kernel": 39, "indexer": 12, "sparse_layer": 3}
MOST_SCORES = 1 << 19  # of all rows, up to which the rewrite takes `top_picks`


def timed(*columns: str) -> Callable[[Row], bool]:
    """Tell whether a row has these columns, as peers take some shapes alone."""
    return lambda r: all(x in r["us"] for x in columns)


def over_floor(r: Row) -> float:
    return r["us"]["tatten"] / r["bytes_us"]


def long_keys(r: Row) -> bool:
    return r["length"] == 131072 and r["keys"] == "bfloat16" and r["q_length"] == 1


def few_scores(r: Row) -> bool:
    return r["batch"] * r["q_length"] * r["length"] <= MOST_SCORES


CLAIMS = [
    Claim(
        "picks, worst against a copy",
        "sparse_kernel",
        ROWS["sparse_kernel"],
        largest(over("tatten", "copied")),
        "0.19 to 0.41 times as long as a copy",
        at_most=0.41,
    ),
    Claim(
        "picks, mean against a copy",
        "sparse_kernel",
        ROWS["sparse_kernel"],
        geomean(over("tatten", "copied")),
        "a copy, 0.28 in geometric mean",
        at_most=0.28,
    ),
    Claim(
        "picks, worst against FA3",
        "sparse_kernel",
        ROWS["sparse_kernel"],
        those(timed("fa3"), largest(over("tatten", "fa3"))),
        "0.55 to 1.03 times as long as FlashAttention-3",
        at_most=1.03,
    ),
    Claim(
        "picks, mean against FA3",
        "sparse_kernel",
        ROWS["sparse_kernel"],
        those(timed("fa3"), geomean(over("tatten", "fa3"))),
        "FlashAttention-3, 0.78 in geometric mean",
        at_most=0.785,
    ),
    Claim(
        "picks, worst against FlashMLA",
        "sparse_kernel",
        ROWS["sparse_kernel"],
        those(timed("flash_mla"), largest(over("tatten", "flash_mla"))),
        "0.18 to 1.02 times as long as FlashMLA",
        at_most=1.025,
    ),
    Claim(
        "blocks of picks, over as many keys in a row",
        "sparse_kernel",
        ROWS["sparse_kernel"],
        those(lambda r: r["picks"] == "blocks", largest(over("tatten", "short"))),
        "Blocks take at most 1.13 times as long as 2048 keys in a row",
        at_most=1.13,
    ),
    Claim(
        "index scores, over the read of the keys",
        "indexer",
        ROWS["indexer"],
        those(long_keys, largest(over_floor)),
        "1.1 to 1.5 times the time of this read with 131072 keys in bfloat16",
        at_most=1.5,
    ),
    Claim(
        "index scores, over Inductor",
        "indexer",
        ROWS["indexer"],
        largest(over("tatten", "inductor")),
        "0.05 to 0.21 times as long as Inductor",
        at_most=0.21,
    ),
    Claim(
        "top_picks, over topk",
        "indexer",
        ROWS["indexer"],
        those(few_scores, largest(over("top_picks", "topk"))),
        "0.35 to 0.58 times as long as `topk` for up to 2^19 scores",
        at_most=0.58,
    ),
    Claim(
        "a sparse layer, over Inductor",
        "sparse_layer",
        ROWS["sparse_layer"],
        those(timed("inductor"), largest(over("tatten", "inductor"))),
        "tatten takes at most 0.021 of the time of Inductor",
        at_most=0.021,
    ),
    Claim(
        "a sparse layer, over a mask that is read",
        "sparse_layer",
        ROWS["sparse_layer"],
        those(timed("masked"), largest(over("tatten", "masked"))),
        'and at most 0.71 of that of "masked"',
        at_most=0.71,
    ),
]
