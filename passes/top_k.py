"""Rewrite a top-k whose indices only attention reads, so that nothing sorts them.

`torch.topk` sorts its result. The picks of attention are a set, so their order doesn't matter. `tatten::top_picks` is
faster for few rows, and `topk(sorted=False)` for many.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from tatten.passes.calls import argument, op_name
from tatten.passes.distinct import INTEGERS, KEEP_ROWS
from tatten.passes.op_names import CASTS
from tatten.passes.replace import Inserter, erase_unused_of
from tatten.passes.symbolic import FakeTensor, constant, known_equal, known_tensor, tensor_of

LEAST_SCORES = 4096  # scores of a row; fewer were not measured
MOST_SCORES = 1 << 19  # scores of all rows: `topk(sorted=False)` is faster for more (`benchmarks/indexer.py`)


@dataclass(frozen=True)
class TopK:
    """A top-k whose values nobody uses.

    Attributes:
        node: `scores.topk(k)` over the last dim.
        indices: its indices.
        scores: float32, on a GPU.
        k: the number of indices.
        few: whether there are so few scores that the op is faster than `topk`.
    """

    node: Node
    indices: Node
    scores: Node
    k: int
    few: bool


def find_top_k(graph: Graph) -> list[TopK]:
    """Find the top-k's on a GPU whose indices only tatten's ops read."""
    candidates = [_top_k(node) for node in graph.nodes if op_name(node) == "topk"]
    return [x for x in candidates if x is not None]


def _top_k(node: Node) -> TopK | None:
    scores, k = argument(node, 0, "input", node.kwargs.get("self")), argument(node, 1, "k")
    dim, largest = argument(node, 2, "dim", -1), argument(node, 3, "largest", True)
    tensor = tensor_of(scores)
    if not isinstance(tensor, FakeTensor) or tensor.dim() == 0 or type(k) is not int or largest is not True:
        return None
    n, scores_of_all = constant(tensor.shape[-1]), constant(tensor.numel())
    if n is None or scores_of_all is None or n < LEAST_SCORES or not 1 <= k < n or dim not in (-1, tensor.dim() - 1):
        return None
    if tensor.device.type != "cuda" or tensor.dtype != torch.float32 or tensor.requires_grad:
        return None
    if len(node.users) != 1 or "out" in node.kwargs:
        return None
    (indices,) = node.users
    if op_name(indices) not in ("getitem", "getattr") or indices.args[1] not in (1, "indices"):
        return None
    return TopK(node, indices, scores, k, scores_of_all <= MOST_SCORES) if _only_read_as_picks(indices) else None


def _only_read_as_picks(indices: Node) -> bool:
    """Return True if all users of indices, through views and casts that keep the rows, read them as picks."""
    return bool(indices.users) and all(
        _reads_picks(user, indices) or (_keeps_rows(user, indices) and _only_read_as_picks(user))
        for user in indices.users
    )


def _reads_picks(user: Node, indices: Node) -> bool:
    """Return True if `user` is a tatten op that takes `indices` as its picks and as nothing else."""
    picks = user.kwargs.get("indices")
    of_segments = picks if isinstance(picks, (list, tuple)) else [picks]
    others = {x for x in user.all_input_nodes if not any(x is y for y in of_segments)}
    return str(user.target).startswith("tatten.") and any(x is indices for x in of_segments) and indices not in others


def _keeps_rows(user: Node, indices: Node) -> bool:
    before, after = tensor_of(indices), tensor_of(user)
    return (
        op_name(user) in KEEP_ROWS
        and user.args[:1] == (indices,)
        and user.all_input_nodes == [indices]
        and before is not None
        and after is not None
        and after.dim() > 0
        and after.dtype in INTEGERS
        and known_equal(before.shape[-1], after.shape[-1])
    )


def apply_top_k(top_k: TopK) -> None:
    """Replace a top-k by the op, or make it unsorted. The op's int32 indices also replace casts to int32."""
    if not top_k.few:
        top_k.node.args, top_k.node.kwargs = (top_k.scores, top_k.k), {"dim": -1, "sorted": False}
        return
    casts = [x for x in top_k.indices.users if op_name(x) in CASTS and known_tensor(x).dtype == torch.int32]
    with top_k.node.graph.inserting_before(top_k.node):
        insert = Inserter(top_k.node)
        picks = insert(torch.ops.tatten.top_picks.default, top_k.scores, top_k.k)
        for cast in casts:
            cast.replace_all_uses_with(picks)
        erase_unused_of(casts)
        if top_k.indices.users:
            top_k.indices.replace_all_uses_with(insert("to", picks, torch.int64))
    erase_unused_of([top_k.indices, top_k.node])
