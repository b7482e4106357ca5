"""One call in the place of attention that is written out, so that the passes see it as they see calls of SDPA.

The stand-in is never run: a rewrite replaces it, or it is taken back and the graph is what it was.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from tatten.passes.calls import argument
from tatten.passes.masks import Masks, same_view
from tatten.passes.products import Factor, Heads, View
from tatten.passes.replace import Inserter
from tatten.passes.scores import Step
from tatten.passes.sdpa import SdpaCall
from tatten.passes.symbolic import constant, known_equal, tensor_of, value_of
from tatten.passes.written_out import WrittenOut


@dataclass(frozen=True)
class StandIn:
    """A call that was inserted in the place of attention written out.

    Attributes:
        call: the call, to be matched and rewritten.
        replaced: what has taken the place of what, node by node.
        idle: the nodes that nothing uses any more, with their arguments, the last node first. They have let go of
            these, so that passes that ask who uses a tensor don't find them.
    """

    call: SdpaCall
    replaced: tuple[tuple[Node, Node], ...]
    idle: tuple[tuple[Node, tuple[Any, ...], dict[str, Any]], ...]

    @classmethod
    def put(cls, call: SdpaCall, replaced: Sequence[tuple[Node, Node]]) -> StandIn:
        """Put a call that was inserted in the place of what it computes."""
        for new, old in replaced:
            old.replace_all_uses_with(new, delete_user_cb=new.__ne__)
        idle = []
        for node in sorted(set(call.path), reverse=True):
            if not node.users:
                idle.append((node, node.args, node.kwargs))
                node.args, node.kwargs = (), {}
        return cls(call, tuple(replaced), tuple(idle))

    def take_back(self) -> None:
        """Restore the graph, but for drafts."""
        for node, args, kwargs in reversed(self.idle):
            node.args, node.kwargs = args, kwargs
        for new, old in self.replaced:
            new.replace_all_uses_with(old)


def insert_stand_in(found: WrittenOut, sinks: Factor | None, masks: Masks, *, fused: bool) -> StandIn:
    """Insert a call in the place of attention written out, which is `fused` if it is left as it is."""
    place, product = found.place, found.weights.product
    own_dims = found.own_dims
    insert = Drafts(place, masks.drafts)
    with place.graph.inserting_before(place):
        factors = tuple(insert.views(x) for x in (found.query, found.key, found.value))
        for number, divides in found.scores.factors:
            factors = insert(torch.div if divides else torch.mul, factors[0], number), *factors[1:]
        vector = None if sinks is None else insert.views(sinks)
        node = place.graph.call_function(F.scaled_dot_product_attention, factors)
    node.meta.update(product.node.meta)
    node.meta["example_value"] = _result(found)
    call = SdpaCall(
        node,
        factors[0],
        factors[1],
        factors[2],
        scale=found.scores.scale,
        enable_gqa=own_dims is not None,
        softcap=found.scores.softcap,
        sinks=vector,
        form=found.form,
        log_sums=found.log_sums,
        path=found.path,
        fused=fused,
        grouped=own_dims is not None,
    )
    mask, empty = _mask(found, call, masks)
    node.args = factors if mask is None else (*factors, mask)
    masks.drafts.append(node)
    out, replaced = node, []
    with place.graph.inserting_before(node.next):
        if own_dims is not None:
            out = insert("unflatten", out, 1, own_dims[1:])
            out = out if _rank(product.node) == 5 else insert("squeeze", out, 0)
        elif _rank(product.node) == 3:
            out = insert("flatten", out, 0, 1)
        if product.back is not None:
            out = insert(*_method(out, product.back))
        replaced.append((out, product.node))
        for lse in found.log_sums if empty is not None else ():
            rows, rank = empty, _rank(argument(lse, 0, "input"))
            if rank == 3:
                rows = insert("flatten", insert("expand_as", rows, insert("narrow", call.query, -1, 0, 1)), 0, 1)
            rows = rows if _rank(lse) == rank else insert("squeeze", rows, -1)
            replaced.append((insert("masked_fill", lse, rows, -math.inf), lse))
    return StandIn.put(dataclasses.replace(call, attn_mask=mask), replaced)


def _result(found: WrittenOut) -> Tensor:
    """The fake tensor of the result as `[batch, heads, q_len, head_dim]`."""
    product = found.weights.product
    tensor = tensor_of(product.node)
    assert tensor is not None
    if product.back is not None:
        order = product.back[1:]
        tensor = tensor.permute([order.index(d) for d in range(len(order))])
    if found.own_dims is not None:
        return (tensor if tensor.dim() == 5 else tensor.unsqueeze(0)).flatten(1, 2)
    return tensor.unflatten(0, _heads(found)) if tensor.dim() == 3 else tensor


def _heads(found: WrittenOut) -> tuple[int, int]:
    assert found.heads is not None
    heads = constant(found.heads[1])
    assert heads is not None
    return -1, heads


def _mask(found: WrittenOut, call: SdpaCall, masks: Masks) -> tuple[Node | None, Node | None]:
    """Insert what the steps make of a score of 0, and which rows of it have no keys: once for layers that share it."""
    steps, insert = found.scores.steps, Drafts(call.node, masks.drafts)
    nodes = [x.node for x in steps if x.node is not None]
    if not nodes:
        return None, None
    shown = tuple((x.kind, x.number, x.dtype, None if x.node is None else same_view(x.node)) for x in steps)

    def once(name: str, make: Callable[[], Node]) -> Node:
        return masks.once_unless_written((name, shown, str(found.heads)), call, nodes, make)

    bias = once("bias", lambda: _bias(insert, found))
    if call.sinks is not None or steps[-1].kind == "at_least":
        return bias, None
    # A softmax of nothing but -inf is NaN, while attention to no keys is 0.
    empty = once("empty", lambda: insert("all", insert("eq", bias, -math.inf), -1, True))
    return once("mask", lambda: insert("masked_fill", bias, empty, math.nan)), empty


def _bias(insert: Drafts, found: WrittenOut) -> Node:
    bias: Node | None = None
    for step in found.scores.steps:
        if step.node is not None:
            bias = _with(insert, step, bias, insert.views(_like_scores(step.node, found)))
        elif bias is not None:
            bias = insert.cast(bias, step.dtype)
            bias = insert("mul", bias, step.number) if step.kind == "times" and step.number != 1 else bias
            bias = insert("div", bias, step.number) if step.kind == "over" else bias
            bias = insert("clamp", bias, step.number) if step.kind == "at_least" else bias
    assert bias is not None
    return bias


def _with(insert: Drafts, step: Step, bias: Node | None, node: Node) -> Node:
    """Insert a step with a tensor, `node`; it gives what scores are rounded to, as in a sum that is taken in place."""
    if step.kind == "add":
        node = node if step.number == 1 else insert("mul", insert.cast(node, step.dtype), step.number)
        return insert.cast(node if bias is None else insert(torch.add, insert.cast(bias, step.dtype), node), step.dtype)
    bias = insert.cast(insert(torch.zeros_like, node) if bias is None else bias, step.dtype)
    condition = node if step.kind == "where" else insert("logical_not", node)
    return insert(torch.masked_fill, bias, condition, step.number)


def _like_scores(node: Node, found: WrittenOut) -> Factor:
    """A tensor that broadcasts to scores, where they are `[batch, heads, q_len, kv_len]`."""
    tensor = tensor_of(node)
    if tensor is not None and tensor.dim() == 0:
        return Factor(node, (("unsqueeze", 0),))
    if found.own_dims is not None and tensor is not None:
        return Factor(node, _joined(tensor, found.own_dims))
    if found.heads is None or tensor is None or tensor.dim() != 3 or known_equal(tensor.shape[0], 1):
        return Factor(node)
    if known_equal(tensor.shape[0], found.heads[0] * found.heads[1]):
        return Factor(node, (("unflatten", 0, _heads(found)),))
    return Factor(node)


def _joined(tensor: Tensor, heads: Heads) -> tuple[View, ...]:
    """Views that make one dim of the two that heads have in what broadcasts to scores."""
    if tensor.dim() < 3:
        return ()
    fill = (("unsqueeze", 0),) * (5 - tensor.dim())
    kv_heads, each = (1, 1, *tensor.shape)[-4:-2]
    if known_equal(kv_heads, 1) != known_equal(each, 1):
        return (*fill, ("expand", -1, *heads[1:], -1, -1), ("flatten", 1, 2))
    return (*fill, ("flatten", 1, 2))


def _rank(node: Node) -> int:
    tensor = tensor_of(node)
    return -1 if tensor is None else tensor.dim()


def _method(node: Node, view: View) -> tuple[Any, ...]:
    name, *args = view
    return name, node, *args


class Drafts(Inserter):
    """Inserts nodes with their values, and takes them down: what nothing uses in the end is erased."""

    def __init__(self, like: Node, drafts: list[Node]) -> None:
        super().__init__(like)
        self._drafts = drafts

    def __call__(self, target: Any, *args: Any) -> Node:
        node = super().__call__(target, *args)
        values = map_arg(args, value_of)
        run = getattr(values[0], target) if isinstance(target, str) else target
        node.meta["example_value"] = run(*(values[1:] if isinstance(target, str) else values))
        self._drafts.append(node)
        return node

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        tensor = tensor_of(node)
        return node if tensor is None or tensor.dtype == dtype else self("to", node, dtype)

    def views(self, factor: Factor) -> Node:
        node = factor.node
        for view in factor.views:
            node = self(*_method(node, view))
        return node


def erase_unused(graph: Graph, drafts: Sequence[Node]) -> None:
    """Erase drafts that nothing uses, the last one first."""
    there = set(graph.nodes) if drafts else set()
    for node in reversed(drafts):
        if node in there and not node.users:
            graph.erase_node(node)
