"""The latent pass finds: SDPA over keys and values that one projection expands from latents in every step.

With keys `[c W_uk, rope]` and values `c W_uv` in each head, scores are `(q W_uk) c + q_rope rope` and the output is
`(softmax c) W_uv`: attention can read the latents `c`, which all heads share, and nothing has to be expanded.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch.fx import Node

from tatten.ops.latent_validation import WIDEST_ROPE_ON_CUDA
from tatten.ops.layout import BATCH, HEAD_DIM, HEADS, LENGTH
from tatten.ops.validation import widest_on_cuda
from tatten.passes.calls import argument, op_name
from tatten.passes.latent_cost import LatentCost, latent_cost
from tatten.passes.latent_segments import LatentSegment, shared_segments
from tatten.passes.mutation import written_between
from tatten.passes.pieces import Assembly, Piece, columns_of, pieces_of
from tatten.passes.reasons import Decline, Reason
from tatten.passes.sdpa import SdpaCall
from tatten.passes.stored import Stored, peel_heads
from tatten.passes.symbolic import FakeTensor, constant, known_different, known_equal, known_shape, tensor_of
from tatten.passes.views import COPIES, RESHAPES, Walk, begin, source_of, step_back


@dataclass(frozen=True)
class Projection:
    """Columns `lo` to `hi` of each head of `linear`, as `[batch, heads, length, hi - lo]`.

    `linear` multiplies latents by a weight `[heads * width, rank]`; `path` are the nodes from where this was found on.
    """

    linear: Node
    heads: int
    width: int
    lo: int
    hi: int
    path: tuple[Node, ...]

    @property
    def latent(self) -> Node:
        return argument(self.linear, 0, "input")  # type: ignore[no-any-return]

    @property
    def weight(self) -> Node:
        return argument(self.linear, 1, "weight")  # type: ignore[no-any-return]


@dataclass(frozen=True)
class LatentMatch:
    """An SDPA call that `tatten::latent_attention` answers.

    Attributes:
        latent: what keys and values are projected from.
        keys: the projection that makes what each head's keys have of their own.
        columns: those of the keys, and of the query, that this fills.
        values: the projection that makes the values.
        rope: what all heads' keys have in common, and the columns that it fills; None if there is nothing.
        path: the nodes between these and SDPA.
        cost: what a rewrite saves; None if sizes are unknown.
        segments: those of the latents and their rope, if sequences share some of them.
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

    @property
    def parts(self) -> tuple[LatentSegment, ...]:
        """What is attended to, each as one call of the op."""
        return self.segments or (LatentSegment(self.latent, None if self.rope is None else self.rope[0]),)


def match_latents(call: SdpaCall, wrapped: tuple[Node, ...] = ()) -> LatentMatch | Decline | None:
    """Match a call that `check_call` found eligible. Adds no guards and changes nothing.

    Args:
        call: the call, or what each rank computes of it.
        wrapped: the nodes that are between keys and values of `call` and those of SDPA.

    Returns:
        A match, None where keys are not put together of a head's own part and one that all heads share, or why such
        keys are left to the other passes.
    """
    query, key, value = (tensor_of(x) for x in (call.query, call.key, call.value))
    keys = pieces_of(call.key, call.node)
    if not keys.path:
        return None
    own, ropes = [], []
    for piece in keys.pieces:
        found, rope = projection_of(piece.source), peel_heads(piece.source)
        if isinstance(found, Node) and known_equal(rope.size(HEADS), 1):
            ropes.append((rope, piece))
        else:
            own.append((found, piece))
    trouble = Decline(Reason.WRITTEN, f"keys are put together of pieces, and {keys.trouble}")
    if len(own) != 1 or len(ropes) > 1:
        return trouble if keys.trouble and ropes else None
    if not all(isinstance(x, FakeTensor) for x in (query, key, value)):
        return Decline(Reason.PLACEMENT, "keys are put together of DTensors: expand local latents, and wrap the result")
    (projection, columns), values = own[0], projection_of(call.value)
    for name, end in (("keys", projection), ("values", values)):
        if isinstance(end, Node):
            return Decline(Reason.PROJECTION, f"{name} come from `{end}`, not from one linear projection")
    assert isinstance(projection, Projection)
    assert isinstance(values, Projection)
    rope_path = ropes[0][0].path if ropes else ()
    match = LatentMatch(
        call,
        _stored(projection.latent),
        projection,
        columns,
        values,
        ropes[0] if ropes else None,
        frozenset((*wrapped, *keys.path, *projection.path, *values.path, *rope_path)),
        None,
    )
    decline = _check_projections(match) or _check_tensors(match) or _check_writes(match, keys) or _check_users(match)
    if decline is not None:
        return decline
    assert query is not None
    cost = latent_cost(query, match.latent, columns.width, sum(x.width for _, x in ropes), values.hi - values.lo)
    if cost is not None and not cost.pays:
        return Decline(Reason.LATENT_SMALL, str(cost))
    segments = shared_segments(projection.latent, ropes[0][1].source if ropes else None, call.node)
    read = (x for segment in segments for x in (segment.latent, segment.rope) if x is not None)
    path = match.path.union(*(x.path for x in read))
    return dataclasses.replace(match, cost=cost, segments=segments, path=path)


