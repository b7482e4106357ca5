"""Find products of one row that a graph leaves to PyTorch: Inductor can tune kernels for them in place of cuBLAS."""

from __future__ import annotations

import math

from torch import Tensor
from torch.fx import GraphModule, Node

from tatten.passes.calls import argument, nodes_of, op_name
from tatten.passes.op_names import MATMULS
from tatten.passes.symbolic import constant, tensor_of


def has_one_row_products(gm: GraphModule) -> bool:
    """Return True if a graph, or the body of a higher-order operator in it, has a product with one row or one column.

    These are the products that Inductor decomposes with `coordinate_descent_tuning`: `mm` and `bmm`. A product whose
    operands are unknown counts, and so does each `einsum`. Some don't count: a product with a bias, of one feature (as
    in a rotary embedding), with a vector on the right, or with a dynamic number of rows.
    """
    return any(_is_one_row_product(node) for node in nodes_of(gm))


def _is_one_row_product(node: Node) -> bool:
    name = op_name(node)
    is_linear = name == "linear"
    if not (is_linear or name == "mm" or name in MATMULS):
        return name == "einsum"
    right = argument(node, 1, "weight" if is_linear else "other", node.kwargs.get("mat2"))
    a, b = tensor_of(argument(node, 0, "input")), tensor_of(right)
    if a is None or b is None:
        return True
    has_bias = is_linear and argument(node, 2, "bias") is not None
    if has_bias or b.dim() == 1 or constant(a.shape[-1]) == 1:
        return False
    return _rows(a, b) == 1 or constant(b.shape[0 if is_linear else -1]) == 1


def _rows(a: Tensor, b: Tensor) -> int | None:
    """Return the rows of the first operand: those of all its matrices if the second operand is one matrix."""
    return constant(math.prod(a.shape[:-1] if b.dim() == 2 else a.shape[-2:-1]))
