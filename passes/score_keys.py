"""Edit a graph for the scores of an indexer: `tatten::index_scores` replaces their last node."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from tatten.passes.describe import bases, show
from tatten.passes.find_index_scores import IndexerScores
from tatten.passes.findings import Rewritten, source_location
from tatten.passes.index_segments import KeySegments
from tatten.passes.products import Factor, viewed
from tatten.passes.replace import Inserter, erase_unused_of
from tatten.passes.symbolic import known_tensor

OP = torch.ops.tatten.index_scores.default


def apply_index_scores(scores: IndexerScores) -> Rewritten:
    """Edit the graph, and return the finding for the report."""
    # The report comes first: the edit may erase the nodes that it describes.
    node, mask = scores.masked.node, scores.masked.mask
    keys = [scores.key.node] if scores.segments is None else bases(scores.segments.stored)
    others = ("w", scores.weights), ("mask", mask), ("scale", scores.key_scale)
    operands = [("q", scores.query.node), *(("k", x) for x in keys), *((name, x and x.node) for name, x in others)]
    shapes = show(operands)
    location, cost = source_location(scores.product), scores.cost
    insert = Inserter(scores.product)
    with node.graph.inserting_before(node):
        scale: object = scores.scale
        for factor in scores.factors:
            scale = factor if scale == 1 else insert(operator.mul, factor, scale)
        options = {} if scale == 1 else {"scale": scale}
        if mask is not None:
            attn_mask = _viewed(insert, mask)
            options["attn_mask"] = insert(operator.invert, attn_mask) if scores.masked.inverted else attn_mask
        query, weights = (_viewed(insert, x) for x in (scores.query, scores.weights))
        if scores.segments is None:
            result = _score_all_keys(insert, scores, query, weights, options)
        else:
            result = _score_segments(insert, scores.segments, mask, query, weights, options)
        result = result if scores.masked.dim is None else insert("unsqueeze", result, scores.masked.dim)
    result.meta.update(node.meta)
    node.replace_all_uses_with(result)
    erase_unused_of(scores.path)
    notes = "" if cost is None else cost.assumed, scores.not_narrow and f"not read in 8 bits: {scores.not_narrow}"
    return Rewritten(location, str(OP), shapes, cost, "; ".join(filter(None, notes)), attention=False)


def _score_all_keys(
    insert: Inserter, scores: IndexerScores, query: Node, weights: Node, options: dict[str, Any]
) -> Node:
    """Insert the op for keys that are one tensor."""
    key = _viewed(insert, scores.key)
    if scores.key_scale is not None:
        scale = _scale_of_each(insert, scores.key_scale, key, known_tensor(scores.query.node))
        options = options | {"key_scale": scale}
    return insert(OP, query, key, weights, **options)


def _score_segments(
    insert: Inserter,
    segments: KeySegments,
    mask: Factor | None,
    query: Node,
    weights: Node,
    options: dict[str, Any],
) -> Node:
    """Insert the op for each segment of the keys, and a `cat` of the scores."""
    full_mask, split = None if mask is None else viewed(mask), None
    if full_mask is not None:
        split = insert("split_with_sizes", options["attn_mask"], segments.sizes(), 2)
    scores = []
    for i, (stored, key) in enumerate(zip(segments.stored, segments.keys(insert), strict=True)):
        rows = [segments.as_rows(insert, stored, x) for x in (query, weights)]
        if split is not None and full_mask is not None:
            columns = insert(operator.getitem, split, i)
            options = options | {"attn_mask": segments.mask_as_rows(insert, stored, columns, full_mask)}
        scores.append(segments.as_sequences(insert, stored, insert(OP, rows[0], key, rows[1], **options)))
    return scores[0] if len(scores) == 1 else insert(torch.cat, scores, -1)


def _scale_of_each(insert: Inserter, scale: Factor, key: Node, query: Tensor) -> Node:
    """Insert the views of a scale that make it one number for each key, in a dtype that the op takes."""
    node, tensor = _viewed(insert, scale), viewed(scale)
    assert tensor is not None
    node = node if tensor.dtype in (torch.float32, query.dtype) else insert("float", node)
    return insert("expand_as", node, insert("narrow", key, -1, 0, 1))


def _viewed(insert: Inserter, operand: Factor) -> Node:
    """Insert the views of an operand."""
    node = operand.node
    if known_tensor(node).requires_grad:  # the scores don't, as the program ran under no_grad
        node = insert("detach", node)
    for name, *args in operand.views:
        node = insert(name, node, *args)
    return node
