"""Find matches of the latent pass: SDPA over keys and values that a projection makes of latents in every step.

With keys `[c W_uk, rope]` and values `c W_uv` in each head, scores are `(q W_uk) c + q_rope rope` and the output is
`(softmax c) W_uv`: attention can read the latents `c`, which all heads share, and nothing has to be projected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from tatten.ops.latent_validation import WIDEST_ROPE_ON_CUDA
from tatten.ops.layout import BATCH, HEAD_DIM, HEADS, LENGTH
from tatten.ops.validation import widest_on_cuda
from tatten.passes.calls import argument, op_name
from tatten.passes.latent_cost import LatentCost, latent_cost
from tatten.passes.mutation import written_between
from tatten.passes.pieces import Assembly, Piece, pieces_of
from tatten.passes.projection import Projection, is_input, projection_of, same_latents
from tatten.passes.reasons import Decline, Reason
from tatten.passes.sdpa import SdpaCall
from tatten.passes.segments import find_segments
from tatten.passes.stored import Stored, peel_heads, stored_at
from tatten.passes.symbolic import FakeTensor, constant, known_different, known_equal, known_tensor, tensor_of
from tatten.passes.views import Walk, begin_walk


@dataclass(frozen=True)
class LatentSegment:
    """A segment of stored latents, and of the part of the keys that all heads share, or None."""

    latent: Stored
    rope: Stored | None


def shared_segments(latent: Walk, rope: Walk | None, call: Node) -> tuple[LatentSegment, ...]:
    """Return the segments of latents and of rope.

    There are none if no sequences share latents, or if the two have different cuts. Empty segments, such as tokens that
    were not generated yet, are left out.

    Args:
        latent: a walk from the tensor that keys and values are projected from.
        rope: a walk from the part of the keys that heads share, as it is copied into the keys.
        call: the attention, before which the segments must not be written.
    """
    latents = _non_empty_segments(latent)
    ropes: Sequence[Stored | None] = [None] * len(latents) if rope is None else _non_empty_segments(rope)
    if not any(x.shared for x in latents) or len(latents) != len(ropes):
        return ()
    segments = tuple(map(LatentSegment, latents, ropes))
    return segments if all(_is_readable(x, call) for x in segments) else ()


def _non_empty_segments(start: Walk) -> list[Stored]:
    return [x for x in find_segments(start, rows=False) if not known_equal(x.size(LENGTH), 0)]


def _is_readable(segment: LatentSegment, call: Node) -> bool:
    stored = [x for x in (segment.latent, segment.rope) if x is not None]
    same_sizes = all(known_equal(x.size(role), segment.latent.size(role)) for x in stored for role in (BATCH, LENGTH))
    has_keys = known_different(segment.latent.size(LENGTH), 0)
    return same_sizes and has_keys and all(x.rows is None and not x.written_before(call) for x in stored)


@dataclass(frozen=True)
class LatentMatch:
    """An SDPA call that `tatten::latent_attention` can compute.

    Attributes:
        call: the call.
        latent: the tensor that keys and values are projected from.
        keys: the projection that makes each head's part of the keys.
        columns: the columns of keys and query that this part fills.
        values: the projection that makes the values.
        rope: the part of the keys that all heads share, and the columns that it fills; None without one.
        path: the nodes between these tensors and SDPA.
        cost: the estimate of what a rewrite saves; None if sizes are unknown.
        segments: the segments of latents and rope, if sequences share some of them.
        batch_invariant: whether the op is called with `batch_invariant=True`.
    """

    call: SdpaCall
    latent: Stored
    keys: Projection
    columns: Piece
    values: Projection
    rope: tuple[Stored, Piece] | None
    path: frozenset[Node]
    cost: LatentCost | None
    segments: tuple[LatentSegment, ...] = ()
    batch_invariant: bool = False

    @property
    def parts(self) -> tuple[LatentSegment, ...]:
        """The segments, each of which one call of the op reads."""
        return self.segments or (LatentSegment(self.latent, None if self.rope is None else self.rope[0]),)


def match_latents(
    call: SdpaCall, batch_invariant: bool = False, wrapped: tuple[Node, ...] = ()
) -> LatentMatch | Decline | None:
    """Match a call that `check_call` found eligible. Adds no guards.

    Args:
        call: the call, or the local part of it that each rank computes.
        batch_invariant: match even if it doesn't pay, and read shared latents as a copy for each sequence. Otherwise
            the result would depend on the batch.
        wrapped: the nodes between keys and values of `call` and those of SDPA.

    Returns:
        A match, the reason why keys that are joined of two parts are left to other passes, or None for other keys.
    """
    keys = pieces_of(call.key, call.node)
    match = _match(call, keys, wrapped, batch_invariant)
    # Attention of a few queries to states that are not cached looks the same, but isn't declined by this pass.
    return match if keys.path or isinstance(match, LatentMatch) else None


def _match(
    call: SdpaCall, keys: Assembly, wrapped: tuple[Node, ...], batch_invariant: bool
) -> LatentMatch | Decline | None:
    per_head, ropes = [], []
    for piece in keys.pieces:
        end, rope = projection_of(piece.source), peel_heads(piece.source)
        if isinstance(end, Node) and known_equal(rope.size(HEADS), 1):
            ropes.append((rope, piece))
        else:
            per_head.append((end, piece))
    values = projection_of(begin_walk(call.value))
    if len(per_head) != 1 or len(ropes) > 1:
        if keys.obstacle is not None and ropes:
            return keys.obstacle
        pieces = f"keys are {len(per_head)} pieces that heads have for themselves and {len(ropes)} that they share"
        return Decline(Reason.PIECES, pieces) if ropes and isinstance(values, Projection) else None
    if not all(isinstance(tensor_of(x), FakeTensor) for x in (call.query, call.key, call.value)):
        return Decline(Reason.PLACEMENT, "keys are put together of DTensors: expand local latents, and wrap the result")
    projection, columns = per_head[0]
    for name, end in (("keys", projection), ("values", values)):
        if isinstance(end, Node):
            return Decline(Reason.PROJECTION, f"{name} come from `{end}`, not from one linear projection")
    assert isinstance(projection, Projection)
    assert isinstance(values, Projection)
    rope_path = ropes[0][0].path if ropes else ()
    latent = stored_at(projection.latent)
    assert latent is not None
    match = LatentMatch(
        call,
        latent,
        projection,
        columns,
        values,
        ropes[0] if ropes else None,
        frozenset((*wrapped, *keys.path, *projection.path, *values.path, *rope_path)),
        None,
        batch_invariant=batch_invariant,
    )
    decline = _check_projections(match) or _check_tensors(match) or _check_writes(match, keys) or _check_users(match)
    if decline is not None:
        return decline
    query = known_tensor(call.query)
    rope_width = sum(x.width for _, x in ropes)
    cost = latent_cost(query, match.latent, columns.width, rope_width, values.hi - values.lo, call.picks)
    if cost is not None and not cost.pays and not batch_invariant:
        return Decline(Reason.LATENT_SMALL, str(cost))
    rope_source = ropes[0][1].source if ropes else None
    segments = () if batch_invariant else shared_segments(projection.latent, rope_source, call.node)
    match = dataclasses.replace(match, cost=cost, segments=segments)
    read = [x.path for segment in match.parts for x in (segment.latent, segment.rope) if x is not None]
    return dataclasses.replace(match, path=match.path.union(*read, values.latent.path))


def _check_projections(match: LatentMatch) -> Decline | None:
    """Return the reason if keys and values are not projected from the same latents by plain weights, or None."""
    for name, projection in (("keys", match.keys), ("values", match.values)):
        product, weight = projection.product, tensor_of(projection.weight)
        if op_name(product) == "linear" and argument(product, 2, "bias") is not None:
            return Decline(Reason.PROJECTION, f"`{product}`, which makes the {name}, adds a bias")
        if not is_input(projection.weight):
            return Decline(Reason.PROJECTION, f"the weight that makes the {name} is computed by `{projection.weight}`")
        if not isinstance(weight, FakeTensor):
            return Decline(Reason.PROJECTION, f"the weight that makes the {name} is a {type(weight).__name__}")
    keys, values = match.keys.latent, match.values.latent
    if not same_latents(keys, values):
        return Decline(Reason.PROJECTION, f"keys are made of `{keys.node}`, values of `{values.node}`")
    return None


def _check_tensors(match: LatentMatch) -> Decline | None:
    """Return the reason why the op does not take these tensors, or None."""
    query, projections = known_tensor(match.call.query), (match.keys, match.values)
    nodes = [x for p in projections for x in (p.latent.node, p.weight, p.product)]
    tensors = [tensor_of(x) for x in (*nodes, *([] if match.rope is None else [match.rope[0].base]))]
    dtypes = {x.dtype for x in (query, *tensors) if x is not None}
    if len(dtypes) != 1:
        return Decline(Reason.DTYPE, "query, latents, rope, weight and keys are " + ", ".join(map(str, dtypes)))
    if query.dtype == torch.float16:
        return Decline(Reason.DTYPE, "query times weight may be beyond the range of float16, where keys are not")
    if len({x.device for x in (query, *tensors) if x is not None}) != 1:
        return Decline(Reason.DEVICE, "query, latents, rope and weight are on several devices")
    if any(not known_equal(query.shape[HEADS], p.heads) for p in projections):
        heads = f"query has {query.shape[HEADS]} heads, keys {match.keys.heads}, values {match.values.heads}"
        return Decline(Reason.HEADS, heads)
    if query.device.type == "cuda":
        rank, width = match.latent.size(HEAD_DIM), 0 if match.rope is None else match.rope[1].width
        most = widest_on_cuda(query.dtype)
        if not 1 <= (constant(rank) or 0) <= most or width > WIDEST_ROPE_ON_CUDA:
            takes = f"the CUDA kernel takes constants up to {most} and {WIDEST_ROPE_ON_CUDA}"
            return Decline(Reason.HEAD_DIM, f"latents have rank {rank}, their rope {width} columns; {takes}")
    stored = [match.latent, *([] if match.rope is None else [match.rope[0]])]
    if not all(known_equal(x.size(BATCH), query.shape[BATCH]) for x in stored):
        sizes = ", ".join(str(x.size(BATCH)) for x in stored)
        return Decline(Reason.BATCH, f"query has batch {query.shape[BATCH]}, latents and rope {sizes}")
    if not known_different(match.latent.size(LENGTH), 0):
        return Decline(Reason.EMPTY, f"there are {match.latent.size(LENGTH)} latents, and the op takes at least 1")
    return None


def _check_users(match: LatentMatch) -> Decline | None:
    """Return the reason if anything but this attention uses the projected tensors, or None."""
    shared = () if match.rope is None else match.rope[0].path
    for node in sorted(match.path.difference(shared)):
        for user in node.users:
            if user not in match.path and user not in match.call.vanishing:
                return Decline(Reason.PROJECTION_USED, f"`{user}` uses `{node}`, which is projected from latents")
    return None


def _check_writes(match: LatentMatch, keys: Assembly) -> Decline | None:
    """Return the reason if a tensor may be written between the program's read and the op's, or None."""
    if keys.obstacle:
        return keys.obstacle
    call = match.call.node
    for projection in (match.keys, match.values):
        read = [tensor_of(x) for x in (projection.latent.node, projection.weight, *projection.path)]
        writer = written_between([x for x in read if x is not None], min(projection.path), call)
        if writer is not None:
            return Decline(Reason.WRITTEN, f"latents, a weight or their product is written by `{writer}`")
    if match.rope is not None:
        rope, piece = match.rope
        source = tensor_of(piece.source.node)
        writer = rope.written_before(call)
        if writer is None and not rope.path and source is not None:
            writer = written_between([source], min(keys.path), call)
        if writer is not None:
            return Decline(Reason.WRITTEN, f"the part of the keys that heads share is written by `{writer}`")
    return None
