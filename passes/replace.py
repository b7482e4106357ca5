"""Graph changes that all rewrites share: insert an op, and replace SDPA by its output."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from tatten.passes.calls import OpOverload, argument, op_name
from tatten.passes.drafts import Drafts
from tatten.passes.literals import FULL, ONES, ZEROS
from tatten.passes.mutation import writes
from tatten.passes.picks import Picks
from tatten.passes.sdpa import SdpaCall
from tatten.passes.symbolic import hint, known_equal, known_shape, known_tensor, tensor_of


def insert_op(call: SdpaCall, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
    """Insert a call of `op`, which returns a state, before SDPA."""
    with call.node.graph.inserting_before(call.node):
        state = call.node.graph.call_function(op, args, kwargs)
    state.meta.update({k: v for k, v in call.source_node.meta.items() if k != "example_value"})
    return state


def item(state: Node, index: int) -> Node:
    """Insert a `getitem` of `out` or `lse` from a state."""
    return state.graph.call_function(operator.getitem, (state, index))


def output_of(call: SdpaCall, state: Node, out: Node | None = None) -> Node:
    """Insert the nodes that compute SDPA's result from a state. `out` replaces the output in the state."""
    result = known_tensor(call.result)
    with call.node.graph.inserting_before(call.node):
        out = item(state, 0) if out is None else out
        out.meta.update(call.source_node.meta, example_value=result)
        return with_strides_of(Inserter(call.source_node), out, result)


def replace_call(call: SdpaCall, state: Node, out: Node, orphans: Iterable[Node], drafts: Drafts) -> None:
    """Replace all results of a call by nodes that are computed from its state and from `out`, SDPA's result.

    Nodes that only the call used, and `orphans` without users, are erased.
    """
    drafts.bind(call.result, out)
    for node in call.log_sums:
        drafts.bind(node, _log_sum(call, state, node))
    replaced = call.replaced
    for node, draft in replaced.items():
        node.replace_all_uses_with(drafts.insert(draft, call.node))
    erase_unused_of({*orphans, *call.path, *replaced})


def _log_sum(call: SdpaCall, state: Node, node: Node) -> Node:
    """Insert the lse of a state in the dtype and shape of `node`, the program's lse."""
    like, scores = known_tensor(node), tensor_of(argument(node, 0, "input"))
    merged = op_name(node) == "logsumexp" and scores is not None and scores.dim() == 3
    with call.node.graph.inserting_before(call.node):
        lse = item(state, 1)
        lse = call.node.graph.call_method("to", (lse, like.dtype))
        if merged:
            lse = call.node.graph.call_method("flatten", (lse, 0, 1))
        if like.dim() == (3 if merged else 4):
            lse = call.node.graph.call_method("unsqueeze", (lse, -1))
    lse.meta.update(node.meta)
    return lse


def erase_unused_of(nodes: Iterable[Node]) -> None:
    """Erase those of `nodes` that have no users besides erased nodes.

    `graph.eliminate_dead_code()` would also delete the writes to the cache from a Dynamo graph.
    """
    for node in sorted(nodes, reverse=True):
        if not node.users:
            node.graph.erase_node(node)


def erase_selection(picks: Picks | None) -> None:
    """Erase the nodes that made a mask from indices, unless other nodes read them.

    A node with `out=` stays, as does a write to memory that an earlier tensor may share.
    """
    if picks is None:
        return
    erase_unused_of(node for node in picks.path if not writes(node))
    for filled, scatter in picks.written:
        unused = op_name(filled) in FULL | ZEROS | ONES and {*filled.users} == {scatter} and not scatter.users
        if unused:
            erase_unused_of((filled, scatter))


class Inserter:
    """A function that inserts calls of PyTorch's methods and functions, with the source location of `like`."""

    def __init__(self, like: Node) -> None:
        self._graph = like.graph
        self._meta = {k: v for k, v in like.meta.items() if k not in ("example_value", "val")}

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        call = self._graph.call_method if isinstance(target, str) else self._graph.call_function
        node = call(target, args, kwargs)
        node.meta.update(self._meta)
        return node


def scale_of(call: SdpaCall) -> Any:
    return call.scale if call.scale is None or isinstance(call.scale, Node) else float(call.scale)


def with_strides_of(insert: Callable[..., Node], out: Node, like: Tensor) -> Node:
    """Give a contiguous `out` the strides of `like`: a later `view` may depend on the strides of SDPA's result."""
    strides = [hint(stride) for stride in like.stride()]
    if known_equal(like.shape[2], 1) or None in strides:
        return out  # with one query, [b, h, 1, d] and [b, 1, h, d] are the same in memory
    order = sorted(range(4), key=lambda dim: -(strides[dim] or 0))
    if order == list(range(4)):
        return out
    back = [order.index(dim) for dim in range(4)]
    dense = like.permute(order)
    if not known_shape(dense.stride(), torch.empty(dense.shape, device="meta").stride()):
        return out
    out = insert("permute", insert("contiguous", insert("permute", out, order)), back)
    out.meta["example_value"] = like
    return out
