"""Cost model of rewrites: small calls stay as they are (question 4 of the appendix of arXiv 2403.08845).

A size counts with its value in the example inputs. Dynamic sizes are the exception: one graph serves every length, and
may be captured at a short one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tatten.ops.cuda.tuning import gpu_rates
from tatten.ops.layout import BATCH, HEAD_DIM, HEADS, LENGTH
from tatten.passes.byte_sizes import shown_bytes
from tatten.passes.picks import Picks
from tatten.passes.sdpa import SdpaCall
from tatten.passes.stored import Stored
from tatten.passes.symbolic import constant, hint, known_equal, known_tensor, same_storage, tensor_of
from tatten.passes.views import Size

# Values of dynamic sizes, unless the example inputs have larger ones. A cache grows; a batch may have any size.
TYPICAL_LENGTH = 4096
TYPICAL_BATCH = 4
# The accepted loss, as a share of SDPA's estimated time, of a call whose mask excludes no key. The measured loss is
# below 0.05, as `DecodeRates` favour SDPA.
ACCEPTED_LOSS = 0.1


@dataclass(frozen=True)
class Rates:
    """Rates of a device. `benchmarks/shared_prefix.py --calibrate` fits those of bytes and of segments."""

    bytes_per_us: float  # of keys and values that SDPA moves
    segment_us: float  # for each segment beyond SDPA's time: calls, a kernel, its share of the merge
    flops_per_us: float = math.inf  # of large products, in the low precision that the device is fastest in
    decode: DecodeRates | None = None  # for `tatten::decode_attention`; None to use the rates of segments
    pages: PageRates | None = None  # where it reads pages; None to use those of `decode`

    def of_decode(self, pairs: int, itemsize: int, pages: PageRates | None) -> tuple[float, float]:
        """Return the rates of `tatten::decode_attention`: bytes per microsecond, and microseconds per call.

        Args:
            pairs: the number of (sequence, query head) pairs, each of which occupies one thread.
            itemsize: the bytes of one number.
            pages: the rates of pages if keys and values are in pages.
        """
        if self.decode is None:
            return self.bytes_per_us, self.segment_us
        numbers_per_us, call_us = self.decode.numbers_per_us, self.decode.call_us
        if pages is not None:
            numbers_per_us = pages.narrow_numbers_per_us if itemsize < 4 else numbers_per_us
            call_us = pages.call_us
        return numbers_per_us * itemsize * _threads(pairs), call_us


@dataclass(frozen=True)
class DecodeRates:
    """Rates of `tatten::decode_attention` on a CPU, where arithmetic bounds the kernel: `benchmarks/small_calls.py`.

    They favour SDPA. On one core of an EPYC its kernel reads 4e3 to 5e3 numbers of float32 in a microsecond, 1e3 of
    bfloat16. The op adds 35 to 45 us, or 85 while other processes use the caches. For sequences of unequal lengths it
    calls the kernel once for each sequence, which adds 8 to 25 us per call.
    """

    numbers_per_us: float  # of keys and values, by one thread of PyTorch's kernel for one query
    call_us: float  # of the op beyond PyTorch's kernel
    sequence_us: float = 0.0  # for each sequence after the first, if a mask leaves them different numbers of keys


@dataclass(frozen=True)
class PageRates:
    """Rates of `tatten::decode_attention` over pages on a CPU, which copies them: `benchmarks/paged.py`, section short.

    They favour gathers that Inductor compiles, and SDPA. On two cores of an EPYC, SDPA's kernel reads 1e3 numbers of
    bfloat16 in a microsecond on each of them, the op adds 250 to 500 us, and a copy of 4 MiB takes 50 to 210 us.
    Sequences of unequal lengths share calls.
    """

    narrow_numbers_per_us: float  # `DecodeRates.numbers_per_us` in 16 bits
    call_us: float  # of the op beyond the copies and PyTorch's kernel
    copied_bytes_per_us: float  # by one thread


RATES = {  # by type of device; GPUs have tuning modules
    "cpu": Rates(44e3, 97.0, 1e5, DecodeRates(10e3, 60.0, 30.0), PageRates(2e3, 250.0, 10e3))
}


def _threads(pairs: int) -> int:
    return min(pairs, torch.get_num_threads())


def rates_of(device: torch.device) -> Rates:
    """Return the rates of a device."""
    if device.type in RATES:
        return RATES[device.type]
    gpu = gpu_rates(device)
    return Rates(gpu.sdpa_bytes_per_us, gpu.segment_us, gpu.product_flops_per_us)


@dataclass(frozen=True)
class Cost:
    """An estimate of the microseconds that a rewrite saves and adds."""

    moved: int  # bytes of K and V, by SDPA and by the ops that repeat and concatenate them for it
    read: int  # bytes of K and V as they are stored, each once; an upper bound if an index selects rows
    segments: int  # number of segments of keys
    saved_us: float
    extra_us: float
    moved_us: float = 0.0  # the time in which SDPA and those ops move `moved` bytes
    assumed: str = ""  # the numbers that stand for dynamic sizes
    unequal_us: float = 0.0  # beyond `extra_us`, if a mask leaves sequences different numbers of keys

    @property
    def pays(self) -> bool:
        return self.saved_us > self.extra_us

    @property
    def may_pay(self) -> bool:
        """True if a rewrite of a call with a mask loses little even if the mask excludes few keys.

        Two masks are weighed: one that excludes no key, and one that excludes half of the keys, with a different number
        for each sequence.
        """
        loss = self.extra_us - self.saved_us
        half_us = self.moved_us * self.read / max(self.moved, 1) / 2
        return max(loss, loss + self.unequal_us - half_us) <= ACCEPTED_LOSS * self.moved_us

    def __str__(self) -> str:
        read, moved = shown_bytes(self.read), shown_bytes(self.moved)
        saved = f"about {self.saved_us:.0f} us saved by reading {read} instead of moving {moved}"
        extra = f"about {self.extra_us:.0f} us more for {self.segments} segment{'s' * (self.segments > 1)}"
        unequal = f", and {self.unequal_us:.0f} for sequences of unequal lengths" if self.unequal_us else ""
        return f"{saved}, {extra}{unequal}" + f"; {self.assumed}" * bool(self.assumed)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call as numbers, for its cost. `batch` is the batch of the query.

    A dynamic length counts as `TYPICAL_LENGTH` keys if it is shorter in the example inputs. A dynamic batch counts as
    `TYPICAL_BATCH` sequences if the example inputs have fewer. Other dynamic numbers of rows grow with the batch.
    """

    batch: Size

    @property
    def sequences(self) -> int:
        fixed = constant(self.batch)
        return max(hint(self.batch) or 0, TYPICAL_BATCH) if fixed is None else fixed

    def rows(self, size: Size) -> int | None:
        """Return the number of rows of keys or values, or None if it is unknown."""
        if constant(size) is not None or known_equal(size, self.batch):
            return self.sequences if constant(size) is None else constant(size)
        example_rows, example_batch = hint(size), hint(self.batch)
        if example_rows is None or not example_batch:
            return None
        return round(example_rows * self.sequences / example_batch)

    def length(self, size: Size) -> int:
        """Return the number of keys."""
        fixed = constant(size)
        return max(hint(size) or 0, TYPICAL_LENGTH) if fixed is None else fixed

    def assumed(self, lengths: Sequence[Size]) -> str:
        """Return a remark on the numbers that stand for dynamic sizes, given the `lengths` of all segments."""
        dynamic = [self.length(x) for x in lengths if constant(x) is None]
        counts = [f"{' + '.join(map(str, dynamic))} keys"] if dynamic else []
        counts += [f"{self.sequences} sequences"] if constant(self.batch) is None else []
        return f"weighed for {' of '.join(counts)}, a dynamic number" if counts else ""


