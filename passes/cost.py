"""Cost model of rewrites: small work is left alone (question 4 of the appendix of arXiv 2403.08845)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import SymInt

from tatten.ops.layout import BATCH
from tatten.passes.sdpa import SdpaCall
from tatten.passes.stored import Stored
from tatten.passes.symbolic import bytes_of, hint, same_storage, tensor_of


@dataclass(frozen=True)
class Rates:
    """Rates of a device: of bytes and segments as `benchmarks/shared_prefix.py --calibrate` fits them."""

    bytes_per_us: float  # of keys and values that SDPA moves
    segment_us: float  # beyond SDPA's own time, for each segment: calls, a kernel, its share of the merge
    flops_per_us: float = math.inf  # of large products, in the low precision that the device is fastest in


RATES = {"cpu": Rates(44e3, 97.0, 1e5), "cuda": Rates(4.7e6, 1.3, 8e8)}


@dataclass(frozen=True)
class Cost:
    """An estimate of the microseconds that a rewrite saves, and of those that it adds."""

    moved: int  # bytes of K and V, by SDPA and by the ops that repeat and concatenate them for it
    read: int  # bytes of K and V as they are stored, each once; of rows that an index selects, at most
    segments: int
    saved_us: float
    extra_us: float

    @property
    def pays(self) -> bool:
        return self.saved_us > self.extra_us

    def __str__(self) -> str:
        saved = f"about {self.saved_us:.0f} us saved by reading {self.read} instead of moving {self.moved} bytes"
        return f"{saved}, about {self.extra_us:.0f} us more for {self.segments} segment{'s' * (self.segments > 1)}"


def cost_of(call: SdpaCall, keys: Sequence[Stored], values: Sequence[Stored]) -> Cost | None:
    """Compare reading each segment of keys and values once with what SDPA reads; None if sizes are unknown.

    A tensor that is repeated or concatenated in memory is read, written, and read again by SDPA. On a CPU, SDPA reads a
    row once for each sequence, and a kv head once for each query head, unless these are grouped. In low precision the
    first four query heads are free: packing four gains nothing there, packing eight does (2-core Xeon with AMX,
    measured).
    """
    query = tensor_of(call.query)
    assert query is not None
    moved = read = 0
    for node, segments in ((call.key, keys), (call.value, values)):
        whole = tensor_of(node)
        assert whole is not None
        stored = [_bytes_read(segment, whole.shape[0]) for segment in segments]
        batch, rows, q_heads, kv_heads = (
            hint(x) for x in (query.shape[0], whole.shape[0], query.shape[1], whole.shape[1])
        )
        size = bytes_of(whole)
        if size is None or not batch or not rows or not q_heads or not kv_heads or None in stored:
            return None
        once = sum(n or 0 for n in stored)
        copied = not any(
            same_storage(whole, base) for base in (tensor_of(x.base) for x in segments) if base is not None
        )
        group = q_heads // kv_heads if query.device.type == "cpu" and not call.grouped else 1
        reads = batch // rows * (group if query.element_size() >= 4 else max(1, group // 4))
        moved += size * reads + (size + once) * copied
        read += once
    rates = RATES[query.device.type]
    return Cost(moved, read, len(keys), (moved - read) / rates.bytes_per_us, len(keys) * rates.segment_us)


def _bytes_read(stored: Stored, batch: int | SymInt) -> int | None:
    """The bytes of a segment that are read, each row once; of selected rows at most, as some may be the same."""
    base, dim = tensor_of(stored.base), stored.dims[BATCH]
    assert base is not None
    if dim is None or not (stored.overlaid or stored.rows is not None):
        return bytes_of(base)
    row, rows, selected = bytes_of(base.narrow(dim, 0, 1)), hint(base.shape[dim]), hint(batch)
    if row is None or rows is None or selected is None:
        return None
    return row if stored.overlaid else row * min(rows, selected)
