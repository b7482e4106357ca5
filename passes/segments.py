"""Segments of keys or values along the sequence, each stored once for several sequences or once for each.

`torch.cat` over the sequence, at any depth, makes a list of segments. `tatten.passes.views` undoes repeats of rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from torch.fx import Node

from tatten.ops.layout import BATCH, LENGTH
from tatten.passes.calls import argument, op_name
from tatten.passes.drafts import dtensor_of, local_beside
from tatten.passes.local import local_input
from tatten.passes.mutation import writes
from tatten.passes.op_names import CATS
from tatten.passes.stored import Stored, peel_heads, stored_among, stored_at, walk_on
from tatten.passes.symbolic import in_memory, known_equal, known_tensor, tensor_of
from tatten.passes.views import Walk, begin, way_back

# A `cat` nested deeper than this is read as one tensor: a loop that appends to its keys nests one per step.
MAX_DEPTH = 8


Vanishing = frozenset[Node]


def find_segments(start: Node | Walk, rows: bool = True, vanishing: Vanishing = frozenset()) -> tuple[Stored, ...]:
    """The segments of SDPA's key or value, in order.

    The local part of a DTensor is read as the graph made it, if it did, else as one segment.

    Args:
        start: SDPA's key or value, or a walk to it.
        rows: if False, what an index selected is read as a copy.
        vanishing: the nodes that nothing uses once attention is computed in another way.
    """
    if isinstance(start, Node) and dtensor_of(start) is not None:
        stored, local = _behind_local_part(start, rows, vanishing)
        return (stored,) if local is None else _segments(_walk_behind(stored, local), rows, vanishing) or (stored,)
    walk = start if isinstance(start, Walk) else begin(start)
    return _segments(walk, rows, vanishing) or tuple(stored_among((walk,)))


def _behind_local_part(part: Node, rows: bool, vanishing: Vanishing) -> tuple[Stored, Node | None]:
    """How the local part of a DTensor is stored, and the plain tensor of the graph that it was made of, if it was."""
    dtensor = dtensor_of(part)
    assert dtensor is not None
    best, *others = find_segments(dtensor, rows, vanishing)
    stored = Stored(part) if others else _local(best, part)
    inner = None if stored.shared else dtensor_of(stored.base)
    return stored, None if inner is None else local_input(inner)


def _local(stored: Stored, part: Node) -> Stored:
    """The local part of what a DTensor is stored as, if that is sharded alike, else `part`, that of the DTensor."""
    from tatten.ops.distributed.placement import same_sharding

    tensor, base = known_tensor(dtensor_of(part)), known_tensor(stored.base)
    alike = same_sharding(tensor, base, stored.dims)
    return dataclasses.replace(stored, base=local_beside(part, stored.base)) if alike else Stored(part)


def _walk_behind(stored: Stored, node: Node) -> Walk:
    dtensor = dtensor_of(stored.base)
    assert dtensor is not None
    return walk_on(stored, node, (*stored.path, dtensor))


class Cut(NamedTuple):
    """A segment as it is stored, once for all sequences that share it, and as one that each sequence has for itself.

    The latter is None where rows were repeated or selected after they were concatenated.
    """

    shared: Stored
    per_sequence: Stored | None


def find_cuts(start: Node | Walk, vanishing: Vanishing) -> tuple[Cut, ...]:
    """The segments of SDPA's key or value between cuts that don't depend on the batch; none if one can't be read.

    Where others use what was concatenated, it is one segment: it exists anyway. The local part of a DTensor has none
    unless the graph made it.
    """
    if isinstance(start, Node) and dtensor_of(start) is not None:
        stored, local = _behind_local_part(start, False, vanishing)
        return () if local is None else find_cuts(_walk_behind(stored, local), vanishing)
    cuts = []
    for walk in _cut(start if isinstance(start, Walk) else begin(start), vanishing):
        shared = _segments(walk, True, vanishing, depth=MAX_DEPTH)
        if shared is None:
            return ()
        per_sequence = (x for x in stored_among(way_back(walk)) if not x.shared)
        cuts.append(Cut(shared[0], next(per_sequence, None)))
    return tuple(cuts)


def _cut(start: Walk, vanishing: Vanishing, depth: int = 0) -> Iterator[Walk]:
    for walk in way_back(start):
        parts = _parts(walk) if depth < MAX_DEPTH else None
        if parts is not None and _ours_alone(walk, vanishing):
            for part in parts:
                yield from _cut(part, vanishing, depth + 1)
            return
    yield start


def in_one(node: Node, segments: tuple[Stored, ...]) -> Stored:
    """`peel_heads(node)`, without another walk if the segments of `node` are one that already is the answer."""
    dtensor = dtensor_of(node)
    if dtensor is not None:
        return _local(peel_heads(dtensor), node)
    best, *others = segments
    if others or best.shared or any(op_name(x) in CATS for x in best.path):
        return peel_heads(node)
    return best


def _segments(start: Walk, rows: bool, vanishing: Vanishing, depth: int = 0) -> tuple[Stored, ...] | None:
    """The segments of the tensor that a walk has reached; None if no stored tensor can be found."""
    walks = []
    for walk in way_back(start):
        if walk.rows and not rows:
            break
        walks.append(walk)
        parts = _parts(walk) if depth < MAX_DEPTH else None
        if parts is not None:
            by_part = [_segments(part, rows, vanishing, depth + 1) for part in parts]
            flat = tuple(segment for segments in by_part if segments is not None for segment in segments)
            # If others use the concatenated tensor, it exists anyway: segments of equal batch are read from it.
            if None not in by_part and (
                _ours_alone(walk, vanishing) or any(not known_equal(x.size(BATCH), flat[0].size(BATCH)) for x in flat)
            ):
                return flat
    best, last = next(stored_among(walks), None), walks[-1]
    first = best if best is not None and best.base is last.here else stored_at(last)
    best = _overlaid(first) or best
    return None if best is None else (best,)


def _ours_alone(walk: Walk, vanishing: Vanishing) -> bool:
    """True if nothing but attention uses the nodes of a walk, so that they vanish with it."""
    previous: Node | None = None
    for node in (*walk.path, walk.here):
        users = [user for user in node.users if user not in vanishing and user is not previous]
        if users and (vanishing or len(users) > 1 or previous is not None):
            return False
        previous = node
    return True


def _parts(walk: Walk) -> list[Walk] | None:
    """Walks to the tensors that the one at hand concatenates over the sequence; None if it doesn't."""
    if op_name(walk.here) not in CATS or writes(walk.here):
        return None
    tensors = argument(walk.here, 0, "tensors")
    dim = argument(walk.here, 1, "dim", walk.here.kwargs.get("axis", 0))
    concatenated = tensor_of(walk.here)
    if concatenated is None or not isinstance(tensors, (list, tuple)) or not isinstance(dim, int):
        return None
    if walk.parts[dim % concatenated.dim()] != (LENGTH,):
        return None
    parts = []
    for node in tensors:
        tensor = tensor_of(node)
        if tensor is None or tensor.dtype != concatenated.dtype or tensor.device != concatenated.device:
            return None
        if tensor.dim() == 1 and known_equal(tensor.shape[0], 0):
            continue  # an empty cache starts so
        parts.append(dataclasses.replace(walk, here=node, path=(*walk.path, walk.here)))
    return parts


def _overlaid(stored: Stored | None) -> Stored | None:
    """The one row of a tensor that was expanded over the batch before it entered the graph, as stride 0 shows."""
    tensor = None if stored is None else tensor_of(stored.base)
    if stored is None or tensor is None or stored.dims[BATCH] is None:
        return None
    dim = stored.dims[BATCH] or 0
    if known_equal(tensor.shape[dim], 1) or not known_equal(in_memory(tensor).stride(dim), 0):
        return None
    return dataclasses.replace(stored, shared=True, rows=None, overlaid=True)
