"""Claims about keys and values in pages."""

from __future__ import annotations

from collections.abc import Callable

from claims.claim import Claim, Row, geomean, largest, least, over, those


def _at_256(rows: list[Row], name: str) -> Row:
    wanted = "finding", 256, 512, name
    return next(r for r in rows if (r["section"], r.get("batch"), r.get("columns"), r["name"]) == wanted)


Ratio, Figure = Callable[[Row], float], Callable[[list[Row]], float]
LARGE = "31 decodes and a chunk", "8 chunks", "64 x 5 queries"  # mixed batches with many tiles


def _pages_beside(
    other: str, name: str, file: str, over_rows: Callable[[Ratio], Figure], *bounds: tuple[int, float, str]
) -> list[Claim]:
    """Make claims about pages of several sizes beside another column, which may have a place for the size of a page.

    Each of `bounds` has the size, the bound, and what the docs say.
    """
    return [
        Claim(
            name.format(page),
            file,
            14,
            over_rows(over(f"page {page}", other.format(page))),
            said,
            at_most=most,
            within=0.02,
        )
        for page, most, said in bounds
    ]


CLAIMS = [
    *_pages_beside(
        "fa3 {}",
        "pages of {} beside FlashAttention-3",
        "paged",
        geomean,
        (256, 0.97, "0.97 times as long as FlashAttention-3 in geometric mean for pages of 256 and 16"),
        (64, 0.96, "0.96 for pages of 64"),
        (16, 0.97, "0.97 times as long as FlashAttention-3 in geometric mean for pages of 256 and 16"),
        (1, 0.995, "0.99 for pages of 1"),
    ),
    *_pages_beside(
        "fa3 {}",
        "pages of {} beside FlashAttention-3 on an H200",
        "paged_h200",
        geomean,
        (256, 0.915, "0.91 times as long as FlashAttention-3 in geometric mean for pages of 256"),
        (64, 0.925, "0.92 for pages of 64"),
        (16, 0.945, "0.94 for pages of 16"),
        (1, 0.98, "0.98 for pages of 1"),
    ),
    *_pages_beside(
        "fa3 {}",
        "a row of pages of {} beside FlashAttention-3 on an H200",
        "paged_h200",
        largest,
        (256, 1.025, "1.02 times as long for pages of 256"),
        (64, 1.035, "1.03 for pages of 64"),
        (16, 1.085, "1.08 for pages of 16"),
        (1, 1.175, "1.17 for pages of 1"),
    ),
    *_pages_beside(
        "lens",
        "pages of {} beside keys in order with lengths",
        "paged",
        geomean,
        (256, 1.025, "mean for pages of 256 and 64, 1.05 for pages of 16, and 1.07 for pages of 1"),
        (64, 1.025, "mean for pages of 256 and 64, 1.05 for pages of 16, and 1.07 for pages of 1"),
        (16, 1.055, "1.05 for pages of 16, and 1.07 for pages of 1"),
        (1, 1.075, "1.05 for pages of 16, and 1.07 for pages of 1"),
    ),
    *_pages_beside(
        "lens",
        "pages of {} beside keys in order with lengths on an H200",
        "paged_h200",
        geomean,
        (256, 1.015, "1.02 for pages of 64, 1.05 for pages of 16, and 1.11 for pages of 1"),
        (64, 1.025, "1.02 for pages of 64, 1.05 for pages of 16, and 1.11 for pages of 1"),
        (16, 1.055, "1.02 for pages of 64, 1.05 for pages of 16, and 1.11 for pages of 1"),
        (1, 1.11, "1.02 for pages of 64, 1.05 for pages of 16, and 1.11 for pages of 1"),
    ),
    *(
        Claim(
            f"pages of 16 or more beside FlashAttention-3, {empty} empty sequences",
            "paged_padded_h200",
            2,
            those(
                lambda r, empty=empty: r["name"].endswith(f"{empty} empty"),
                lambda rows: max(largest(over(f"page {n}", f"fa3 {n}"))(rows) for n in (16, 64, 256)),
            ),
            said,
            at_most=most,
        )
        for empty, most, said in (
            (16, 0.945, "0.88 to 0.94 times"),
            (64, 1.105, "1.03 to 1.10 times as long for the second one"),
        )
    ),
    Claim(
        "pages of 256 beside keys in order, ragged",
        "paged",
        14,
        those(lambda r: r["section"] == "ragged", largest(over("page 256", "dense"))),
        "at most 1.02 of keys in order",
        at_most=1.02,
        within=0.02,
    ),
    *(
        Claim(
            f"short sequences in pages of 16 on a CPU, {dtype}",
            "paged_cpu",
            18,
            those(
                lambda r, dtype=dtype: r["section"] == "short" and r["dtype"].endswith(dtype),
                largest(over("page 16", "inductor 16")),
            ),
            said,
            at_most=most,
        )
        for dtype, most, said in (
            ("torch.bfloat16", 1.14, "0.11 to 1.14 of the time of Inductor in bfloat16"),
            ("torch.float32", 1.965, "0.31 to 1.96 in float32"),
        )
    ),
    *(
        Claim(
            f"shared pages beside segments{gpu}",
            file,
            20,
            lambda rows: max(r["ratio"] for r in rows if r["section"] == "shared"),
            said,
            at_most=most,
        )
        for gpu, file, most, said in (
            ("", "shared_pages", 1.415, "1.00 to 1.41 times"),
            (" on an H200", "shared_pages_h200", 1.285, "0.90 to 1.28 times"),
        )
    ),
    Claim(
        "shared pages beside segments, ragged",
        "shared_ragged_h200",
        4,
        lambda rows: max(r["ratio"] for r in rows),
        "0.96 to 1.05 times",
        at_most=1.055,
    ),
    Claim(
        "finding shared pages",
        "shared_pages",
        20,
        lambda rows: max(_at_256(rows, name)["us"]["find"] for name in ("half shared", "nothing shared")),
        "takes at most 20 us",
        at_most=20,
    ),
    *(
        Claim(name, "shared_pages", 20, those(only, largest(over("shared", "paged"))), said, at_most=most)
        for name, only, said, most in (
            (
                "nothing shared",
                lambda r: r["name"] == "nothing shared",
                "1.00 to 1.09 times as long as without",
                1.095,
            ),
            (
                "small shared prefixes",
                lambda r: r["name"] == "half shared",
                "it takes 1.40 times as long as reading",
                1.405,
            ),
            (
                "shared prefixes of many sequences",
                lambda r: r["name"] == "half shared" and r["batch"] * r["columns"] > 1 << 16,
                "it takes 0.82 and 0.74 times as long",
                0.825,
            ),
        )
    ),
    *(
        Claim(
            f"{batches} beside FlashAttention-3{gpu}",
            file,
            13,
            those(lambda r, large=large: (r["name"] in LARGE) == large, largest(over("tatten", "fa3"))),
            said,
            at_most=most,
        )
        for batches, large, gpu, file, most, said in (
            ("mixed batches", True, "", "mixed", 1.145, "0.96 to 1.14 times"),
            ("small mixed batches", False, "", "mixed", 1.445, "1.13 to 1.44 times"),
            ("mixed batches", True, " on an H200", "mixed_h200", 1.185, "1.02 to 1.18 times"),
            ("small mixed batches", False, " on an H200", "mixed_h200", 1.315, "1.09 to 1.31 times"),
        )
    ),
    Claim(
        "shared pages in mixed batches",
        "shared_chunks",
        12,
        lambda rows: max(r["ratio"] for r in rows),
        "0.53 to 1.21 times as long as reading each",
        at_most=1.215,
    ),
    Claim(
        "gathers beside Inductor",
        "gathers_cuda",
        8,
        least(over("inductor", "tatten")),
        "1.07 to 4.36 times as fast",
        at_least=1.06,
    ),
]
