"""The decode pass: `F.scaled_dot_product_attention` of a few queries becomes `tatten::decode_attention`.

`match_decode` returns a match or a reason, and `apply_decode` changes the graph.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch.fx import Node

from tatten.passes.cost import Cost, cost_of
from tatten.passes.dequantised import Scale, both_in_8_bits
from tatten.passes.drafts import Drafting
from tatten.passes.indices import insert_indices
from tatten.passes.masks import Masks
from tatten.passes.match import Match
from tatten.passes.reasons import Decline, Reason
from tatten.passes.replace import insert_op, scale_of
from tatten.passes.sdpa import SdpaCall
from tatten.passes.stored import Stored
from tatten.passes.symbolic import guard_equal, known_equal, known_tensor, tensor_of


@dataclass(frozen=True)
class DecodeMatch(Match):
    """An SDPA call that `tatten::decode_attention` computes: one key and one value, before their heads were repeated.

    Attributes:
        scales: the scales of keys and of values; None if they are not in 8 bits, or have no scale.
        not_narrow: the reason why keys and values that were dequantised are not read in 8 bits; None if they are, or
            if none were dequantised.
    """

    scales: tuple[Scale | None, Scale | None] = (None, None)
    not_narrow: Decline | None = None

    @functools.cached_property
    def cost(self) -> Cost | None:
        """The estimate with all keys in use, when a rewrite saves least; None if sizes are unknown."""
        return cost_of(self.call, self.keys, self.values, decode=True)

    @property
    def note(self) -> str:
        declined = self.not_narrow
        return "" if declined is None else f"not read in 8 bits [{declined.reason.value}]: {declined.detail}"

    @property
    def too_costly(self) -> Decline | None:
        """The reason why SDPA is at least as fast; None if it isn't, or if that is unknown.

        Only a run shows how many keys a mask excludes. On a CPU, a call with a mask is left as it is if it would take
        noticeably longer with all keys in use. On a GPU, a call with a mask is not weighed. Attention that is written
        out takes several kernels and stores its scores, so it isn't weighed either. The exception is a CPU under
        Inductor, which fuses such attention: it is left as it is unless its keys or values have scales, or a top-k
        selects keys.
        """
        query, key = known_tensor(self.call.query), known_tensor(self.call.key)
        as_stored = self.scales == (None, None) and self.call.picks is None
        if self.call.fused and query.device.type == "cpu" and as_stored:
            # With all keys in use 0.14 to 1.06 of the speed, with an eighth of them 2.8 to 5 times it (2-core Xeon).
            return Decline(Reason.NO_GAIN, "on a CPU Inductor fuses products of a few queries, and may be faster")
        if self.call.form:
            return None
        if self.call.attn_mask is not None:
            taken = query.device.type == "cuda" or self.cost is None or self.cost.may_pay
            return None if taken else Decline(Reason.SMALL, f"with all keys in use {self.cost}")
        one_to_one = known_equal(query.shape[1], key.shape[1])
        stored = tensor_of(self.keys[0].base)
        narrow = stored is not None and stored.dtype != key.dtype
        if not narrow and self.keys[0].repeats == 1 and (one_to_one or query.device.type == "cuda"):
            heads = f"{key.shape[1]} kv heads for {query.shape[1]} query heads"
            return Decline(Reason.NO_GAIN, f"no mask, and {heads} as they are")
        return None if self.cost is None or self.cost.pays else Decline(Reason.SMALL, str(self.cost))

    @property
    def cost_remark(self) -> str:
        if self.cost is None or self.cost.pays or self.call.form:
            return ""
        return f"the mask decides at run time how much is read; if that is all, {self.cost}"


def match_decode(
    call: SdpaCall, peeled_key: Stored, peeled_value: Stored, may_guard: bool = True
) -> DecodeMatch | Decline:
    """Match a call that `check_call` found eligible, given its key and value before heads were repeated.

    The graph stays as it is. A guard is added only if the batches of query, key and value can't be proven equal: with
    dynamic shapes, each DTensor that is an input has a symbol of its own. Without `may_guard` such a call is declined.
    """
    query, key, value = (known_tensor(x) for x in (call.query, call.key, call.value))
    equal = guard_equal if may_guard else known_equal
    if not all(equal(query.shape[0], x.shape[0]) for x in (key, value)):
        return Decline(Reason.BATCH, f"query, key, value have batch {query.shape[0]}, {key.shape[0]}, {value.shape[0]}")
    if peeled_key.repeats != peeled_value.repeats:  # DiffLlama joins values in pairs: take both as they are
        peeled_key, peeled_value = Stored(call.key), Stored(call.value)
    for name, peeled in (("key", peeled_key), ("value", peeled_value)):
        writer = peeled.written_before(call.node)
        if writer is not None:
            return Decline(Reason.WRITTEN, f"{name} is written by `{writer}` after its heads were repeated")
    narrow = both_in_8_bits(call, peeled_key, peeled_value)
    if not isinstance(narrow, tuple):
        return DecodeMatch(call, (peeled_key,), (peeled_value,), not_narrow=narrow)
    keys, values = narrow
    return DecodeMatch(call, (keys.stored,), (values.stored,), scales=(keys.scale, values.scale))


def apply_decode(match: DecodeMatch, masks: Masks) -> Node:
    """Insert the op before SDPA and return its node, a state."""
    call = masks.cast(match.call)
    key, value = (masks.as_attention_takes_it(stored, call) for stored in (*match.keys, *match.values))
    scales, dtype = {}, known_tensor(call.query).dtype
    for name, scale, stored in zip(
        ("key_scale", "value_scale"), match.scales, (*match.keys, *match.values), strict=True
    ):
        if scale is not None:
            draft = scale.as_attention_takes_it(stored, dtype, Drafting(masks.drafts, stored.base))
            scales[name] = masks.drafts.insert(draft, call.node)
    block_mask = masks.block_mask(call, call.attn_mask)
    args = (call.query, key, value, call.attn_mask, None, scale_of(call), block_mask)
    options = match.options | scales | insert_indices(call, match.keys, masks.drafts)[0]
    return insert_op(call, torch.ops.tatten.decode_attention.default, args, options)
