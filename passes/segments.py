"""What sequences share: keys or values as segments of the sequence, each stored once for several sequences or for each.

`torch.cat` over the sequence, at any depth, is a list of segments; what repeats rows of the batch is walked back by
`tatten.passes.views`.
"""

from __future__ import annotations

import dataclasses

from torch.fx import Node

from tatten.ops.layout import BATCH, LENGTH
from tatten.passes.calls import argument, op_name
from tatten.passes.mutation import writes
from tatten.passes.stored import Stored, peel_heads, stored_among, stored_at
from tatten.passes.symbolic import held, known_equal, tensor_of
from tatten.passes.views import CATS, Walk, begin, way_back

# Deeper than this, what was concatenated is read as it is: a loop that appends to its keys nests one `cat` per step.
MAX_DEPTH = 8


def find_segments(node: Node) -> tuple[Stored, ...]:
    """The segments of SDPA's key or value in order."""
    return _segments(begin(node)) or (Stored(node),)


def in_one(node: Node, segments: tuple[Stored, ...]) -> Stored:
    """`peel_heads(node)`, given the segments of `node`: a segment that is all of it is what another walk would find."""
    best, *others = segments
    if others or best.shared or any(op_name(x) in CATS for x in best.path):
        return peel_heads(node)
    return best


def _segments(walk: Walk, depth: int = 0) -> tuple[Stored, ...] | None:
    """The segments of the tensor at this place; None if it can't be told what it stores."""
    places = []
    for place in way_back(walk):
        places.append(place)
        parts = _parts(place) if depth < MAX_DEPTH else None
        if parts is not None:
            found = [_segments(part, depth + 1) for part in parts]
            flat = tuple(segment for segments in found if segments is not None for segment in segments)
            # Parts of one batch are read together where the tensor that holds them is made anyway, for others.
            ours_alone = all(len(node.users) == 1 for node in (*place.path, place.here))
            if None not in found and (
                ours_alone or any(not known_equal(x.size(BATCH), flat[0].size(BATCH)) for x in flat)
            ):
                return flat
    best = next(stored_among(places), None)
    first = best if best is not None and best.base is place.here else stored_at(place)
    best = _overlaid(first) or best
    return None if best is None else (best,)


def _parts(walk: Walk) -> list[Walk] | None:
    """The places of the tensors that were concatenated over the sequence to make this one."""
    if op_name(walk.here) not in CATS or writes(walk.here):
        return None
    tensors = argument(walk.here, 0, "tensors")
    dim = argument(walk.here, 1, "dim", walk.here.kwargs.get("axis", 0))
    whole = tensor_of(walk.here)
    if whole is None or not isinstance(tensors, (list, tuple)) or not isinstance(dim, int):
        return None
    if walk.parts[dim % whole.dim()] != (LENGTH,):
        return None
    parts = []
    for node in tensors:
        tensor = tensor_of(node)
        if tensor is None or tensor.dtype != whole.dtype or tensor.device != whole.device:
            return None
        if tensor.dim() == 1 and known_equal(tensor.shape[0], 0):
            continue  # how an empty cache begins
        parts.append(Walk(node, walk.parts, walk.stretched, (*walk.path, walk.here)))
    return parts


def _overlaid(stored: Stored | None) -> Stored | None:
    """The rows of a tensor that was expanded before it came into the graph: stride 0 says that they are one."""
    tensor = None if stored is None else tensor_of(stored.base)
    if stored is None or tensor is None or stored.dims[BATCH] is None:
        return None
    dim = stored.dims[BATCH] or 0
    if known_equal(tensor.shape[dim], 1) or not known_equal(held(tensor).stride(dim), 0):
        return None
    return dataclasses.replace(stored, shared=True, overlaid=True)
