"""Find the norm before, and the gate and the residual after, linear layers of one row that share a launch.

`tatten::fused_linear` computes them with the layers, and loads weights before the previous launch has ended. Both save
time that a GPU waits from one short launch to the next: together 1 to 21 % of the layers of 8 models, and norms or
gates alone nothing (`benchmarks/fused_linear.py`). So a gate without a norm, all norms of a graph without gates and
residuals, and weights that a launch may still write are left alone.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.fx import Graph, Node
from torch.nn import Parameter

from tatten.ops.fused_linear import MOST_FEATURES, MOST_GATED_FEATURES
from tatten.passes.calls import argument, op_name
from tatten.passes.mutation import (
    enters_inference_mode,
    inactive_dropout,
    may_alias,
    writes,
    written_between,
    written_in,
)
from tatten.passes.norms import Norm, factors_of, keeps_all, norm_at
from tatten.passes.op_names import CASTS
from tatten.passes.replace import Inserter, erase_unused_of
from tatten.passes.skinny_linears import Linear, LinearGroup
from tatten.passes.symbolic import constant, known_shape, known_tensor, memory_of, tensor_of, value_of

OP = torch.ops.tatten.fused_linear.default
# Ops that Inductor computes by a kernel, and never by a view of their input or by nothing. So do all ops of tatten.
LAUNCHING = {"linear", "embedding", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention"}


@dataclass(frozen=True)
class Gate:
    """The product of an activation of one layer and of another layer.

    Attributes:
        kind: the name of the activation in `GATES`.
        layers: the layer of the activation, and the other one.
        activation: the node of the activation.
        node: the node of the product.
    """

    kind: str
    layers: tuple[Linear, Linear]
    activation: Node
    node: Node


@dataclass(frozen=True)
class Residual:
    """A sum of a layer, or of a gate, and another tensor.

    Attributes:
        node: the node of the sum.
        place: the position of the other tensor among its arguments.
        between: the nodes from the layer to the sum, which change nothing.
    """

    node: Node
    place: int
    between: tuple[Node, ...]

    @property
    def added(self) -> Node:
        """The other tensor: another node once the op that computed it is replaced."""
        added: Node = self.node.args[self.place]  # type: ignore[assignment]
        return added


@dataclass(frozen=True)
class FusedGroup:
    """Layers of one row with the ops around them.

    Attributes:
        group: the layers.
        norm, gate, residual: None if there is none.
    """

    group: LinearGroup
    norm: Norm | None
    gate: Gate | None
    residual: Residual | None

    @property
    def layers(self) -> tuple[Linear, ...]:
        return self.group.layers

    @property
    def row(self) -> Node:
        """The row that the op reads: another node once the op that computed it is replaced."""
        return self.group.layers[0].x if self.norm is None else self.norm.x


def find_fused_groups(graph: Graph, groups: Sequence[LinearGroup], movers: Sequence[Node]) -> list[FusedGroup]:
    """Return the groups of one row whose launch should compute the ops around them, too.

    Args:
        graph: a Dynamo graph.
        groups: the result of `find_skinny_linears` for the graph.
        movers: the result of `tatten.passes.mutation.movers` for the graph.
    """
    fused = [x for x in (_around(group) for group in groups if _takes(group)) if x is not None]
    pays = any(x.gate is not None or x.residual is not None for x in fused)
    # Results of layers in inference mode may be read outside of it, where gradients are on.
    written = written_in(graph) if pays and not movers and not enters_inference_mode(graph) else None
    if written is None:
        return []
    launched = _launched(graph)
    return [x for x in fused if x.row in launched and _may_prefetch(x, written)]


def _takes(group: LinearGroup) -> bool:
    """Return True for one row in one part, without biases, and not too wide."""
    x = known_tensor(group.layers[0].x)
    rows = constant(math.prod(x.shape[:-1]))
    return rows == 1 and not group.writes_sums() and known_tensor(group.layers[0].weight).shape[1] <= MOST_FEATURES


def _launched(graph: Graph) -> set[Node]:
    """Return the nodes that depend on a kernel which the graph launches.

    Inductor may compute a clone, a cast and back, or a `cat` of one tensor by no kernel.
    """
    launched = set[Node]()
    for node in graph.nodes:
        name, value = op_name(node), value_of(node)
        if isinstance(value, (int, float, SymInt, SymFloat, SymBool)) or name.endswith("_like") or "new_" in name:
            continue
        sources = node.all_input_nodes[:1] if name.endswith("_as") or name in CASTS else node.all_input_nodes
        if name in LAUNCHING or str(node.target).startswith("tatten.") or any(x in launched for x in sources):
            launched.add(node)
    return launched


def _may_prefetch(fused: FusedGroup, written: Sequence[Node]) -> bool:
    """Return True if weights may be loaded before the previous launch, which is one of the graph, has ended.

    That launch must not write them. All launches before it have ended: those of tatten, and by
    `tatten.ops.inductor.waits` those of Inductor, let the next launch begin only after they have waited for the one
    before them.

    Inductor (PyTorch 2.13) copies inputs with misaligned addresses where they are first read, but not parameters.
    """
    weights = [layer.weight for layer in fused.layers] + ([] if fused.norm is None else [fused.norm.weight])
    tensors = [known_tensor(weight) for weight in weights]
    parameters = all(isinstance(tensor, Parameter) for tensor in tensors)
    owned = [x for tensor in tensors for x in memory_of(tensor)]
    return parameters and not any(may_alias(node, owned) for node in written)


def _around(group: LinearGroup) -> FusedGroup | None:
    norm = _norm_of(group)
    gate = None if norm is None else _gate_of(group)
    results = [layer.node for layer in group.layers] if gate is None else [gate.node]
    residual = _residual_of(results[0], group.layers[0]) if len(results) == 1 else None
    return None if norm is None and residual is None else FusedGroup(group, norm, gate, residual)


def _norm_of(group: LinearGroup) -> Norm | None:
    """Return the norm whose result the group's layers read, and no other node."""
    layers, row = {layer.node for layer in group.layers}, group.layers[0].x
    slices = keeps_all(row)
    norm = norm_at(row.args[0] if slices else row)
    if norm is None:
        return None
    nodes = norm.nodes | ({row} if slices else frozenset())
    if any(not x.users.keys() <= nodes | layers or writes(x) for x in nodes):
        return None
    x, weight, first = tensor_of(norm.x), known_tensor(norm.weight), group.layers[0]
    like = known_tensor(row)
    if x is None or not _is_like(x, like, like.shape) or not _is_like(weight, like, like.shape[-1:]):
        return None
    if not _keeps_grad_mode((x, weight), first) or written_between([x, weight], norm.read, first.node) is not None:
        return None
    return replace(norm, nodes=nodes)


