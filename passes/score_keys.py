"""The edit of a graph for the scores of an indexer: `tatten::index_scores` takes the place of their last node."""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.fx import Node

from tatten.passes.describe import show
from tatten.passes.find_index_scores import IndexerScores
from tatten.passes.findings import Rewritten, source_location
from tatten.passes.products import Factor, viewed
from tatten.passes.replace import Inserter, erase_unused_of
from tatten.passes.symbolic import known_tensor

OP = torch.ops.tatten.index_scores.default


def apply_index_scores(scores: IndexerScores) -> Rewritten:
    """Edit the graph, and return the finding for the report."""
    # The report is read off first: nodes may be erased.
    node, mask = scores.masked.node, scores.masked.mask
    named = ("q", scores.query), ("k", scores.key), ("w", scores.weights), ("mask", mask), ("scale", scores.key_scale)
    shapes = show((name, None if x is None else x.node) for name, x in named)
    location, cost = source_location(scores.product), scores.cost
    insert = Inserter(scores.product)
    with node.graph.inserting_before(node):
        operands = [_viewed(insert, x) for x in (scores.query, scores.key, scores.weights)]
        scale: object = scores.scale
        for factor in scores.factors:
            scale = factor if scale == 1 else insert(operator.mul, factor, scale)
        options = {} if scale == 1 else {"scale": scale}
        if mask is not None:
            left = _viewed(insert, mask)
            options["attn_mask"] = insert(operator.invert, left) if scores.masked.inverted else left
        if scores.key_scale is not None:
            options["key_scale"] = _scale_of_each(
                insert, scores.key_scale, operands[1], known_tensor(scores.query.node)
            )
        made = insert(OP, *operands, **options)
        made = made if scores.masked.dim is None else insert("unsqueeze", made, scores.masked.dim)
    made.meta.update(node.meta)
    node.replace_all_uses_with(made)
    erase_unused_of(scores.path)
    notes = "" if cost is None else cost.assumed, scores.not_narrow and f"not read in 8 bits: {scores.not_narrow}"
    return Rewritten(location, str(OP), shapes, cost, "; ".join(filter(None, notes)), attention=False)


def _scale_of_each(insert: Inserter, scale: Factor, key: Node, query: Tensor) -> Node:
    """Insert the scale of each key, in a dtype that the op takes; views alone otherwise."""
    node, tensor = _viewed(insert, scale), viewed(scale)
    assert tensor is not None
    node = node if tensor.dtype in (torch.float32, query.dtype) else insert("float", node)
    return insert("expand_as", node, insert("narrow", key, -1, 0, 1))


def _viewed(insert: Inserter, operand: Factor) -> Node:
    """Insert the views of an operand."""
    node = operand.node
    if known_tensor(node).requires_grad:  # but the scores don't: they were computed under no_grad
        node = insert("detach", node)
    for name, *args in operand.views:
        node = insert(name, node, *args)
    return node
