"""One call in the place of attention that is written out, so that the passes see it as they see calls of SDPA.

The stand-in is never run: a rewrite replaces it, or it is taken back and the graph is what it was.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from tatten.ops.layout import HEADS
from tatten.passes.calls import op_name
from tatten.passes.masks import Masks, same_view
from tatten.passes.products import CASTS, Factor, View
from tatten.passes.reasons import Decline, Reason
from tatten.passes.replace import Inserter
from tatten.passes.scores import Step
from tatten.passes.sdpa import SdpaCall
from tatten.passes.symbolic import constant, known_equal, tensor_of
from tatten.passes.views import Walk, begin, source_of, way_back
from tatten.passes.written_out import WrittenOut


def sinks_of(found: WrittenOut) -> Node | Decline | None:
    """The tensor `[heads]` whose values stand beside the scores of all keys; None without one."""
    column = found.scores.sinks
    if column is None:
        return None
    query = tensor_of(found.query.node)
    start: Walk | None = begin(column) if _rank(column) == 4 else None
    while start is not None:
        for walk in way_back(start):
            tensor = tensor_of(walk.here)
            if walk.parts == ((HEADS,),) and tensor is not None and query is not None:
                if known_equal(tensor.shape[0], query.shape[1]):
                    return walk.here
                break
            start = walk
        start = _before_cast(start)
    return Decline(Reason.RELATIVE, f"`{column}` is not one number for each head")


def _before_cast(walk: Walk) -> Walk | None:
    """The walk before a cast to a wider dtype."""
    source, here = source_of(walk.here), tensor_of(walk.here)
    before = tensor_of(source)
    if source is None or before is None or here is None or op_name(walk.here) not in CASTS:
        return None
    widens = before.is_floating_point() and before.dtype.itemsize < here.dtype.itemsize
    return dataclasses.replace(walk, here=source) if widens else None


@dataclass(frozen=True)
class StandIn:
    """A call that was inserted in the place of attention written out.

    Attributes:
        call: the call, to be matched and rewritten.
        out: what has taken the place of `product`, the product with values.
    """

    call: SdpaCall
    out: Node
    product: Node

    def take_back(self) -> None:
        """Restore the graph, but for drafts."""
        self.out.replace_all_uses_with(self.product)


def insert_stand_in(found: WrittenOut, sinks: Node | None, masks: Masks) -> StandIn:
    """Insert a call in the place of attention written out."""
    place, product = found.place, found.weights.product
    insert = Drafts(place, masks.drafts)
    with place.graph.inserting_before(place):
        factors = tuple(insert.views(x) for x in (found.query, found.key, found.value))
        node = place.graph.call_function(F.scaled_dot_product_attention, factors)
    node.meta.update(product.node.meta)
    node.meta["example_value"] = _result(found)
    masks.drafts.append(node)
    call = SdpaCall(
        node,
        factors[0],
        factors[1],
        factors[2],
        scale=found.scores.scale,
        softcap=found.scores.softcap,
        sinks=sinks,
        form=found.form,
        log_sums=found.log_sums,
        path=found.path,
    )
    mask = _mask(found, call, masks)
    node.args = factors if mask is None else (*factors, mask)
    out = node
    with place.graph.inserting_before(node.next):
        if _rank(product.node) == 3:
            out = insert("flatten", out, 0, 1)
        if product.back is not None:
            out = insert(*_method(out, product.back))
    product.node.replace_all_uses_with(out)
    return StandIn(dataclasses.replace(call, attn_mask=mask), out, product.node)


def _result(found: WrittenOut) -> Tensor:
    """The fake tensor of the result as `[batch, heads, q_len, head_dim]`."""
    product = found.weights.product
    tensor = tensor_of(product.node)
    assert tensor is not None
    if product.back is not None:
        order = product.back[1:]
        tensor = tensor.permute([order.index(d) for d in range(len(order))])
    return tensor.unflatten(0, _heads(found)) if tensor.dim() == 3 else tensor


def _heads(found: WrittenOut) -> tuple[int, int]:
    assert found.heads is not None
    heads = constant(found.heads[1])
    assert heads is not None
    return -1, heads


def _mask(found: WrittenOut, call: SdpaCall, masks: Masks) -> Node | None:
    """Insert what the steps make of a score of 0: for all layers that share it, once."""
    steps = found.scores.steps
    nodes = [x.node for x in steps if x.node is not None]
    if not nodes:
        return None
    sinks = call.sinks is not None
    if len(steps) == 1 and steps[0].kind == "add" and steps[0].number == 1 and sinks:
        return Drafts(call.node, masks.drafts).views(_like_scores(nodes[0], found))
    shown = tuple((x.kind, x.number, None if x.node is None else same_view(x.node)) for x in steps)
    dtype = tensor_of(found.scores.product.node).dtype  # type: ignore[union-attr]

    def make() -> Node:
        insert, bias = Drafts(call.node, masks.drafts), None
        for step in steps:
            bias = _step(insert, step, bias, found, dtype)
        assert bias is not None
        if sinks or steps[-1].kind == "at_least":
            return bias
        # A softmax of nothing but -inf is NaN, while attention to no keys is 0.
        empty = insert("all", insert("eq", bias, -math.inf), -1, True)
        return insert("masked_fill", bias, empty, math.nan)

    return masks.once_unless_written(("bias", shown, dtype, sinks, str(found.heads)), call, nodes, make)


def _step(insert: Drafts, step: Step, bias: Node | None, found: WrittenOut, dtype: torch.dtype) -> Node | None:
    number = step.number
    if step.node is None:
        if bias is None or (step.kind == "times" and number == 1):
            return bias
        return insert("mul", bias, number) if step.kind == "times" else insert("clamp", bias, number)
    node = insert.views(_like_scores(step.node, found))
    if step.kind == "add":
        node = node if number == 1 else insert("mul", node, number)
        return node if bias is None else insert(torch.add, bias, node)
    if bias is None:
        bias = insert("to", insert(torch.zeros_like, node), dtype)
    condition = node if step.kind == "where" else insert("logical_not", node)
    return insert(torch.masked_fill, bias, condition, number)


def _like_scores(node: Node, found: WrittenOut) -> Factor:
    """A tensor that broadcasts to scores, where they are `[batch, heads, q_len, kv_len]`."""
    tensor = tensor_of(node)
    if found.heads is None or tensor is None or tensor.dim() != 3 or known_equal(tensor.shape[0], 1):
        return Factor(node)
    if known_equal(tensor.shape[0], found.heads[0] * found.heads[1]):
        return Factor(node, (("unflatten", 0, _heads(found)),))
    return Factor(node)


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
        values = map_arg(args, tensor_of)
        run = getattr(values[0], target) if isinstance(target, str) else target
        node.meta["example_value"] = run(*(values[1:] if isinstance(target, str) else values))
        self._drafts.append(node)
        return node

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
