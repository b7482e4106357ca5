"""Find the keys that a model selects: prove that a mask leaves only keys that indices name.

`tatten.passes.marked` reads the mask. The result is the indices, and the part of the mask that doesn't depend on them.
This part determines which of the named keys count.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor
from torch.fx import Node

from tatten.ops.layout import BATCH, HEADS, LENGTH
from tatten.ops.masks import EXCLUDING_BIAS
from tatten.ops.sizes import ceil_div
from tatten.passes.autocast import autocast_dtype
from tatten.passes.calls import argument, op_name, reached
from tatten.passes.distinct import TOP_K, Origin, origin_of
from tatten.passes.drafts import Drafting, Drafts, without_drafts
from tatten.passes.eligible import check_mask
from tatten.passes.marked import Marked
from tatten.passes.mask_steps import POINTWISE, find_marked
from tatten.passes.op_names import CATS
from tatten.passes.picks import Picks
from tatten.passes.reasons import Decline, Reason
from tatten.passes.recomputed import PURE
from tatten.passes.scattered import IN_PLACE, SCATTERS
from tatten.passes.sdpa import SdpaCall
from tatten.passes.symbolic import constant, known_equal, known_tensor, tensor_of
from tatten.passes.views import Size

# With fewer keys per pick, reading all keys in order is about as fast as gathering: for 64 sequences and 128 heads,
# 2048 of 8192 latents take 190 us, and all of them 245 us (H100, `benchmarks/sparse.py`).
LEAST_KEYS_PER_PICK = 4


def find_picks(call: SdpaCall, drafts: Drafts) -> Picks | Decline | None:
    """Find the keys that an eligible call selects, for DTensors in the local part. Makes drafts, and adds no guards.

    Returns:
        The picks, the reason why the mask of a selection has to be read as it is, or None if nothing is selected.
    """
    mask, key, query = tensor_of(call.attn_mask), known_tensor(call.key), known_tensor(call.query)
    if mask is None:
        return None
    sources = {op_name(x) for x in _computed_from(call.attn_mask)}
    if sources.isdisjoint(SCATTERS):
        return None
    by_top_k = not sources.isdisjoint(TOP_K)
    kv_length, marked = key.shape[LENGTH], None
    if mask.dim() == 4 and known_equal(mask.shape[-1], kv_length):
        marked = find_marked(call.attn_mask, call.node, drafts)
    if marked is None or not _excludes(marked.outside, mask):
        unread = f"`{call.attn_mask}` depends on a top-k, and isn't known to leave only keys that it picked"
        return Decline(Reason.PICKS, unread) if by_top_k else None
    indices = _for_queries(marked, query, Drafting(drafts, call.source_node))
    if isinstance(indices, Decline):
        return indices
    rest_bias = None if mask.dtype == torch.bool or marked.outside == -math.inf else marked.outside
    if rest_bias is not None and _rounds(call, mask):
        return Decline(Reason.PICKS, f"autocast rounds {rest_bias}, the bias of the other keys")
    picked_mask, replaces_mask = _mask_of_picks(call, marked, mask), marked.inside is not None
    origin = origin_of(indices, _number_of_blocks(kv_length, marked.block), call.node)
    picks = Picks(
        indices,
        marked.block,
        picked_mask,
        rest_bias,
        origin.distinct,
        picked_mask is not call.attn_mask and _names_all(indices, marked.block, origin, kv_length),
        kv_length * _ranks(call),
        by_top_k,
        frozenset(without_drafts(marked.path)) if replaces_mask else frozenset(),
        marked.written if replaces_mask else (),
    )
    return picks if picks.names_all else _check_length(picks) or picks


def _ranks(call: SdpaCall) -> int:
    """Return the number of ranks that the call's keys are sharded over."""
    if call.sharding is None or call.shares is not None:
        return 1
    return math.prod(call.sharding.mesh.size(dim) for dim in call.sharding.merge_dims)


