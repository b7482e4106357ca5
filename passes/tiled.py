"""Grouped heads in tiled order: query head h reads kv head `h % kv_heads`, as after `k.repeat(1, n, 1, 1)`.

The ops read kv head `h // n`. So query heads are permuted, and the result is permuted back. Both are small, while keys
and values are read before they are tiled.
"""

from __future__ import annotations

import dataclasses
import math

from torch.fx import Node

from tatten.ops.layout import HEADS
from tatten.passes.drafts import Drafting
from tatten.passes.masks import Masks
from tatten.passes.replace import with_strides_of
from tatten.passes.sdpa import SdpaCall
from tatten.passes.stored import Stored
from tatten.passes.symbolic import FakeTensor, constant, known_equal, tensor_of
from tatten.passes.views import ROLES, Walk, begin_walk, walks_back


def untiled_call(call: SdpaCall, masks: Masks) -> SdpaCall | None:
    """Return a call with tiled keys and values as a call with permuted query heads, or None for another call.

    Head j of the tiled tensors is head `(j // repeats) % kv_heads` of the tensors before. Keys and values must have the
    same order.
    """
    query, tiled, mask = (tensor_of(x) for x in (call.query, call.key, call.attn_mask))
    result = tensor_of(call.result)
    if not isinstance(query, FakeTensor) or not isinstance(tiled, FakeTensor) or query.dim() != 4 or tiled.dim() != 4:
        return None
    if call.log_sums or tensor_of(call.value) is None or not isinstance(result, FakeTensor):
        return None
    untiled_key, untiled_value = _untiled(call.key), _untiled(call.value)
    if untiled_key is None or untiled_value is None or untiled_key[1:] != untiled_value[1:]:
        return None
    key, tiles, repeats, kv_heads = untiled_key
    value = untiled_value[0]
    q_heads, heads = constant(query.shape[HEADS]), tiles * repeats * kv_heads
    if q_heads is None or q_heads % heads or (q_heads != heads and call.enable_gqa is not True):
        return None
    if mask is not None and mask.dim() > 2 and not any(known_equal(mask.shape[-3], n) for n in (1, q_heads)):
        return None
    if any(x.written_before(call.node) is not None for x in (key, value)):
        return None
    draft = Drafting(masks.drafts, call.source_node)
    program_order = tiles, kv_heads, q_heads // (tiles * kv_heads)
    op_order = kv_heads, tiles, q_heads // (tiles * kv_heads)
    attn_mask = call.attn_mask
    if mask is not None and mask.dim() > 2 and not known_equal(mask.shape[-3], 1):
        attn_mask = _swapped(draft, masks.first_view(attn_mask), mask.dim() - 3, program_order)
    permuted_result = masks.drafts.result(result.new_empty(result.shape, requires_grad=result.requires_grad))
    out = with_strides_of(draft, _swapped(draft, permuted_result, HEADS, op_order), result)
    return dataclasses.replace(
        call,
        query=_swapped(draft, call.query, HEADS, program_order),
        key=_repeated(draft, key, tiles * repeats),
        value=_repeated(draft, value, tiles * repeats),
        attn_mask=attn_mask,
        sinks=None if call.sinks is None else _swapped(draft, call.sinks, 0, program_order),
        path=(*call.path, *key.path, *value.path),
        draft_result=permuted_result,
        outputs=tuple((x, masks.drafts.substitute(output, call.result, out)) for x, output in call.replaced.items()),
        remarks=(f"queries are permuted: {tiles} tiles of {kv_heads} kv heads", *call.remarks),
    )


def _untiled(node: Node) -> tuple[Stored, int, int, int] | None:
    """Return the tensor of rank 4 before its heads were tiled, or None.

    Also return the number of tiles, the repeats within a tile, and the number of heads before.
    """
    tensor = tensor_of(node)
    if tensor is None or tensor.dim() != 4:
        return None
    for walk in walks_back(begin_walk(node)):
        untiled = tensor_of(walk.node)
        if walk.rows or any(part[0] != HEADS for part, _ in walk.stretched):
            return None
        dims = _dims(walk)
        if untiled is None or dims is None or not walk.stretched:
            continue
        head_part, heads = walk.parts[dims[HEADS]], constant(untiled.shape[dims[HEADS]])
        if head_part is None or heads is None:
            continue
        tiles = constant(math.prod(n for part, n in walk.stretched if part < head_part))
        repeats = constant(math.prod(n for part, n in walk.stretched if part > head_part))
        if tiles is not None and repeats is not None and tiles > 1 and heads > 1:
            return Stored(walk.node, dims, path=walk.path), tiles, repeats, heads
    return None


def _dims(walk: Walk) -> tuple[int, ...] | None:
    """Return the dim of each role, or None unless the tensor at the end of a walk has one dim for each."""
    roles = [None if part is None else part[0] for part in walk.parts]
    if len(roles) != len(ROLES) or any(roles.count(role) > 1 for role in ROLES):
        return None
    spare = (dim for dim, role in enumerate(roles) if role is None)
    return tuple(roles.index(role) if role in roles else next(spare) for role in ROLES)


def _swapped(draft: Drafting, node: Node, dim: int, sizes: tuple[int, int, int]) -> Node:
    """Draft `node` with the first two of three factors of a dim swapped."""
    return draft("flatten", draft("transpose", draft("unflatten", node, dim, sizes), dim, dim + 1), dim, dim + 2)


def _repeated(draft: Drafting, stored: Stored, times: int) -> Node:
    """Draft a key or value with each head repeated, as by `repeat_interleave`."""
    node = stored.base
    if stored.dims != tuple(ROLES):
        node = draft("permute", node, *stored.dims)
    return draft("flatten", draft("expand", draft("unsqueeze", node, 2), -1, -1, times, -1, -1), 1, 2)
