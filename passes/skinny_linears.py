"""Find linear layers of few rows, and let those that read one input share a launch.

For 2 to 64 rows, Inductor calls cuBLAS for each layer. `tatten::skinny_linear` takes up to three weights at once. With
a dynamic number of rows, the op calls cuBLAS for more than 64.

For one row, Inductor calls cuBLAS, too, or with `coordinate_descent_tuning` writes kernels that also compute the ops
around a layer without bias. The op saves launches for layers of one input, and needs more for the ops around them. A
step of Llama-3.1-8B takes less time, and needs no tuning (`benchmarks/decode_loop.py`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from tatten.ops.cuda.skinny_linear import pays_on
from tatten.ops.skinny_linear import ALIGNED, DTYPES, MOST_ROWS, MOST_WEIGHTS, choose_parts
from tatten.passes.calls import argument, op_name
from tatten.passes.mutation import mover_of, written_between
from tatten.passes.replace import Inserter
from tatten.passes.symbolic import (
    FakeTensor,
    bytes_of,
    constant,
    hint,
    known_equal,
    known_shape,
    known_tensor,
    tensor_of,
)

OP = torch.ops.tatten.skinny_linear.default
ARGUMENTS = "input", "weight", "bias"  # of `linear`
# The fewest bytes of a group's weights that were measured with several rows: 0.59 to 0.72 of the time of cuBLAS. Groups
# of up to 1.05 GB took 0.41 to 0.97 (bfloat16, biases in one of 6 models, 2, 8 and 64 rows, H100,
# `benchmarks/skinny_linear.py`). With one row, they took 0.22 to 0.91, and 0.61 to 1.04 of the time of Inductor's tuned
# kernels (4 models, H200).
LEAST_BYTES = 1 << 22
LEAST_BYTES_OF_ONE_ROW = 3 << 19  # the output of attention in Qwen2.5-0.5B has 1.6 MB


@dataclass(frozen=True)
class Linear:
    """A linear layer.

    Attributes:
        node: the call of `linear`.
        weight: an input of the graph.
        bias: an input of the graph, `[out_features]`, or None.
    """

    node: Node
    weight: Node
    bias: Node | None

    @property
    def x(self) -> Node:
        """The input of the layer, `[..., in_features]`: another node once the layer that computed it is replaced."""
        x: Node = argument(self.node, 0, "input")
        return x


@dataclass(frozen=True)
class LinearGroup:
    """Linear layers that read one input.

    Attributes:
        layers: one to three layers, in the order of the graph.
        parts: the number of partial sums of the op.
    """

    layers: tuple[Linear, ...]
    parts: int

    def writes_sums(self) -> bool:
        """Return True if the op's results are rounded later, after parts or a bias are added."""
        return self.parts > 1 or any(layer.bias is not None for layer in self.layers)

    def pays(self) -> bool:
        """Return True if the op was measured to be faster than cuBLAS for few rows, and costs little for many.

        Sums in float32 are left to cuBLAS if the number of rows is dynamic: those of many rows are larger than the
        results.
        """
        rows = constant(math.prod(known_tensor(self.layers[0].x).shape[:-1]))
        n_bytes = sum(bytes_of(known_tensor(layer.weight)) or 0 for layer in self.layers)
        if n_bytes < (LEAST_BYTES_OF_ONE_ROW if rows == 1 else LEAST_BYTES):
            return False
        return rows is not None or not self.writes_sums()


def find_skinny_linears(graph: Graph, movers: Sequence[Node]) -> list[LinearGroup]:
    """Find the linear layers of few rows, in groups that one op can compute where the first of them stands.

    Args:
        graph: a Dynamo graph.
        movers: the result of `tatten.passes.mutation.movers` for the graph.
    """
    by_input: dict[Node, list[Linear]] = {}
    for node in graph.nodes:
        layer = _read(node) if op_name(node) == "linear" and mover_of(node, movers) is None else None
        if layer is not None:
            by_input.setdefault(layer.x, []).append(layer)
    groups = [group for layers in by_input.values() for group in _groups(layers)]
    return [group for group in groups if group.pays()]


