"""Queries as they were before a program multiplied them by a number, or merged their heads with the batch.

The op multiplies scores by a number anyway, in the dtype of sums. In the program the product is a rounding more, and
where nothing is fused with it a kernel of each layer, as in Whisper and BART. Heads that were merged with the batch
are a copy where the queries are a part of a larger tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from tatten.passes.calls import argument, op_name
from tatten.passes.literals import number_of
from tatten.passes.metadata import reads_values
from tatten.passes.mutation import writes, written_between
from tatten.passes.products import COPIES
from tatten.passes.symbolic import constant, known_equal, known_shape, tensor_of
from tatten.passes.views import REORDERS, RESHAPES

SCALE = 5  # the position of `scale` in the schemas of `decode_attention` and `bifurcated_attention`
LEAST, LARGEST = 1e-30, 1e30  # kernels get the scale in float32
PRODUCTS = {"mul", "multiply", "div", "truediv", "divide", "true_divide"}


@dataclass(frozen=True)
class ScaledQuery:
    """A product of queries and a number that an op can take into its scale.

    Attributes:
        product: the node of it.
        source: what was multiplied.
        reader: the op, or the view between, that alone reads the product.
        factor, scale: the number, and the op's scale with it.
    """

    product: Node
    source: Node
    reader: Node
    factor: float
    scale: float


def find_scaled_query(op: Node) -> ScaledQuery | None:
    """Find what an op's queries were multiplied by. Changes nothing."""
    reader, node = op, op.args[0]
    while isinstance(node, Node) and [x for x in node.users if reads_values(x, node)] == [reader] and not writes(node):
        if op_name(node) in PRODUCTS:
            return _scaled(op, reader, node)
        if op_name(node) not in RESHAPES | REORDERS | COPIES:
            return None
        reader, node = node, node.args[0]
    return None


def _scaled(op: Node, reader: Node, product: Node) -> ScaledQuery | None:
    a, b = argument(product, 0, "input"), argument(product, 1, "other")
    divides = "div" in op_name(product)
    source, number = (b, a) if number_of(b, product) is None and not divides else (a, b)
    factor, scale = number_of(number, product), _scale(op)
    before, after = tensor_of(source), tensor_of(product)
    if factor is None or not 0 < factor < math.inf or product.kwargs.get("rounding_mode") is not None or scale is None:
        return None
    # With the same strides the views between give the same, be they copies or not.
    if before is None or after is None or before.dtype != after.dtype or not _same_strides(before, after):
        return None
    factor = 1 / factor if divides else factor
    if not LEAST <= scale * factor <= LARGEST or written_between([before], product, op) is not None:
        return None
    return ScaledQuery(product, source, reader, factor, scale * factor)


def _same_strides(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one shape, and equal strides where a stride has a meaning."""
    if not known_shape(a.shape, b.shape):
        return False
    each = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(known_equal(size, 1) or known_equal(one, other) for size, one, other in each)


def _scale(op: Node) -> float | None:
    """The scale of an op as a number; None where it isn't one."""
    scale: Any = op.args[SCALE]
    if scale is not None:
        return scale if isinstance(scale, float) else None
    query = tensor_of(op.args[0])
    head_dim = None if query is None else constant(query.shape[3])
    return head_dim**-0.5 if head_dim else None


def find_unmerged_query(op: Node) -> Node | None:
    """Find the first tensor of the shape of an op's queries that they were only reshaped and copied from."""
    node: Any = op.args[0]
    want, found = tensor_of(node), None
    while want is not None and op_name(node) in RESHAPES | COPIES and not writes(node):
        reader, node = node, node.args[0]
        tensor = tensor_of(node)
        if tensor is None or tensor.dtype != want.dtype or written_between([tensor], reader, op) is not None:
            break
        found = node if known_shape(tensor.shape, want.shape) else found
    return found


def restore_query(op: Node) -> str:
    """Let an op read its queries as they were, and multiply them itself. Returns a note for the report."""
    scaled = find_scaled_query(op)
    if scaled is not None:
        scaled.reader.replace_input_with(scaled.product, scaled.source)
        op.update_arg(SCALE, scaled.scale)
        if not scaled.product.users:
            scaled.product.graph.erase_node(scaled.product)
    unmerged, node = find_unmerged_query(op), op.args[0]
    if unmerged is not None:
        op.update_arg(0, unmerged)
    while isinstance(node, Node) and unmerged is not None and not node.users:
        unused, node = node, node.args[0]
        unused.graph.erase_node(unused)
    return "" if scaled is None else f"scale {scaled.scale:g}, with the {scaled.factor:g} that multiplied the queries"
