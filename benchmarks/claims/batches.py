"""Claims about continuous batching."""

from __future__ import annotations

from claims.claim import Claim, Row, largest, one


def host_over_tatten(rows: list[Row]) -> float:
    """Host time of a step with SDPA over that on tatten's pages."""
    ms = {r["candidate"]: r["host_ms"] for r in rows}
    return float(ms["sdpa"] / ms["tatten"])


CLAIMS = [
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
