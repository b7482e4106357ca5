"""Cost model of an indexer's scores: the products of all heads in memory, against one pass over the stored keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tatten.ops.layout import BATCH, LENGTH
from tatten.ops.states import accumulator_dtype
from tatten.passes.byte_sizes import shown_bytes
from tatten.passes.cost import Sizes, rates_of
from tatten.passes.stored import Stored
from tatten.passes.symbolic import hint
from tatten.passes.views import Size


@dataclass(frozen=True)
class IndexCost:
    """An estimate of the bytes that scores move, and of the microseconds that a rewrite saves and adds.

    Attributes:
        moved: bytes of keys, of copies of them in a wider dtype, of the products of all heads, and of scores.
        read: bytes of keys and scores.
        assumed: the numbers that stand for dynamic sizes.
    """

    moved: int
    read: int
    saved_us: float
    extra_us: float
    assumed: str = ""

    @property
    def pays(self) -> bool:
        return self.saved_us > self.extra_us

    def __str__(self) -> str:
        read, moved = shown_bytes(self.read), shown_bytes(self.moved)
        saved = f"about {self.saved_us:.0f} us saved by moving {read} instead of {moved}"
        return f"{saved}, about {self.extra_us:.0f} us more for a call" + f"; {self.assumed}" * bool(self.assumed)


def index_cost(query: Tensor, key: Tensor, segments: Sequence[Stored] = (), *, widened: bool) -> IndexCost | None:
    """Estimate the bytes before and after a rewrite, or return None if sizes are unknown.

    Args:
        query, key: `[batch, q_length, heads, dim]` and `[batch, kv_length, dim]`.
        segments: the tensors that the program concatenates to the keys, which the op reads one by one.
        widened: whether the program makes a copy of all keys in a wider dtype.
    """
    sizes = Sizes(query.shape[0])
    batch, keys = sizes.sequences, sizes.length(key.shape[1])
    q_len, heads, dim = map(hint, query.shape[1:])
    if q_len is None or heads is None or dim is None:
        return None
    wide = accumulator_dtype(query.dtype).itemsize
    stored, scores = key.element_size() * batch * keys * dim, wide * batch * q_len * keys
    copied = 2 * wide * batch * keys * dim if widened else 0
    moved, read = stored + copied + (2 * heads + 1) * scores, stored + scores
    lengths: list[Size] = [key.shape[1]]
    if segments:  # the program also reads the segments and writes the keys; the op concatenates scores
        lengths = [x.size(LENGTH) for x in segments]
        counts = [(sizes.rows(x.size(BATCH)) or batch) * sizes.length(x.size(LENGTH)) for x in segments]
        in_segments = key.element_size() * dim * sum(counts)
        moved, read = moved + in_segments + stored, in_segments + 3 * scores
    rates = rates_of(query.device)
    extra_us = rates.segment_us * max(1, len(segments))
    return IndexCost(moved, read, (moved - read) / rates.bytes_per_us, extra_us, sizes.assumed(lengths))