def _excludes(outside: float, mask: Tensor) -> bool:
    return outside == 0 if mask.dtype == torch.bool else outside <= EXCLUDING_BIAS


def _for_queries(marked: Marked, query: Tensor, draft: Drafting) -> Node | Decline:
    """Return the indices `[batch, 1 or heads, q_length, picks]`, or the reason why the op doesn't take them."""
    indices, tensor = marked.indices, known_tensor(marked.indices)
    heads = constant(tensor.shape[HEADS])
    if heads is None or (heads != 1 and not known_equal(heads * marked.repeats, query.shape[HEADS])):
        shown = f"{tensor.shape[HEADS]} heads, {marked.repeats} times each, for {query.shape[HEADS]} query heads"
        return Decline(Reason.PICKS, f"indices have {shown}")
    sizes = [-1, -1, -1, -1]
    for dim in (BATCH, LENGTH):
        if not known_equal(tensor.shape[dim], query.shape[dim]):
            size = constant(query.shape[dim])
            if size is None or not known_equal(tensor.shape[dim], 1):
                return Decline(Reason.PICKS, f"indices are {list(tensor.shape)}, the query {list(query.shape)}")
            sizes[dim] = size
    return indices if sizes == [-1] * 4 else draft("expand", indices, *sizes)


def _rounds(call: SdpaCall, mask: Tensor) -> bool:
    """Return True if autocast casts the mask of the call."""
    dtype = None if call.form else autocast_dtype(call.node, mask.device.type)
    return dtype is not None and dtype != mask.dtype


def _mask_of_picks(call: SdpaCall, marked: Marked, mask: Tensor) -> Node | None:
    """Return the mask to read at the picks, or None if all picks count.

    It is the part of the call's mask that doesn't depend on the indices, or the call's mask if that part is unknown.
    """
    inside = marked.inside
    if isinstance(inside, Node):
        with_inside = dataclasses.replace(call, attn_mask=inside)
        decline = check_mask(with_inside, known_tensor(call.query), known_tensor(call.key))
        return inside if decline is None else call.attn_mask
    return None if inside == (1 if mask.dtype == torch.bool else 0) else call.attn_mask


def _number_of_blocks(kv_length: Size, block: int) -> int | None:
    known = constant(kv_length)
    return None if known is None else ceil_div(known, block)


def _names_all(indices: Node, block: int, origin: Origin, kv_length: Size) -> bool:
    """Return True if a top-k picked all of its candidates, and these are all keys."""
    candidates, count = origin.candidates, known_tensor(indices).shape[-1]
    if candidates is None or not origin.all_in_range or not known_equal(candidates, count):
        return False
    blocks = _number_of_blocks(kv_length, block)
    return known_equal(candidates * block, kv_length) or (blocks is not None and known_equal(candidates, blocks))


def _check_length(picks: Picks) -> Decline | None:
    """Return the reason to read all keys in order, or None. A dynamic number of keys counts as large."""
    count, keys = constant(picks.count), constant(picks.kv_length)
    if count is None or keys is None or keys >= LEAST_KEYS_PER_PICK * count * picks.block:
        return None
    return Decline(Reason.PICKS, f"{picks}: with so few keys it is faster to read all of them in order")


def _computed_from(mask: Node) -> set[Node]:
    """Return the nodes that a mask is computed from, back to numbers that other layers computed."""
    steps = PURE | POINTWISE | CATS | {"repeat_interleave", "pad", "slice", "narrow", "from_local", "to_local"}

    def above(node: Node) -> list[Node]:
        tensor, scatters = tensor_of(node), [x for x in node.users if op_name(x) in IN_PLACE]
        known = tensor is not None and (not tensor.is_floating_point() or op_name(node) in steps | SCATTERS)
        return [*(node.all_input_nodes if known else ()), *(x for x in scatters if argument(x, 0, "self") is node)]

    return reached(mask, above)
