"""Find linear layers of few rows, and let those that read one input share a launch.

For 2 to 64 rows, Inductor calls cuBLAS once for each layer, or once and another time for the sum of its parts.
`tatten::skinny_linear` reads the weights at the rate of memory, and takes three weights at once. One row is left to
Inductor, which fuses its products with the ops around them if `coordinate_descent_tuning` is set.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from tatten.ops.cuda.skinny_linear import pays_on
from tatten.ops.skinny_linear import DTYPES, MOST_ROWS, MOST_WEIGHTS, choose_parts
from tatten.passes.autocast import autocast_unknown
from tatten.passes.calls import argument, op_name
from tatten.passes.mutation import mover_of, written_between
from tatten.passes.replace import Inserter
from tatten.passes.symbolic import FakeTensor, bytes_of, constant, known_tensor, tensor_of

OP = torch.ops.tatten.skinny_linear.default
# The fewest bytes of a group's weights that were measured: 0.64 to 0.79 of the time of cuBLAS. Groups of up to 236 MB
# took 0.39 to 0.99 (6 models, 8 to 64 rows, H100, `benchmarks/skinny_linear.py`).
LEAST_BYTES = 1 << 22


@dataclass(frozen=True)
class Linear:
    """A linear layer.

    Attributes:
        node: the call of `linear`.
        weight: an input of the graph.
        bias: an input of the graph, or None.
    """

    node: Node
    weight: Node
    bias: Node | None


@dataclass(frozen=True)
class LinearGroup:
    """Linear layers that read one input.

    Attributes:
        x: the input, `[..., in_features]`.
        layers: one to three layers, in the order of the graph.
        parts: the number of partial sums of the op.
    """

    x: Node
    layers: tuple[Linear, ...]
    parts: int

    def writes_sums(self) -> bool:
        """Return True if the op's results are rounded later, after parts or a bias are added."""
        return self.parts > 1 or any(layer.bias is not None for layer in self.layers)


def find_skinny_linears(graph: Graph, movers: Sequence[Node] = ()) -> list[LinearGroup]:
    """Find the linear layers of few rows, in groups that one op can compute where the first of them stands.

    Args:
        graph: a Dynamo graph.
        movers: the result of `tatten.passes.mutation.movers` for the graph.
    """
    if autocast_unknown(graph) is not None:
        return []
    by_input: dict[Node, list[Linear]] = {}
    for node in graph.nodes:
        layer = _read(node) if op_name(node) == "linear" and mover_of(node, movers) is None else None
        if layer is not None:
            by_input.setdefault(layer.node.args[0], []).append(layer)  # type: ignore[arg-type]
    return [group for x, layers in by_input.items() for group in _groups(x, layers)]


def _read(node: Node) -> Linear | None:
    """Return a linear layer that the op computes as well, or None."""
    x, weight, bias = node.args[0] if node.args else None, argument(node, 1, "weight"), argument(node, 2, "bias")
    if not (isinstance(x, Node) and _is_input(weight) and (bias is None or _is_input(bias))):
        return None
    tensors = [tensor_of(y) for y in (x, weight, node, *([bias] if bias is not None else []))]
    if not all(isinstance(y, FakeTensor) for y in tensors):  # neither DTensors nor quantised weights
        return None
    rows, stored, result = known_tensor(x), known_tensor(weight), known_tensor(node)
    same = {(y.dtype, y.device) for y in tensors if y is not None}  # another dtype results under autocast
    if len(same) > 1 or rows.dtype not in DTYPES or not pays_on(rows.device) or result.requires_grad:
        return None
    sizes = [constant(n) for n in (*stored.shape, *stored.stride())]
    if stored.dim() != 2 or None in sizes or 0 in sizes[:2] or sizes[2:] != [sizes[1], 1] or not _few_rows(rows):
        return None
    return Linear(node, weight, bias)


def _is_input(x: Any) -> bool:
    return isinstance(x, Node) and x.op == "placeholder"


def _few_rows(x: Tensor) -> bool:
    """Return True for 2 to `MOST_ROWS` rows. A dynamic number was not measured."""
    n = [constant(size) for size in x.shape[:-1]]
    return None not in n and 1 < math.prod(size or 0 for size in n) <= MOST_ROWS


def _groups(x: Node, layers: list[Linear]) -> Iterator[LinearGroup]:
    """Divide the layers of one input into groups that one op can compute, and that it is faster for."""
    group: list[Linear] = []
    for layer in layers:
        if group and (len(group) == MOST_WEIGHTS or _changes(x, group[0], layer)):
            yield from _worthwhile(x, group)
            group = []
        group.append(layer)
    yield from _worthwhile(x, group)


def _changes(x: Node, first: Linear, later: Linear) -> bool:
    """Return True if something that the later layer reads may be written between the two layers."""
    read = [known_tensor(y) for y in (x, later.weight, later.bias) if y is not None]
    return written_between(read, first.node, later.node) is not None


def _worthwhile(x: Node, layers: list[Linear]) -> Iterator[LinearGroup]:
    """Yield a group if the op was measured to be faster than cuBLAS for weights of this size."""
    weights = [known_tensor(layer.weight) for layer in layers]
    if sum(bytes_of(w) or 0 for w in weights) >= LEAST_BYTES:
        yield LinearGroup(x, tuple(layers), choose_parts([w.shape[0] for w in weights], weights[0].shape[1]))


def apply_linear_group(group: LinearGroup) -> None:
    """Replace the layers of a group by one op. Parts and biases are added in float32, and rounded once."""
    first, dtype = group.layers[0].node, known_tensor(group.x).dtype
    sums = torch.float32 if group.writes_sums() else dtype
    with first.graph.inserting_before(first):
        weights = [layer.weight for layer in group.layers]
        products = Inserter(first)(OP, group.x, weights, group.parts, sums)
    for i, layer in enumerate(group.layers):
        with first.graph.inserting_before(layer.node):
            insert = Inserter(layer.node)
            parts = insert(operator.getitem, products, i)
            out = insert("sum", parts, 0) if group.parts > 1 else insert("squeeze", parts, 0)
            out = out if layer.bias is None else insert(operator.add, out, layer.bias)
            out = insert("to", out, dtype) if group.writes_sums() else out
        out.meta.update(layer.node.meta)
        layer.node.replace_all_uses_with(out)
        layer.node.graph.erase_node(layer.node)
