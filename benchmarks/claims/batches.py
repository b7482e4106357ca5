"""Claims about continuous batching."""

from __future__ import annotations

from collections.abc import Callable

from claims.claim import Claim, Row, largest, one


def host_over_tatten(rows: list[Row]) -> float:
    """Host time of a step with SDPA over that on tatten's pages."""
    ms = {r["candidate"]: r["host_ms"] for r in rows}
    return float(ms["sdpa"] / ms["tatten"])


def tokens_over(a: str, b: str, only: Callable[[Row], bool] = lambda r: True) -> Callable[[list[Row]], float]:
    def figure(rows: list[Row]) -> float:
        speeds = {r["candidate"]: r["tokens_per_second"] for r in rows if only(r)}
        return float(speeds[a] / speeds[b])

    return figure


CLAIMS = [
    Claim(
        "generate_batch beside FlashAttention-3, whole prompts",
        "generate_batch_a",
        3,
        tokens_over("tatten", "fa3"),
        "tatten makes 1.00 times the tokens per second",
        at_least=0.995,
    ),
    Claim(
        "compiled generate_batch beside FlashAttention-3, whole prompts",
        "generate_batch_a",
        3,
        tokens_over("tatten_compiled", "fa3"),
        "with compiled decode steps 1.05",
        at_least=1.05,
    ),
    Claim(
        "generate_batch beside SDPA, whole prompts",
        "generate_batch_a_sdpa",
        2,
        tokens_over("tatten", "sdpa"),
        "12.4 times the tokens per second of `sdpa`",
        at_least=12.4,
    ),
    Claim(
        "generate_batch beside FlashAttention-3, samples",
        "generate_batch_compiled",
        4,
        tokens_over("tatten", "fa3"),
        "1.21 times the tokens per second of FlashAttention-3",
        at_least=1.205,
    ),
    Claim(
        "generate_batch beside a fork",
        "generate_batch_compiled",
        4,
        tokens_over("tatten", "fork"),
        "0.92 times those of the fork",
        at_least=0.92,
    ),
    *(
        Claim(
            f"generate_batch with option decode beside {name}", "generate_batch_decode", 3, figure, said, at_least=least
        )
        for name, figure, said, least in (
            (
                "FlashAttention-3",
                tokens_over("tatten_decode", "fa3"),
                "1.52 times the tokens per second of FlashAttention-3",
                1.515,
            ),
            (
                "Inductor",
                tokens_over("tatten_decode", "tatten_compiled"),
                "1.03 times those of `tatten_compiled`",
                1.03,
            ),
        )
    ),
    *(
        Claim(f"compiled generate_batch beside {name}", "generate_batch_compiled", 4, figure, said, at_least=least)
        for name, figure, said, least in (
            (
                "FlashAttention-3",
                tokens_over("tatten_compiled", "fa3"),
                "1.48 times the tokens per second of FlashAttention-3",
                1.48,
            ),
            ("a fork", tokens_over("tatten_compiled", "fork"), "1.13 times those of the fork", 1.13),
        )
    ),
    *(
        Claim(
            f"generate_batch beside transformers' own attention, {name}",
            "generate_batch_c",
            4,
            tokens_over("tatten", "sdpa", lambda r, name=name: r["setting"] == name),
            "11.0 times the tokens per second for Gemma-3-12b, and 9.5 times for gpt-oss-20b",
            at_least=least,
        )
        for name, least in (("gemma3", 11.0), ("gpt_oss", 9.4))
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
