"""Find tensors that each layer computes in the same way from the same tensors, as T5's layers compute their masks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from tatten.passes.calls import op_name, reached
from tatten.passes.mutation import written_between
from tatten.passes.op_names import CASTS, COPIES, REORDERS, RESHAPES, STRETCHES
from tatten.passes.symbolic import tensor_of

# Ops that write to none of their inputs, and return the same result for the same inputs.
PURE = {
    *("where", "masked_fill", "add", "sub", "mul", "neg", "logical_not", "logical_and", "logical_or", "bitwise_not"),
    *("bitwise_and", "bitwise_or", "and_", "or_", "invert", "eq", "ne", "lt", "le", "gt", "ge", "bool", "getitem"),
    *("zeros", "ones", "full", "zeros_like", "ones_like", "full_like"),
    *(CASTS | COPIES | STRETCHES | RESHAPES | REORDERS),
}


@dataclass(frozen=True)
class _Computed:
    """A computed tensor, all tensors that it was computed from, and the node up to which none of them is written."""

    node: Node
    tensors: list[Tensor]
    until: Node


class Recomputed:
    """Value numbering: nodes of a graph that compute the same value have the same number."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._number_of: dict[Node, int] = {}
        self._computed: dict[int, _Computed] = {}

    def first(self, node: Node, user: Node) -> Node:
        """Return the first node that was passed here and still has the value of `node` at `user`; else `node`.

        Args:
            node: a node that computes a tensor.
            user: a later node, which is about to be replaced by a node that reads the result. Calls must pass users in
                order.
        """
        above = reached(node, lambda x: x.all_input_nodes if _is_pure(x) else ())
        computing = [x for x in above if _is_pure(x)]
        if not computing:
            return node
        tensors = [tensor for tensor in map(tensor_of, above) if tensor is not None]
        if written_between(tensors, min(computing), user) is not None:
            return node
        number, first = self._number(node), node
        earlier = self._computed.get(number)
        if earlier is not None and written_between(earlier.tensors, earlier.until, user) is None:
            first, tensors = earlier.node, earlier.tensors
        self._computed[number] = _Computed(first, tensors, user.prev)
        return first

    def _number(self, node: Node) -> int:
        if node not in self._number_of:
            key: object = node
            if _is_pure(node):
                args = map_arg((node.args, node.kwargs), lambda x: _Numbered(self._number(x)))
                key = node.op, node.target, repr(args), getattr(tensor_of(node), "dtype", None)
            self._number_of[node] = self._numbers.setdefault(key, len(self._numbers))
        return self._number_of[node]


class _Numbered(int):
    """The number of a node among arguments, whose `repr` differs from that of any argument."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _is_pure(node: Node) -> bool:
    return op_name(node) in PURE and "out" not in node.kwargs
