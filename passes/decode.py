"""The decode pass: `F.scaled_dot_product_attention` of a few queries becomes `tatten::decode_attention`.

`match_decode` only looks and returns what it found or why not; `apply_decode` changes the graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from tatten.passes.cost import Cost, cost_of
from tatten.passes.masks import Masks
from tatten.passes.reasons import Decline, Reason
from tatten.passes.replace import replace_call, scale_of, written_since
from tatten.passes.sdpa import SdpaCall
from tatten.passes.symbolic import known_equal, tensor_of
from tatten.passes.tree import local_call
from tatten.passes.views import Stored


@dataclass(frozen=True)
class DecodeMatch:
    """An SDPA call that `tatten::decode_attention` answers; key and value as they were before heads were repeated."""

    call: SdpaCall
    key: Stored
    value: Stored
    cost: Cost | None  # None for sizes that aren't known

    @property
    def doubt(self) -> str:
        """Why this may not pay; empty where it does, whatever the mask leaves out."""
        if self.cost is None or self.cost.pays:
            return ""
        return f"not weighed: the mask decides at run time how much is read; of all keys, {self.cost}"


def match_decode(call: SdpaCall, peeled_key: Stored, peeled_value: Stored) -> DecodeMatch | Decline:
    """Decide about a call that `check_call` found eligible, given what `peel_heads` finds of its key and value.

    Adds no guards and changes nothing.
    """
    query, key, value = (tensor_of(x) for x in (call.query, call.key, call.value))
    assert query is not None
    assert key is not None
    assert value is not None
    if not known_equal(query.shape[0], key.shape[0]) or not known_equal(query.shape[0], value.shape[0]):
        return Decline(Reason.BATCH, f"query, key, value have batch {query.shape[0]}, {key.shape[0]}, {value.shape[0]}")
    if peeled_key.repeats != peeled_value.repeats:  # DiffLlama pairs values of its own: take both as they are
        peeled_key, peeled_value = Stored(call.key), Stored(call.value)
    for name, peeled in (("key", peeled_key), ("value", peeled_value)):
        writer = written_since(peeled, call)
        if writer is not None:
            return Decline(Reason.WRITTEN, f"{name} is written by `{writer}` after its heads were repeated")

    if call.sharding is not None:
        return DecodeMatch(call, peeled_key, peeled_value, None)
    one_to_one = known_equal(query.shape[1], key.shape[1])
    if call.attn_mask is None and peeled_key.repeats == 1 and (one_to_one or query.device.type == "cuda"):
        heads = f"{key.shape[1]} kv heads for {query.shape[1]} query heads"
        return Decline(Reason.NO_GAIN, f"no mask, and {heads} as they are")
    cost = cost_of(call, [peeled_key], [peeled_value])
    # How much a mask leaves out only a run shows: such a call is not weighed, and `doubt` says so.
    if call.attn_mask is None and cost is not None and not cost.pays:
        return Decline(Reason.SMALL, str(cost))
    return DecodeMatch(call, peeled_key, peeled_value, cost)


def apply_decode(match: DecodeMatch, masks: Masks) -> Node:
    """Put the op in SDPA's place and erase exactly what this leaves unused. Returns the op's node."""
    call = masks.cast(match.call)
    with call.node.graph.inserting_before(call.node):
        key, value = (stored.as_attention_takes_it() for stored in (match.key, match.value))
    if call.sharding is not None:
        call = local_call(call, key, value, masks)
        key, value = call.key, call.value
    block_mask = masks.block_mask(call, call.attn_mask)
    args = (call.query, key, value, call.attn_mask, None, scale_of(call), block_mask)
    op = torch.ops.tatten.decode_attention.default
    return replace_call(call, op, args, {*match.key.path, *match.value.path})
