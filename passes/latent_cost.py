"""Cost model of latent attention: projecting all latents in every step, against attending to the latents."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tatten.ops.layout import BATCH, HEAD_DIM, HEADS, LENGTH
from tatten.passes.byte_sizes import shown_bytes
from tatten.passes.cost import Rates, Sizes, rates_of
from tatten.passes.picks import Picks
from tatten.passes.stored import Stored
from tatten.passes.symbolic import hint

CALLS = 3  # more calls than SDPA takes: the op and two products; 270 us were measured on a 2-core CPU


@dataclass(frozen=True)
class Work:
    """The bytes that a step moves, and its floating-point operations."""

    bytes: int
    flops: int

    def us(self, rates: Rates) -> float:
        return max(self.bytes / rates.bytes_per_us, self.flops / rates.flops_per_us)


@dataclass(frozen=True)
class LatentCost:
    """An estimate of the work of attention over projected keys and values, and of attention over latents.

    Each intermediate tensor counts as written once and read once. No key counts as masked.
    """

    projected: Work
    absorbed: Work
    saved_us: float
    extra_us: float
    assumed: str = ""  # the numbers that stand for dynamic sizes

    @property
    def pays(self) -> bool:
        return self.saved_us > self.extra_us

    def __str__(self) -> str:
        work = f"{shown_bytes(self.projected.bytes)} and {self.projected.flops} flops"
        less = f"{shown_bytes(self.absorbed.bytes)} and {self.absorbed.flops} flops"
        saved = f"about {self.saved_us:.0f} us saved by {less} instead of {work}"
        return f"{saved}, about {self.extra_us:.0f} us more" + f"; {self.assumed}" * bool(self.assumed)


def latent_cost(
    query: Tensor, latent: Stored, nope: int, rope: int, value: int, picks: Picks | None = None
) -> LatentCost | None:
    """Estimate the work before and after a rewrite, or return None if sizes are unknown.

    A key has `nope` columns that are projected for each head and `rope` columns that heads share. The program projects
    all keys, while attention to latents reads only those of `picks`.
    """
    sizes = Sizes(query.shape[BATCH])
    batch, kv_len, rank = sizes.sequences, sizes.length(latent.size(LENGTH)), hint(latent.size(HEAD_DIM))
    q_len, heads = hint(query.shape[LENGTH]), hint(query.shape[HEADS])
    if q_len is None or heads is None or rank is None:
        return None
    weight, latents = heads * rank * (nope + value), batch * kv_len * (rank + rope)
    scores = batch * heads * q_len * kv_len
    keys_and_values = batch * kv_len * heads * (nope + value)
    assembled = batch * kv_len * heads * (2 * nope + rope)  # to join keys, read the heads' parts, write all columns
    read = batch * kv_len * heads * (nope + rope + value)
    size = query.element_size()
    projected = Work(
        size * (latents + weight + keys_and_values + assembled + read),
        2 * batch * kv_len * weight + 2 * scores * (nope + rope + value),
    )
    by_one, by_all = (kv_len, kv_len) if picks is None else (picks.keys_read(kv_len, n) for n in (1, q_len))
    absorbed = Work(
        size * (batch * by_all * (rank + rope) + weight),
        2 * batch * q_len * weight + 2 * batch * heads * q_len * by_one * (2 * rank + rope),
    )
    rates = rates_of(query.device)
    saved_us, assumed = projected.us(rates) - absorbed.us(rates), sizes.assumed([latent.size(LENGTH)])
    return LatentCost(projected, absorbed, saved_us, CALLS * rates.segment_us, assumed)
