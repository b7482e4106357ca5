"""Claims about continuous batching."""

from __future__ import annotations

from collections.abc import Callable

from claims.claim import Claim, Row, largest, one


def host_over_tatten(rows: list[Row]) -> float:
    """Host time of a step with SDPA over that on tatten's pages."""
    ms = {r["candidate"]: r["host_ms"] for r in rows}
    return float(ms["sdpa"] / ms["tatten"])


def tokens_over(a: str, b: str) -> Callable[[list[Row]], float]:
    def figure(rows: list[Row]) -> float:
        speeds = {r["candidate"]: r["tokens_per_second"] for r in rows}
        return float(speeds[a] / speeds[b])

    return figure


CLAIMS = [
    Claim(
        "generate_batch beside FlashAttention-3, whole prompts",
        "generate_batch_a",
        2,
        tokens_over("tatten", "fa3"),
        "tatten makes 0.98 of the tokens per second",
        at_least=0.98,
    ),
    Claim(
        "generate_batch beside FlashAttention-3, samples",
        "generate_batch_b",
        3,
        tokens_over("tatten", "fa3"),
        "1.21 of the tokens per second of FlashAttention-3",
        at_least=1.21,
    ),
    Claim(
        "generate_batch beside a fork",
        "generate_batch_b",
        3,
        tokens_over("tatten", "fork"),
        "0.90 of those of the fork",
        at_least=0.9,
    ),
    Claim(
        "host of a step in continuous batching",
        "generate_batch_host",
        2,
        one("candidate", "tatten", lambda r: r["host_ms"]),
        'takes it at most 3 ms on attention "tatten"',
        at_most=3,
    ),
    Claim(
        "host of a step with SDPA",
        "generate_batch_host",
        2,
        host_over_tatten,
        "With SDPA it takes at least 10 times as long",
        at_least=10,
    ),
    *(
        Claim(f"faults of {name}", name, 1, largest(lambda r: len(r["faults"])), "no fault was found", at_most=0)
        for name in ("soak", "soak_rings")
    ),
]
