"""Find the segments of keys or values along the sequence, each stored once for several sequences or for each one.

`torch.cat` over the sequence, at any depth, makes a list of segments. `tatten.passes.views` undoes repeats of rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from torch.fx import Node

from tatten.ops.layout import BATCH, LENGTH
from tatten.passes.calls import cat_arguments, op_name
from tatten.passes.drafts import dtensor_of, local_beside
from tatten.passes.local import local_input
from tatten.passes.mutation import writes
from tatten.passes.op_names import CATS
from tatten.passes.stored import Stored, peel_heads, stored_among, stored_at, walk_on
from tatten.passes.symbolic import in_memory, known_equal, known_tensor, tensor_of
from tatten.passes.views import Walk, begin_walk, walks_back

# A `cat` nested deeper than this is read as one tensor: a loop that appends to its keys nests one per step.
MAX_DEPTH = 8


Vanishing = frozenset[Node]


def find_segments(start: Node | Walk, rows: bool = True, vanishing: Vanishing = frozenset()) -> tuple[Stored, ...]:
    """Return the segments of SDPA's key or value, in order.

    The local part of a DTensor is followed to the plain tensor that the graph made it from. Without one, it is one
    segment.

    Args:
        start: SDPA's key or value, or a walk to it.
        rows: whether to follow selections of rows. If False, they are read as copies.
        vanishing: the nodes that nothing uses once an op replaces attention.
    """
    if isinstance(start, Node) and dtensor_of(start) is not None:
        stored, local = _behind_local_part(start, rows, vanishing)
        return (stored,) if local is None else _segments(_walk_behind(stored, local), rows, vanishing) or (stored,)
    walk = start if isinstance(start, Walk) else begin_walk(start)
    return _segments(walk, rows, vanishing) or tuple(stored_among((walk,)))


def _behind_local_part(part: Node, rows: bool, vanishing: Vanishing) -> tuple[Stored, Node | None]:
    """Return the local part of a DTensor as it is stored, and the plain tensor from which it was made, or None."""
    dtensor = dtensor_of(part)
    assert dtensor is not None
    best, *others = find_segments(dtensor, rows, vanishing)
    stored = Stored(part) if others else _local(best, part)
    inner = None if stored.shared else dtensor_of(stored.base)
    return stored, None if inner is None else local_input(inner)


def _local(stored: Stored, part: Node) -> Stored:
    """Return the local part of a stored DTensor if it is sharded like the DTensor of `part`, else `part`."""
    from tatten.ops.distributed.placement import same_sharding

    tensor, base = known_tensor(dtensor_of(part)), known_tensor(stored.base)
    if not same_sharding(tensor, base, stored.dims):
        return Stored(part)
    return dataclasses.replace(stored, base=local_beside(part, stored.base))


def _walk_behind(stored: Stored, node: Node) -> Walk:
    dtensor = dtensor_of(stored.base)
    assert dtensor is not None
    return walk_on(stored, node, (*stored.path, dtensor))


class Cut(NamedTuple):
    """A segment as it is stored, once for all sequences that share it, and with one row for each sequence.

    The latter is None if rows were repeated or selected after they were concatenated.
    """

    shared: Stored
    per_sequence: Stored | None


def find_cuts(start: Node | Walk, vanishing: Vanishing) -> tuple[Cut, ...]:
    """Return the segments of SDPA's key or value between cuts that don't depend on the batch.

    There are none if a segment can't be read. A concatenated tensor with other users is one segment, as it exists
    anyway. The local part of a DTensor has segments only if the graph made it.
    """
    if isinstance(start, Node) and dtensor_of(start) is not None:
        stored, local = _behind_local_part(start, False, vanishing)
        return () if local is None else find_cuts(_walk_behind(stored, local), vanishing)
    cuts = []
    for walk in _cut(start if isinstance(start, Walk) else begin_walk(start), vanishing):
        shared = _segments(walk, True, vanishing, depth=MAX_DEPTH)
        if shared is None:
            return ()
        per_sequence = (x for x in stored_among(walks_back(walk)) if not x.shared)
        cuts.append(Cut(shared[0], next(per_sequence, None)))
    return tuple(cuts)


def _cut(start: Walk, vanishing: Vanishing, depth: int = 0) -> Iterator[Walk]:
    for walk in walks_back(start):
        parts = _parts(walk) if depth < MAX_DEPTH else None
        if parts is not None and _only_attention_uses(walk, vanishing):
            for part in parts:
                yield from _cut(part, vanishing, depth + 1)
            return
    yield start


def in_one(node: Node, segments: tuple[Stored, ...]) -> Stored:
    """Return `peel_heads(node)`, without another walk if the only segment of `node` already is the result."""
    dtensor = dtensor_of(node)
    if dtensor is not None:
        return _local(peel_heads(dtensor), node)
    best, *others = segments
    if others or best.shared or any(op_name(x) in CATS for x in best.path):
        return peel_heads(node)
    return best


def _segments(start: Walk, rows: bool, vanishing: Vanishing, depth: int = 0) -> tuple[Stored, ...] | None:
    """Return the segments of the tensor at the end of a walk, or None if no stored tensor can be found."""
    walks = []
    for walk in walks_back(start):
        if walk.rows and not rows:
            break
        walks.append(walk)
        parts = _parts(walk) if depth < MAX_DEPTH else None
        if parts is not None:
            by_part = [_segments(part, rows, vanishing, depth + 1) for part in parts]
            flat = tuple(segment for segments in by_part if segments is not None for segment in segments)
            # A concatenated tensor with other users exists anyway, so segments of equal batch are read from it.
            if None not in by_part and (
                _only_attention_uses(walk, vanishing)
                or any(not known_equal(x.size(BATCH), flat[0].size(BATCH)) for x in flat)
            ):
                return flat
    best, last = next(stored_among(walks), None), walks[-1]
    first = best if best is not None and best.base is last.node else stored_at(last)
    best = _overlaid(first) or best
    return None if best is None else (best,)


def _only_attention_uses(walk: Walk, vanishing: Vanishing) -> bool:
    """Return True if only attention uses the nodes of a walk, so that they vanish with it."""
    previous: Node | None = None
    for node in (*walk.path, walk.node):
        users = [user for user in node.users if user not in vanishing and user is not previous]
        if users and (vanishing or len(users) > 1 or previous is not None):
            return False
        previous = node
    return True


def _parts(walk: Walk) -> list[Walk] | None:
    """Return walks to the tensors that the current node concatenates over the sequence, or None for another node."""
    if op_name(walk.node) not in CATS or writes(walk.node):
        return None
    tensors, dim = cat_arguments(walk.node)
    concatenated = tensor_of(walk.node)
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
            continue  # an empty cache may start with this tensor
        parts.append(dataclasses.replace(walk, node=node, path=(*walk.path, walk.node)))
    return parts


def _overlaid(stored: Stored | None) -> Stored | None:
    """Return a tensor with one row if it was expanded over the batch before it entered the graph, or None.

    Stride 0 shows the expansion.
    """
    tensor = None if stored is None else tensor_of(stored.base)
    if stored is None or tensor is None or stored.dims[BATCH] is None:
        return None
    dim = stored.dims[BATCH] or 0
    if known_equal(tensor.shape[dim], 1) or not known_equal(in_memory(tensor).stride(dim), 0):
        return None
    return dataclasses.replace(stored, shared=True, rows=None, overlaid=True)