def _read(node: Node) -> Linear | None:
    """Return a linear layer that the op computes as well, or None."""
    x, weight, bias = (argument(node, i, name) for i, name in enumerate(ARGUMENTS))
    if not (isinstance(x, Node) and _is_input(weight) and (bias is None or _is_input(bias))):
        return None
    if not node.kwargs.keys() <= {*ARGUMENTS}:  # `out=` is written to
        return None
    tensors = [tensor_of(y) for y in (x, weight, node, *([bias] if bias is not None else []))]
    if not all(isinstance(y, FakeTensor) for y in tensors):  # neither DTensors nor quantised weights
        return None
    rows, stored, result = known_tensor(x), known_tensor(weight), known_tensor(node)
    same = {(y.dtype, y.device) for y in tensors if y is not None}  # another dtype results under autocast
    if len(same) > 1 or rows.dtype not in DTYPES or not pays_on(rows.device) or result.requires_grad:
        return None
    if bias is not None and not known_shape(known_tensor(bias).shape, stored.shape[:1]):
        return None
    return Linear(node, weight, bias) if _takes_weight(stored) and _few_rows(rows) else None


def _is_input(x: Any) -> bool:
    return isinstance(x, Node) and x.op == "placeholder"


def _takes_weight(weight: Tensor) -> bool:
    """Return True for a contiguous weight of known size."""
    sizes = [constant(n) for n in (*weight.shape, *weight.stride())]
    if weight.dim() != 2 or None in sizes or 0 in sizes[:2]:
        return False
    return sizes[2:] == [sizes[1], 1] and known_equal(weight.shape[1] % ALIGNED, 0)


def _few_rows(x: Tensor) -> bool:
    """Return True for 1 to `MOST_ROWS` rows; a dynamic number counts as it was when the graph was captured."""
    return 1 <= (hint(math.prod(x.shape[:-1])) or 0) <= MOST_ROWS


def _groups(layers: Sequence[Linear]) -> list[LinearGroup]:
    """Divide the layers of one input into groups that one op can compute."""
    groups = [[layers[0]]]
    for layer in layers[1:]:
        if len(groups[-1]) == MOST_WEIGHTS or _changes(groups[-1][0], layer):
            groups.append([])
        groups[-1].append(layer)
    return [LinearGroup(tuple(group), _parts_of(group)) for group in groups]


def _changes(first: Linear, later: Linear) -> bool:
    """Return True if the later layer might compute something else where the first one stands.

    Operands may be written between the two. If only those of the later layer require grad, the program may have turned
    gradients off between them.
    """
    read, earlier = ([known_tensor(y) for y in (z.x, z.weight, z.bias) if y is not None] for z in (later, first))
    grad = [any(tensor.requires_grad for tensor in tensors) for tensors in (read, earlier)]
    return (grad[0] and not grad[1]) or written_between(read, first.node, later.node) is not None


def _parts_of(layers: Sequence[Linear]) -> int:
    weights, x = [known_tensor(layer.weight) for layer in layers], known_tensor(layers[0].x)
    return choose_parts([w.shape[0] for w in weights], weights[0].shape[1], constant(math.prod(x.shape[:-1])))


def apply_linear_group(group: LinearGroup) -> None:
    """Replace the layers of a group by one op. Parts and biases are added in float32, and rounded once."""
    first, dtype = group.layers[0].node, known_tensor(group.layers[0].weight).dtype
    sums = torch.float32 if group.writes_sums() else dtype
    with first.graph.inserting_before(first):
        weights = [layer.weight for layer in group.layers]
        products = Inserter(first)(OP, group.layers[0].x, weights, group.parts, sums)
    for i, layer in enumerate(group.layers):
        with first.graph.inserting_before(layer.node):
            insert = Inserter(layer.node)
            parts = insert(operator.getitem, products, i)
            out = insert("sum", parts, 0) if group.parts > 1 else insert("squeeze", parts, 0)
            out = out if layer.bias is None else insert(operator.add, out, layer.bias)
            out = insert("to", out, dtype) if group.writes_sums() else out
        layer.node.replace_all_uses_with(out)
        layer.node.graph.erase_node(layer.node)
