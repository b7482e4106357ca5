"""Apply the latent pass: SDPA over projected latents becomes attention to the latents.

The keys' weight then multiplies the query, and the values' weight the output. Both are views of the model's weights.
Each product is a `bmm` over heads, or `tatten::project_heads`, which rounds less. `matmul` would copy the weight for
each sequence.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from tatten.ops.cuda.gpu import has_wgmma
from tatten.ops.cuda.tuning import gpu_rates
from tatten.ops.latent_validation import FEW_QUERIES_ON_CUDA
from tatten.ops.layout import BATCH, HEAD_DIM, HEADS, LENGTH
from tatten.ops.states import accumulator_dtype
from tatten.passes.autocast import autocast_dtype
from tatten.passes.indices import insert_indices
from tatten.passes.latents import LatentMatch
from tatten.passes.masks import Masks
from tatten.passes.pieces import Piece
from tatten.passes.projection import Projection
from tatten.passes.query import QueryParts
from tatten.passes.replace import Inserter, insert_op, scale_of
from tatten.passes.sdpa import SdpaCall
from tatten.passes.symbolic import constant, known_at_most, known_tensor, tensor_of


def apply_latents(match: LatentMatch, masks: Masks, parts: QueryParts) -> tuple[Node, Node]:
    """Insert attention to latents before SDPA.

    Args:
        match: the match.
        masks: the masks and drafts of the graph.
        parts: the tensors that the query was concatenated of, which are read directly.

    Returns:
        The state of the op, and its output multiplied by the values' weight.
    """
    call = masks.cast(match.call)
    query = known_tensor(call.query)
    insert = Inserter(call.source_node)
    with call.node.graph.inserting_before(call.node):
        q_nope = _columns(insert, call.query, match.columns, parts)
        unrounded = _keeps_float32(match, query)
        if _uses_project_heads(query) and (unrounded or _is_few_rows(query)):
            weight = insert("transpose", _weight(insert, match.keys), 1, 2)
            out_dtype = torch.float32 if unrounded else query.dtype
            q_latent = insert(torch.ops.tatten.project_heads.default, q_nope, weight, out_dtype)
        else:
            rows = insert(torch.bmm, _rows(insert, q_nope), _weight(insert, match.keys))
            q_latent = _heads(insert, rows, call.query)
        q_rope = None if match.rope is None else _columns(insert, call.query, match.rope[1], parts)
    width = max(columns.hi for columns in (match.columns, *([] if match.rope is None else match.rope[1:])))
    scale = width**-0.5 if call.scale is None else scale_of(call)
    states = _attend(match, call, masks, (q_latent, q_rope), scale, accumulator_dtype(query.dtype))
    with call.node.graph.inserting_before(call.node):
        state = _merge(insert, states)
        sums = insert(operator.getitem, state, 0)
        if _uses_project_heads(query):
            return state, insert(torch.ops.tatten.project_heads.default, sums, _weight(insert, match.values))
        rows = _values(insert, sums, match.values, query, autocast_dtype(call.node, query.device.type))
        return state, insert("contiguous", _heads(insert, rows, call.query))


def _uses_project_heads(query: Tensor) -> bool:
    """Return True if `tatten::project_heads` multiplies queries of this kind with a weight."""
    return query.device.type == "cuda" and query.dtype == torch.bfloat16


def _is_few_rows(query: Tensor) -> bool:
    """Return True if `project_heads` multiplies the queries of a head faster than `bmm`."""
    rows = (constant(query.shape[BATCH]) or 1) * query.shape[LENGTH]
    return known_at_most(rows, gpu_rates(query.device).project_most_rows)


def _keeps_float32(match: LatentMatch, query: Tensor) -> bool:
    """Return True if queries go to attention in float32.

    On Hopper a few float32 queries take no more time, unless sequences share latents.
    """
    few = known_at_most(query.shape[HEADS] * query.shape[LENGTH], FEW_QUERIES_ON_CUDA)
    return few and not match.segments and has_wgmma(query.device)


def _columns(insert: Inserter, query: Node, piece: Piece, parts: QueryParts) -> Node:
    """Return the query's columns for a piece of the keys: one of its `parts`, or an inserted view."""
    return parts.get((piece.lo, piece.hi)) or insert("narrow", query, HEAD_DIM, piece.lo, piece.width)


