"""The tree pass: SDPA over DTensors whose sequence is sharded becomes local attention and a merge over ranks.

`find_local` reads the call as a call on local parts, which the other passes match as plain tensors. The state of the op
is then merged over the mesh dims that shard the sequence.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node

from tatten.ops.distributed.collectives import group_size_and_rank
from tatten.ops.distributed.tree_merge import fastest
from tatten.ops.layout import BATCH, HEAD_DIM, HEADS, LENGTH
from tatten.ops.states import accumulator_dtype
from tatten.passes.calls import op_name
from tatten.passes.drafts import Drafting
from tatten.passes.local import FromLocal, Share, local_mask, stripe
from tatten.passes.masks import Masks
from tatten.passes.reasons import Decline, Reason
from tatten.passes.replace import Inserter, item, with_strides_of
from tatten.passes.sdpa import SDPA_TARGETS, SdpaCall
from tatten.passes.segments import find_segments
from tatten.passes.stored import Stored
from tatten.passes.symbolic import FakeTensor, in_memory, known_tensor, tensor_of

if TYPE_CHECKING:
    from tatten.ops.distributed.placement import PlacedSegment, Sharding


def find_local(call: SdpaCall, masks: Masks) -> SdpaCall | Decline | None:
    """Return a call on DTensors as a call on local parts, whose states are merged over ranks.

    Returns:
        The call, the reason why it is left to PyTorch, or None for plain tensors and DTensors of other placements.
    """
    query, key, value, mask = (tensor_of(x) for x in (call.query, call.key, call.value, call.attn_mask))
    if query is None or key is None or value is None or (mask is None) != (call.attn_mask is None):
        return None
    not_fake = [x for x in (query, key, value) if not isinstance(x, FakeTensor)]  # hasattr is slow on a fake tensor
    if not any(hasattr(x, "placements") for x in not_fake):
        return None
    from tatten.ops.distributed.placement import find_segment_sharding, find_sharding  # DTensor takes seconds to import

    sharding = find_sharding(query, key, value, mask)
    if sharding is not None:
        if (decline := _check(call, sharding)) is not None:
            return decline
        local_key, local_value = map(masks.drafts.local_part, (call.key, call.value))
        return dataclasses.replace(_local(call, sharding, masks), key=local_key, value=local_value)
    keys, values = (find_segments(x, vanishing=call.vanishing) for x in (call.key, call.value))
    if len(keys) == 1 or len(keys) != len(values):
        return None
    result = known_tensor(call.result)
    segment_sharding = find_segment_sharding(query, result, _placed(keys), _placed(values), mask)
    if isinstance(segment_sharding, str):
        return Decline(Reason.PLACEMENT, segment_sharding)
    shares_of_keys, shares_of_values = (
        tuple(_share(x, segment_sharding, call, masks) for x in segments) for segments in (keys, values)
    )
    local = dataclasses.replace(
        _local(call, segment_sharding, masks),
        key=masks.drafts.result(_with_full_length(key)),
        value=masks.drafts.result(_with_full_length(value)),
        shares=(shares_of_keys, shares_of_values),
    )
    return _check(call, segment_sharding) or local


def _with_full_length(tensor: Any) -> Tensor:
    """Return an empty tensor like the local part of keys or values, but with the full length of the sequence."""
    local = tensor.to_local()
    full_length: Tensor = local.new_empty((*local.shape[:LENGTH], tensor.shape[LENGTH], *local.shape[LENGTH + 1 :]))
    return full_length


def _placed(segments: tuple[Stored, ...]) -> list[PlacedSegment]:
    return [(tensor, x.dims) for x in segments if (tensor := tensor_of(x.base)) is not None]


def _check(call: SdpaCall, sharding: Sharding) -> Decline | None:
    """Return the reason why attention that isn't SDPA can't be merged, or None.

    `find_sharding` has checked everything else.
    """
    from tatten.ops.distributed.placement import belongs_to_heads

    result, sinks = tensor_of(call.result), tensor_of(call.sinks)
    placed = getattr(result, "placements", None)
    if call.node.target not in SDPA_TARGETS and placed != sharding.out:
        return Decline(Reason.PLACEMENT, f"the result is placed as {placed}, query as {sharding.out}")
    if sinks is not None and not belongs_to_heads(sinks, sharding):
        placed = getattr(sinks, "placements", None)
        return Decline(Reason.PLACEMENT, f"sinks are placed as {placed}, query as {sharding.out}")
    return None


def _local(call: SdpaCall, sharding: Sharding, masks: Masks) -> SdpaCall:
    """Return the call with drafts for the local parts of query, mask and sinks."""
    drafts = masks.drafts
    mask = None if call.attn_mask is None else local_mask(drafts, masks.first_view(call.attn_mask), sharding)
    sinks, mesh = call.sinks, sharding.mesh
    if sinks is not None and any(mesh.get_local_rank(dim) != 0 for dim in sharding.merge_dims):
        sinks = None  # sinks count once, on the first rank
    elif sinks is not None and not isinstance(tensor_of(sinks), FakeTensor):
        sinks = drafts.local_part(sinks)
    query = drafts.local_part(call.query)
    return dataclasses.replace(call, query=query, attn_mask=mask, sinks=sinks, sharding=sharding)


def _share(stored: Stored, sharding: Sharding, call: SdpaCall, masks: Masks) -> Share:
    """Draft this rank's part of a segment.

    A segment that is replicated over a mesh dim that shards other segments is divided among its ranks, so that each key
    counts once.
    """
    tensor: Any = tensor_of(stored.base)
    mesh, ranks, rank, chunks = sharding.mesh, 1, 0, []
    for dim in sorted(sharding.merge_dims):
        size, index = mesh.size(dim), mesh.get_local_rank(dim)
        if tensor.placements[dim].is_replicate():
            ranks, rank = ranks * size, rank * size + index
        if tensor.placements[dim].is_shard():
            chunks.append((size, index))
    drafts, draft = masks.drafts, Drafting(masks.drafts, call.source_node)
    local = dataclasses.replace(stored, base=drafts.local_part(stored.base)).as_operand(draft)
    base = stripe(draft, local, LENGTH, ranks, rank)
    part = dataclasses.replace(stored, base=base, dims=(BATCH, HEADS, LENGTH, HEAD_DIM), overlaid=False)
    return Share(stored, part, tuple(chunks), (ranks, rank))


def merge_note(call: SdpaCall) -> str:
    """Return the remark on the merge for the report; empty without one."""
    if call.sharding is None:
        return ""
    names, dims = call.sharding.mesh.mesh_dim_names, call.sharding.merge_dims
    shown = ", ".join(repr(names[dim]) if names else str(dim) for dim in dims)
    return f"local, then merged over mesh dim{'s' * (len(dims) > 1)} {shown}"


def merged_output(call: SdpaCall, state: Node, out: Node | None = None) -> Node:
    """Insert a merge over each mesh dim, the last (inner) one first, and return the output, placed as SDPA's output.

    `out` replaces the output in the state. Users that only take the local part of SDPA's DTensor get it directly. If
    all users do, no DTensor is made.
    """
    graph, invariant, sharding = state.graph, bool(state.kwargs.get("batch_invariant")), call.sharding
    assert sharding is not None
    like = in_memory(tensor_of(call.result))
    lse = like.new_empty(like.shape[:-1], dtype=accumulator_dtype(like.dtype))
    with graph.inserting_before(call.node):
        out = item(state, 0) if out is None else out
        for group in sharding.groups:
            ranks, rank = group_size_and_rank(group)
            strategy = fastest(like, lse, group, ranks, batch_invariant=invariant)
            args = out, item(state, 1), group, ranks, rank, strategy
            merge = torch.ops.tatten.tree_merge.default
            state = graph.call_function(merge, args, {"batch_invariant": True} if invariant else None)
            out = item(state, 0)
        out.meta.update({**call.source_node.meta, "example_value": like})
        out = with_strides_of(Inserter(call.source_node), out, like)
        dtensor = next(node for node, draft in call.replaced.items() if draft is call.result)
        for user in list(dtensor.users):
            if op_name(user) == "to_local" and user.args == (dtensor,) and not user.kwargs:
                user.replace_all_uses_with(out)
                graph.erase_node(user)
        if dtensor.users:
            out = graph.call_function(FromLocal(sharding), (out,))
            out.meta.update(dtensor.meta)
    return out