def _is_like(tensor: Tensor, like: Tensor, shape: Sequence[Any]) -> bool:
    same = (tensor.dtype, tensor.device, type(tensor)) == (like.dtype, like.device, type(like))
    return same and known_shape(tensor.shape, shape)


def _keeps_grad_mode(tensors: Sequence[Tensor], layer: Linear) -> bool:
    """Return True if the op may read `tensors` where the layer stands. Gradients may be on there, and off elsewhere."""
    return known_tensor(layer.weight).requires_grad or not any(tensor.requires_grad for tensor in tensors)


def _gate_of(group: LinearGroup) -> Gate | None:
    weights = [known_tensor(layer.weight) for layer in group.layers]
    if len(weights) != 2 or weights[0].shape != weights[1].shape or weights[0].shape[1] > MOST_GATED_FEATURES:
        return None
    for gate, other in (group.layers, group.layers[::-1]):
        activation, node = _only_user(gate.node), _only_user(other.node)
        kind = _kind_of(activation)
        if activation is None or node is None or kind is None or _only_user(activation) is not node:
            continue
        if writes(activation) or writes(node):
            continue
        if {activation, other.node} in ({a, b} for a, b in factors_of(node)):
            return Gate(kind, (gate, other), activation, node)
    return None


def _kind_of(node: Node | None) -> str | None:
    """Return the name in `GATES` of the activation that a node computes, or None."""
    if node is None or op_name(node) not in ("silu", "gelu"):
        return None
    if op_name(node) == "silu":
        return "silu"
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(argument(node, 1, "approximate", "none"))


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _residual_of(result: Node, layer: Linear) -> Residual | None:
    """Return the sum of a result and of a tensor that is there before the first layer, or None."""
    between = list[Node]()
    node = _only_user(result)
    while node is not None and inactive_dropout(node):
        between.append(node)
        node = _only_user(node)
    if node is None or op_name(node) != "add" or len(node.args) != 2 or node.kwargs:
        return None
    place = 0 if node.args[1] is (between[-1] if between else result) else 1
    added = node.args[place]
    if not isinstance(added, Node) or not added < layer.node:
        return None
    tensor, like = tensor_of(added), known_tensor(result)
    if tensor is None or not _is_like(tensor, like, like.shape) or not _keeps_grad_mode((tensor,), layer):
        return None
    if known_tensor(node).requires_grad:  # gradients are on at the sum, and off at the layer
        return None
    return Residual(node, place, tuple(between)) if written_between([tensor], layer.node, node) is None else None


def apply_fused_group(fused: FusedGroup) -> None:
    """Replace the layers of a group and the ops around them by one op."""
    first, norm, gate, residual = fused.layers[0].node, fused.norm, fused.gate, fused.residual
    layers = fused.layers if gate is None else gate.layers
    options: dict[str, Any] = {"prefetch": True}
    if norm is not None:
        options |= {"norm_weight": norm.weight, "eps": norm.eps}
    if gate is not None:
        options |= {"gate": gate.kind}
    if residual is not None:
        options |= {"residual": residual.added}
    with first.graph.inserting_before(first):
        insert = Inserter(first)
        results = insert(OP, fused.row, [layer.weight for layer in layers], **options)
        items = [insert(operator.getitem, results, i) for i in range(1 if gate is not None else len(layers))]
    ends = [layer.node for layer in layers] if gate is None else [gate.node]
    ends = ends if residual is None else [residual.node]
    for end, item in zip(ends, items, strict=True):
        end.replace_all_uses_with(item)
    replaced = {*ends, *(layer.node for layer in layers)}
    replaced |= set() if norm is None else norm.nodes
    replaced |= set() if gate is None else {gate.activation, gate.node}
    replaced |= set() if residual is None else {*residual.between}
    erase_unused_of(replaced)
