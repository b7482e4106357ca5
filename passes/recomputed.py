"""Tensors that layers compute anew, each in the same way from the same tensors, as T5's layers do their masks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from tatten.passes.calls import op_name, reached
from tatten.passes.mutation import written_between
from tatten.passes.op_names import CASTS, COPIES, REORDERS, RESHAPES, STRETCHES
from tatten.passes.symbolic import tensor_of

# Ops that write to none of their inputs, and return the same for the same inputs.
PURE = {
    *("where", "masked_fill", "add", "sub", "mul", "neg", "logical_not", "logical_and", "logical_or", "bitwise_not"),
    *("bitwise_and", "bitwise_or", "and_", "or_", "invert", "eq", "ne", "lt", "le", "gt", "ge", "bool", "getitem"),
    *("zeros", "ones", "full", "zeros_like", "ones_like", "full_like"),
    *(CASTS | COPIES | STRETCHES | RESHAPES | REORDERS),
}


@dataclass(frozen=True)
class _Computed:
    """A tensor that was computed, all tensors that it was computed from, and until where none of them was written."""

    node: Node
    tensors: list[Tensor]
    until: Node


class Recomputed:
    """Numbers for what the nodes of a graph compute (value numbering), equal for nodes that compute the same."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._of: dict[Node, int] = {}
        self._computed: dict[int, _Computed] = {}

    def first(self, node: Node, user: Node) -> Node:
        """The first node asked for that had, and at `user` has, the value that `node` has there; else `node`.

        Args:
            node: computes a tensor.
            user: a later node, which is about to be replaced by one that reads the result. Users come in order.
        """
        above = reached(node, lambda x: x.all_input_nodes if _is_pure(x) else ())
        computing = [x for x in above if _is_pure(x)]
        if not computing:
            return node
        tensors = [tensor for tensor in map(tensor_of, above) if tensor is not None]
        if written_between(tensors, min(computing), user) is not None:
            return node
        number, node_then = self._number(node), node
        earlier = self._computed.get(number)
        if earlier is not None and written_between(earlier.tensors, earlier.until, user) is None:
            node_then, tensors = earlier.node, earlier.tensors
        self._computed[number] = _Computed(node_then, tensors, user.prev)
        return node_then

    def _number(self, node: Node) -> int:
        if node not in self._of:
            key: object = node
            if _is_pure(node):
                args = map_arg((node.args, node.kwargs), lambda x: _Numbered(self._number(x)))
                key = node.op, node.target, repr(args), getattr(tensor_of(node), "dtype", None)
            self._of[node] = self._numbers.setdefault(key, len(self._numbers))
        return self._of[node]


class _Numbered(int):
    """Stands for a node among arguments, and looks like none of them."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _is_pure(node: Node) -> bool:
    return op_name(node) in PURE and "out" not in node.kwargs
