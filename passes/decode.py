"""The decode pass: `F.scaled_dot_product_attention` of a few queries becomes `tatten::decode_attention`.

`match_decode` returns a match or a reason, and `apply_decode` changes the graph.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from tatten.ops.layout import LENGTH
from tatten.passes.byte_sizes import shown_bytes
from tatten.passes.cost import Cost, cost_of
from tatten.passes.dequantised import Scale, both_in_8_bits
from tatten.passes.drafts import Drafting, Drafts
from tatten.passes.findings import counted
from tatten.passes.indices import insert_indices
from tatten.passes.mask_lengths import MaskLength
from tatten.passes.masks import Masks
from tatten.passes.match import Match
from tatten.passes.pages import both_in_pages
from tatten.passes.reasons import Decline, Reason
from tatten.passes.replace import insert_op, scale_of
from tatten.passes.sdpa import SdpaCall
from tatten.passes.stored import Stored
from tatten.passes.symbolic import guard_equal, hint, known_equal, known_tensor, tensor_of
from tatten.passes.views import ROLES

Scales = tuple[Scale | None, Scale | None]
NO_SCALES: Scales = (None, None)


@dataclass(frozen=True)
class DecodeMatch(Match):
    """An SDPA call that `tatten::decode_attention` can compute, from one key and one value before repeated heads.

    Attributes:
        scales: the scales of keys and of values; None if they are not in 8 bits or have no scale.
        not_narrow: the reason why dequantised keys and values are not read in 8 bits, or None.
        not_paged: the reason why keys and values that were gathered through a block table are not read in pages, or
            None.
        length: the length that the mask stands for, or None if the op reads the mask.
    """

    scales: Scales = NO_SCALES
    not_narrow: Decline | None = None
    not_paged: Decline | None = None
    length: MaskLength | None = field(default=None, kw_only=True)

    @functools.cached_property
    def cost(self) -> Cost | None:
        """The estimate with all keys in use, for which a rewrite saves least; None if sizes are unknown."""
        return cost_of(self.call, self.keys, self.values, decode=True)

    @property
    def note(self) -> str:
        """A remark on pages, and on dequantised or gathered keys and values that are read as they are."""
        declines = {"not read in 8 bits": self.not_narrow, "not read in pages": self.not_paged}
        remarks = [f"{title} [{x.reason.value}]: {x.detail}" for title, x in declines.items() if x is not None]
        return "; ".join([*self._pages, *remarks])

    @property
    def _pages(self) -> list[str]:
        """A remark on pages that are read from the pool."""
        table = self.keys[0].table
        if table is None:
            return []
        page, sizes = self.keys[0].size_in_base(LENGTH), [_bytes_in_order(x) for x in (*self.keys, *self.values)]
        total = 2 * sum(x or 0 for x in sizes)
        moved = "" if None in sizes else f"; the gathers moved {shown_bytes(total)}, and are gone"
        return [f"read by block table {table} in pages of {counted(page, 'key')}{moved}"]

    @property
    def too_costly(self) -> Decline | None:
        """The reason why SDPA is at least as fast, or None if it isn't or that is unknown.

        The number of keys that a mask excludes is known only at run time. On a CPU, a call with a mask stays as it is
        if it would take noticeably longer with all keys in use. On a GPU, a call with a mask is not weighed. Attention
        that is written out takes several kernels and stores its scores, so it is not weighed either. On a CPU, however,
        Inductor fuses it. It then stays as it is unless its keys or values have scales or a top-k selects keys.
        """
        query, key = known_tensor(self.call.query), known_tensor(self.call.key)
        as_stored = self.scales == NO_SCALES and self.call.picks is None
        if self.call.fused and query.device.type == "cpu" and as_stored:
            # The op has 0.14 to 1.06 of the speed with all keys in use, 2.8 to 5 times with an eighth (2-core Xeon).
            return Decline(Reason.NO_GAIN, "on a CPU Inductor fuses products of a few queries, and may be faster")
        if self.call.form:
            return None
        if self.call.attn_mask is not None:
            may_pay = query.device.type == "cuda" or self.cost is None or self.cost.may_pay
            return None if may_pay else Decline(Reason.SMALL, f"with all keys in use {self.cost}")
        one_to_one = known_equal(query.shape[1], key.shape[1])
        stored = tensor_of(self.keys[0].base)
        narrow = stored is not None and stored.dtype != key.dtype
        in_place = not narrow and self.keys[0].table is None
        if in_place and self.keys[0].repeats == 1 and (one_to_one or query.device.type == "cuda"):
            heads = f"{key.shape[1]} kv heads for {query.shape[1]} query heads"
            return Decline(Reason.NO_GAIN, f"no mask, and {heads} as they are")
        return None if self.cost is None or self.cost.pays else Decline(Reason.SMALL, str(self.cost))

    @property
    def cost_remark(self) -> str:
        if self.cost is None or self.cost.pays or self.call.form:
            return ""
        decides = "the mask" if self.length is None else "the length"
        return f"{decides} decides at run time how much is read; if that is all, {self.cost}"


def match_decode(
    call: SdpaCall, peeled_key: Stored, peeled_value: Stored, drafts: Drafts, may_guard: bool = True
) -> DecodeMatch | Decline:
    """Match a call that `check_call` found eligible, given its key and value before heads were repeated.

    Makes drafts. A guard is added only if the batches of query, key and value, or the pools' numbers of pages, can't be
    proven equal: with dynamic shapes, each DTensor that is an input has separate symbols. Without `may_guard` the call
    is declined, or pages are read as the program gathers them.
    """
    query, key, value = (known_tensor(x) for x in (call.query, call.key, call.value))
    equal = guard_equal if may_guard else known_equal
    if not all(equal(query.shape[0], x.shape[0]) for x in (key, value)):
        return Decline(Reason.BATCH, f"query, key, value have batch {query.shape[0]}, {key.shape[0]}, {value.shape[0]}")
    if peeled_key.repeats != peeled_value.repeats:  # DiffLlama joins values in pairs, so read both as they are
        peeled_key, peeled_value = Stored(call.key), Stored(call.value)
    for name, peeled in (("key", peeled_key), ("value", peeled_value)):
        writer = peeled.written_before(call.node)
        if writer is not None:
            return Decline(Reason.WRITTEN, f"{name} is written by `{writer}` after its heads were repeated")
    narrow, scales = both_in_8_bits(call, peeled_key, peeled_value), NO_SCALES
    if isinstance(narrow, tuple):
        peeled_key, peeled_value = (x.stored for x in narrow)
        scales = narrow[0].scale, narrow[1].scale
    paged = both_in_pages(call, peeled_key, peeled_value, drafts, may_guard)
    if isinstance(paged, tuple) and any(x is not None and x.per_key for x in scales):
        paged = Decline(Reason.PAGES, "each key has a scale of its own, which isn't read in pages")
    keys, values = paged if isinstance(paged, tuple) else (peeled_key, peeled_value)
    declined = [x if isinstance(x, Decline) else None for x in (narrow, paged)]
    return DecodeMatch(call, (keys,), (values,), False, scales, *declined)


def _bytes_in_order(stored: Stored) -> int | None:
    """Return the bytes of keys or values as attention takes them, or None if sizes are unknown."""
    sizes = [hint(stored.size(role)) for role in ROLES]
    return None if None in sizes else math.prod(n or 0 for n in sizes) * known_tensor(stored.base).element_size()


def apply_decode(match: DecodeMatch, masks: Masks) -> Node:
    """Insert the op before SDPA and return its node, a state."""
    call = masks.cast(match.call)
    key, value = (masks.as_operand(stored, call) for stored in (*match.keys, *match.values))
    scales, dtype = {}, known_tensor(call.query).dtype
    for name, scale, stored in zip(
        ("key_scale", "value_scale"), match.scales, (*match.keys, *match.values), strict=True
    ):
        if scale is not None:
            draft = scale.as_operand(stored, dtype, Drafting(masks.drafts, stored.base))
            scales[name] = masks.drafts.insert(draft, call.node)
    attn_mask, kv_lens, pages = call.attn_mask, None, {}
    if match.length is not None:
        attn_mask, kv_lens = None, masks.length(match.length)
    block_mask = masks.block_mask(call, attn_mask)
    if match.keys[0].table is not None:
        table = masks.block_table(call, match.keys[0])
        pages = {"block_table": table}
        if kv_lens is None and block_mask is None:
            kv_lens = masks.all_pages(call, match.keys[0], table)
    args = (call.query, key, value, attn_mask, kv_lens, scale_of(call), block_mask)
    options = match.options | scales | insert_indices(call, match.keys, masks.drafts)[0] | pages
    return insert_op(call, torch.ops.tatten.decode_attention.default, args, options)
