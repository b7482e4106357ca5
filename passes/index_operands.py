"""Walk the operands of an indexer's scores back to stored tensors: the queries, keys and weights of index heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node

from tatten.ops.layout import BATCH, HEAD_DIM, HEADS, LENGTH
from tatten.ops.validation import FLOAT_DTYPES
from tatten.passes.calls import op_name
from tatten.passes.mutation import writes
from tatten.passes.op_names import CASTS
from tatten.passes.products import Factor, View, viewed
from tatten.passes.symbolic import FakeTensor, known_equal, known_shape, known_tensor, tensor_of
from tatten.passes.views import Part, Size, Walk, source_of, step_back

# The parts that dims count: those of keys, and queries.
OF_BATCH, OF_HEADS, OF_LENGTH, OF_DIM, OF_QUERIES = (BATCH,), (HEADS,), (LENGTH,), (HEAD_DIM,), (4,)

QUERY: tuple[Part, ...] = (OF_BATCH, OF_QUERIES, OF_HEADS, OF_DIM)
KEY: tuple[Part, ...] = (OF_BATCH, OF_LENGTH, OF_DIM)
WEIGHTS: tuple[Part, ...] = (OF_BATCH, OF_QUERIES, OF_HEADS)
SCORES: tuple[Part, ...] = (OF_BATCH, OF_QUERIES, OF_LENGTH)


def operands_of(
    factor: Factor, parts: Sequence[Part], wanted: Sequence[Part], sizes: dict[Part, Size]
) -> dict[torch.dtype, Factor]:
    """Find the tensors from which a factor was made by ops that only widen, copy, repeat and reorder.

    Args:
        factor: a factor of a product, whose `views` are permutations and new dims of size 1.
        parts: the part that each dim of the factor with its views counts.
        wanted: the part that each dim of an operand has to count.
        sizes: the size of each part.

    Returns:
        For each dtype that the op supports, the operand that is furthest back, with views that give it the `wanted`
        dims.
    """
    operands = ((known_tensor(x.node).dtype, x) for x in candidate_operands(factor, parts, wanted, sizes))
    return {dtype: x for dtype, x in operands if dtype in FLOAT_DTYPES}


def candidate_operands(
    factor: Factor, parts: Sequence[Part], wanted: Sequence[Part], sizes: dict[Part, Size]
) -> Iterator[Factor]:
    """Yield the tensors on the way back from a factor, with views for the wanted dims; see `operands_of`."""
    walk: Walk | None = Walk(factor.node, before_views(factor, parts))
    while walk is not None and not walk.rows and not any(part[:1] in wanted for part, _ in walk.stretched):
        if not isinstance(tensor_of(walk.node), FakeTensor):
            return
        views = views_for(walk.parts, wanted)
        operand = None if views is None else Factor(walk.node, views, walk.path)
        tensor = None if operand is None else viewed(operand)
        if operand is not None and tensor is not None and known_shape(tensor.shape, [sizes[x] for x in wanted]):
            yield operand
        walk = _before_widening(walk) or step_back(walk)


def before_views(factor: Factor, parts: Sequence[Part]) -> tuple[Part | None, ...]:
    """Return the parts of the dims of a factor's node before its views; None for a dim of size 1."""
    node_parts: list[Part | None] = list(parts)
    for name, *args in reversed(factor.views):
        if name == "unsqueeze":
            del node_parts[args[0]]
        elif name == "squeeze":
            node_parts.insert(args[0], None)
        else:
            node_parts = [node_parts[args.index(dim)] for dim in range(len(node_parts))]
    shape = known_tensor(factor.node).shape
    return tuple(None if known_equal(size, 1) else part for part, size in zip(node_parts, shape, strict=True))


def _before_widening(walk: Walk) -> Walk | None:
    """Return the walk before a cast to a wider dtype, or None for another node."""
    node, source = walk.node, source_of(walk.node)
    before, after = tensor_of(source), known_tensor(node)
    if source is None or before is None or op_name(node) not in CASTS or writes(node):
        return None
    floats = before.is_floating_point() and after.is_floating_point()
    return walk.step(source, walk.parts) if floats and before.itemsize < after.itemsize else None


def views_for(parts: Sequence[Part | None], wanted: Sequence[Part]) -> tuple[View, ...] | None:
    """Return the views that give dims the wanted parts in order, or None if dims count something else."""
    if len(parts) == len(wanted) and all(part in (None, other) for part, other in zip(parts, wanted, strict=True)):
        return ()
    present = [part for part in parts if part is not None]
    if len({*present}) < len(present) or not {*present} <= {*wanted}:
        return None
    views: list[View] = [("squeeze", dim) for dim in reversed(range(len(parts))) if parts[dim] is None]
    order = [present.index(part) for part in wanted if part in present]
    if order != sorted(order):
        views.append(("permute", *order))
    return (*views, *(("unsqueeze", dim) for dim, part in enumerate(wanted) if part not in present))


def mask_operand(mask: Node, sizes: dict[Part, Size]) -> Factor | None:
    """Return the mask of scores as `[1 or batch, 1 or q_length, kv_length]`, or None if it has another shape."""
    tensor = tensor_of(mask)
    if not isinstance(tensor, FakeTensor) or not 1 <= tensor.dim() <= len(SCORES):
        return None
    missing = len(SCORES) - tensor.dim()
    shape = [*(1 for _ in range(missing)), *tensor.shape]
    rows = zip(shape[:-1], SCORES[:-1], strict=True)
    fits = all(known_equal(size, 1) or known_equal(size, sizes[part]) for size, part in rows)
    return Factor(mask, (("unsqueeze", 0),) * missing) if fits and known_equal(shape[-1], sizes[OF_LENGTH]) else None