def projection_of(node: Node) -> Projection | Node:
    """Walk back from `[batch, heads, length, head_dim]` to a linear projection; the node where that ends if to none."""
    walk: Walk | None = begin(node)
    path: tuple[Node, ...] = ()
    lo, end = 0, node
    while walk is not None and not walk.stretched and not walk.rows:
        end = walk.here
        columns = columns_of(end)
        if columns is None:
            found = _split_into_heads(walk)
            if found is not None:
                width = constant(tensor_of(node).shape[3])  # type: ignore[union-attr]
                linear, heads, whole, between = found
                path = (*path, *walk.path, *between)
                return linear if width is None else Projection(linear, heads, whole, lo, lo + width, path)
            walk = step_back(walk)
        else:
            source, dim, first, nodes = columns
            if walk.parts[dim] != (HEAD_DIM,):
                break
            lo, path, walk = lo + first, (*path, *nodes), walk.step(source, walk.parts)
    return end


def _split_into_heads(walk: Walk) -> tuple[Node, int, int, tuple[Node, ...]] | None:
    """The linear node whose output was reshaped to the tensor at hand, `[batch, length, heads, width]`.

    Returns it with heads, width and the nodes from there to here.
    """
    node, split = walk.here, tensor_of(walk.here)
    if op_name(node) not in RESHAPES or walk.parts != ((BATCH,), (LENGTH,), (HEADS,), (HEAD_DIM,)) or split is None:
        return None
    path, source = [node], source_of(node)
    while source is not None and op_name(source) in COPIES and (back := step_back(begin(source))) is not None:
        path.append(source)
        source = back.here
    flat = tensor_of(source)
    if source is None or op_name(source) != "linear" or flat is None:
        return None
    batch, length, *last = split.shape
    heads, width = map(constant, last)
    if heads is None or width is None:
        return None
    shapes = (batch, length, heads * width), (batch, 1, length, heads * width)
    return (source, heads, width, (*path, source)) if any(known_shape(flat.shape, x) for x in shapes) else None


def _stored(latent: Node) -> Stored:
    tensor = tensor_of(latent)
    has_heads = tensor is not None and tensor.dim() == 4
    return Stored(latent, (BATCH, HEADS, LENGTH, HEAD_DIM) if has_heads else (0, None, 1, 2))


def _check_projections(match: LatentMatch) -> Decline | None:
    """Return the reason why keys and values are not what plain weights make of the same latents, or None."""
    for name, projection in (("keys", match.keys), ("values", match.values)):
        if argument(projection.linear, 2, "bias") is not None:
            return Decline(Reason.PROJECTION, f"`{projection.linear}`, which makes the {name}, adds a bias")
        weight = tensor_of(projection.weight)
        if not isinstance(projection.weight, Node) or projection.weight.op not in ("placeholder", "get_attr"):
            return Decline(Reason.PROJECTION, f"the weight that makes the {name} is computed by `{projection.weight}`")
        if not isinstance(weight, FakeTensor):
            return Decline(Reason.PROJECTION, f"the weight that makes the {name} is a {type(weight).__name__}")
    if not isinstance(match.keys.latent, Node) or match.keys.latent is not match.values.latent:
        return Decline(Reason.PROJECTION, f"keys are made of `{match.keys.latent}`, values of `{match.values.latent}`")
    return None


def _check_tensors(match: LatentMatch) -> Decline | None:
    """Return the reason why the op does not take these tensors, or None."""
    query = tensor_of(match.call.query)
    projections = match.keys, match.values
    nodes = [x for p in projections for x in (p.latent, p.weight, p.linear)]
    tensors = [tensor_of(x) for x in (*nodes, *([] if match.rope is None else [match.rope[0].base]))]
    assert query is not None
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
    """Return the reason if anything but this attention uses what was expanded, which then stays; or None."""
    shared = () if match.rope is None else match.rope[0].path
    for node in sorted(match.path.difference(shared)):
        for user in node.users:
            if user not in match.path and user is not match.call.node:
                return Decline(Reason.EXPANDED, f"`{user}` uses `{node}`, which is expanded from latents")
    return None


def _check_writes(match: LatentMatch, keys: Assembly) -> Decline | None:
    """Return the reason why the op would not read what SDPA does, or None."""
    if keys.trouble:
        return Decline(Reason.WRITTEN, f"keys are put together of pieces, and {keys.trouble}")
    call = match.call.node
    for projection in (match.keys, match.values):
        read = [tensor_of(x) for x in (projection.latent, projection.weight, projection.linear, *projection.path)]
        writer = written_between([x for x in read if x is not None], projection.linear, call)
        if writer is not None:
            return Decline(Reason.WRITTEN, f"latents, weight or what is expanded is written by `{writer}`")
    if match.rope is not None:
        rope, piece = match.rope
        source = tensor_of(piece.source)
        writer = rope.written_before(call)
        if writer is None and not rope.path and source is not None:
            writer = written_between([source], min(keys.path), call)
        if writer is not None:
            return Decline(Reason.WRITTEN, f"the part of the keys that heads share is written by `{writer}`")
    return None