def _attend(
    match: LatentMatch,
    call: SdpaCall,
    masks: Masks,
    queries: tuple[Node, Node | None],
    scale: Any,
    wide: torch.dtype,
) -> list[Node]:
    """Insert attention to all latents, or to each segment of them, and return the states."""
    latents = [x.latent for x in match.parts]
    columns, picks = masks.columns(call, latents), insert_indices(call, latents, masks.drafts)
    states, variant = [], call.variant
    for segment, mask, picks_of_segment in zip(match.parts, columns, picks, strict=True):
        stored = segment.latent if match.segments else None
        latent = masks.as_operand(segment.latent, call)
        key_rope = None if segment.rope is None else masks.as_operand(segment.rope, call)
        kwargs = {"scale": scale, "block_mask": masks.block_mask(call, mask, stored), "out_dtype": wide, **variant}
        if match.batch_invariant:
            kwargs["batch_invariant"] = True
        kwargs |= picks_of_segment
        variant.pop("sinks", None)  # only the first segment counts them
        args = (*queries, latent, key_rope, mask)
        states.append(insert_op(call, torch.ops.tatten.latent_attention.default, args, kwargs))
    return states


def _merge(insert: Inserter, states: list[Node]) -> Node:
    """Insert the merge of states, if there are several."""
    if len(states) == 1:
        return states[0]
    parts = [[insert(operator.getitem, state, i) for state in states] for i in range(2)]
    return insert(torch.ops.tatten.merge_states.default, *(insert(torch.stack, x) for x in parts))


def _values(insert: Inserter, sums: Node, values: Projection, like: Tensor, autocast: torch.dtype | None) -> Node:
    """Insert the product of sums over latents with the values' weight, `[heads, rows, head_dim]`.

    For values in 16 bits, on a CPU only, sums and product are in float32. Autocast would round the sums, so under it
    they are split into their upper 16 bits and the remainder, and both are multiplied.
    """
    weight, wide = insert("transpose", _weight(insert, values), 1, 2), accumulator_dtype(like.dtype)
    rows = _rows(insert, sums)
    if wide == like.dtype:
        return insert(torch.bmm, rows, weight)
    if autocast is None:
        return insert("to", insert(torch.bmm, rows, insert("to", weight, wide)), like.dtype)
    # Not `rows - rows.to(torch.bfloat16)`: Inductor drops conversions when it fuses ops, and the result would be 0.
    upper = insert("view", insert(operator.and_, insert("view", rows, torch.int32), ~0xFFFF), wide)
    high, low = (insert("to", x, like.dtype) for x in (upper, insert(operator.sub, rows, upper)))
    return insert(torch.baddbmm, insert(torch.bmm, low, weight), high, weight)


def _weight(insert: Inserter, projection: Projection) -> Node:
    """Insert the view `[heads, columns, rank]` of a projection's weight."""
    tensor, node = tensor_of(projection.weight), projection.weight
    if tensor is not None and tensor.requires_grad:  # SDPA's result doesn't, as the program ran under no_grad
        node = insert("detach", node)
    if projection.order != tuple(range(len(projection.order))):
        node = insert("permute", node, projection.order)
    heads = node if len(projection.order) == 3 else insert("unflatten", node, 0, (projection.heads, projection.width))
    return insert("narrow", heads, 1, projection.lo, projection.hi - projection.lo)


def _rows(insert: Inserter, x: Node) -> Node:
    """Insert `[heads, batch * q_len, n]` of `[batch, heads, q_len, n]`."""
    return insert("flatten", insert("transpose", x, 0, 1), 1, 2)


def _heads(insert: Inserter, rows: Node, query: Node) -> Node:
    """Insert `[batch, heads, q_len, n]` of `[heads, batch * q_len, n]`, for the batch and q_len of a query."""
    fixed = constant(known_tensor(query).shape[LENGTH])
    q_len = insert("size", query, LENGTH) if fixed is None else fixed
    return insert("transpose", insert("unflatten", rows, 1, (-1, q_len)), 0, 1)