def cost_of(call: SdpaCall, keys: Sequence[Stored], values: Sequence[Stored], decode: bool = False) -> Cost | None:
    """Compare the bytes that an op reads, each segment of keys and values once, with the bytes that SDPA moves.

    A tensor that is repeated or concatenated in memory is read, written, and read again by SDPA. SDPA reads a row once
    for each sequence. On a CPU it also reads a kv head once for each query head, unless the query heads are grouped. In
    low precision on a CPU, four query heads count as one: packing four gains nothing, packing eight does (measured on a
    2-core Xeon with AMX).

    Args:
        call: the call, with keys and values as SDPA takes them.
        keys: the segments of its keys, as they are stored.
        values: the segments of its values.
        decode: whether the op is `tatten::decode_attention`, which has separate rates.

    Returns:
        The cost, or None if sizes are unknown.
    """
    query = known_tensor(call.query)
    sizes, q_heads = Sizes(query.shape[BATCH]), hint(query.shape[HEADS])
    lengths = [segment.size(LENGTH) for segment in keys]
    all_keys, queries = sum(map(sizes.length, lengths)), hint(query.shape[LENGTH]) or 1
    moved = read = 0
    for node, segments in ((call.key, keys), (call.value, values)):
        tensor = known_tensor(node)
        rows = sizes.rows(tensor.shape[BATCH])
        kv_heads, head_dim = hint(tensor.shape[HEADS]), hint(tensor.shape[HEAD_DIM])
        stored = [_bytes_read(segment, length, sizes, rows) for segment, length in zip(segments, lengths, strict=True)]
        if not rows or not q_heads or not kv_heads or not head_dim or None in stored:
            return None
        size = tensor.element_size() * rows * kv_heads * head_dim * all_keys
        once = sum(n or 0 for n in stored)
        copied = not any(
            same_storage(tensor, base) for base in (tensor_of(x.base) for x in segments) if base is not None
        )
        group = q_heads // kv_heads if query.device.type == "cpu" and not call.grouped else 1
        reads = sizes.sequences // rows * (group if query.element_size() >= 4 else max(1, group // 4))
        moved += size * reads + (size + once) * copied
        for n, segment in zip(stored, segments, strict=True):
            read += _bytes_picked(n or 0, segment, call.picks, sizes, queries)
    rates, pairs = rates_of(query.device), sizes.sequences * (q_heads or 1)
    bytes_per_us, segment_us = rates.bytes_per_us, rates.segment_us
    pages = rates.pages if keys[0].table is not None else None
    if decode:
        bytes_per_us, segment_us = rates.of_decode(pairs, query.element_size(), pages)
    saved_us, extra_us = (moved - read) / bytes_per_us, len(keys) * segment_us
    mask, unequal_us = tensor_of(call.attn_mask), 0.0
    if decode and pages is not None:
        extra_us += read / (pages.copied_bytes_per_us * _threads(pairs))
    elif decode and rates.decode is not None and mask is not None and mask.dim() == 4:
        unequal_us = rates.decode.sequence_us * ((sizes.rows(mask.shape[BATCH]) or 1) - 1)
    assumed = sizes.assumed(lengths)
    return Cost(moved, read, len(keys), saved_us, extra_us, moved / bytes_per_us, assumed, unequal_us)


def _bytes_read(stored: Stored, length: Size, sizes: Sizes, batch: int | None) -> int | None:
    """Return the bytes of a segment that an op reads, each row once, or None if sizes are unknown.

    If an index selects rows, this is an upper bound for `batch` sequences: several may read the same row.
    """
    base = known_tensor(stored.base)
    rows, heads, head_dim = sizes.rows(stored.size(BATCH)), hint(stored.size(HEADS)), hint(stored.size(HEAD_DIM))
    if rows is None or heads is None or head_dim is None:
        return None
    if stored.rows is not None:
        if batch is None:
            return None
        rows = min(rows, batch)
    return base.element_size() * rows * heads * sizes.length(length) * head_dim


def _bytes_picked(all_bytes: int, stored: Stored, picks: Picks | None, sizes: Sizes, queries: int) -> int:
    """Return the bytes of a segment, of `all_bytes`, that an op reads by indices. No two sequences share picks."""
    if picks is None:
        return all_bytes
    length, sharing = sizes.length(stored.size(LENGTH)), sizes.sequences // (sizes.rows(stored.size(BATCH)) or 1)
    return all_bytes * picks.keys_read(length, queries * max(1, sharing)) // max(length, 1)
