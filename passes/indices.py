"""Insert the indices of the keys that a call selects, for each segment of keys, once for layers that share them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from tatten.ops.layout import HEADS, LENGTH
from tatten.ops.picks import counted_from, key_indices, without_duplicates
from tatten.ops.sizes import ceil_div
from tatten.passes.drafts import Drafting, Drafts
from tatten.passes.masks import size_of
from tatten.passes.sdpa import SdpaCall
from tatten.passes.stored import Stored
from tatten.passes.symbolic import FakeTensor, constant, known_tensor, value_of

Segments = Sequence[Stored]
Numbers = Callable[[], tuple[int | Node, ...]]


def insert_indices(call: SdpaCall, segments: Segments, drafts: Drafts) -> list[dict[str, Any]]:
    """Insert the indices of the keys that an op reads.

    Returns:
        The op's arguments for each segment; empty if it reads all keys.
    """
    picks = call.picks
    if picks is None or picks.names_all:
        return [{} for _ in segments]
    draft, indices, block = Drafting(drafts, call.source_node), picks.indices, picks.block
    kv_heads = constant(segments[0].size(HEADS)) or 1
    if picks.heads not in (1, kv_heads):
        indices = draft("repeat_interleave", indices, kv_heads // picks.heads, 1)
    shares = None if call.shares is None else call.shares[0]
    full = segments if shares is None else [x.segment for x in shares]
    insert = _IndexInserter(call, drafts)
    node = drafts.insert(draft.cast(indices, torch.int32), call.node)
    if not picks.distinct:
        node = insert.distinct(node, block, full)
    if block > 1 and (shares is not None or not all(_in_full_blocks(full[:i], block) for i in range(len(full)))):
        keys = insert.keys(node, block, full)
        node, block = drafts.insert(draft.cast(keys, torch.int32), call.node), 1
    nodes = [insert.counted_after(node, block, full[:i]) for i in range(len(full))]
    if shares is not None:
        nodes = [drafts.insert(x.indices(draft, n), call.node) for x, n in zip(shares, nodes, strict=True)]
    options = {"index_block": block, "rest_bias": picks.rest_bias}
    defaults = {"index_block": 1, "rest_bias": None}
    options = {name: x for name, x in options.items() if x != defaults[name]}
    return [{"indices": x, **options} for x in nodes]


class _IndexInserter:
    """Inserts functions of indices of keys, or of blocks of keys, and of the lengths of segments, before one call."""

    def __init__(self, call: SdpaCall, drafts: Drafts) -> None:
        self._call, self._drafts = call, drafts

    def distinct(self, indices: Node, block: int, segments: Segments) -> Node:
        """Insert the indices without duplicates."""

        def numbers() -> tuple[int | Node]:
            size = _total(segments)
            if isinstance(size, int):
                return (ceil_div(size, block),)
            return (size if block == 1 else _called(ceil_div, size, block),)

        return self._once(without_duplicates, indices, block, segments, numbers)

    def keys(self, blocks: Node, block: int, segments: Segments) -> Node:
        """Insert the indices of all keys of the blocks."""
        return self._once(key_indices, blocks, block, segments, lambda: (_total(segments), block))

    def counted_after(self, indices: Node, block: int, before: Segments) -> Node:
        """Insert the indices, counted from the end of the segments `before`, whose keys are full blocks."""

        def numbers() -> tuple[int | Node]:
            size = _total(before)
            return (size // block if isinstance(size, int) else size,)

        return self._once(counted_from, indices, block, before, numbers) if before else indices

    def _once(
        self, function: Callable[..., Tensor], indices: Node, block: int, segments: Segments, numbers: Numbers
    ) -> Node:
        tensor = known_tensor(indices)

        def insert() -> Node:
            sizes = numbers()
            node = self._call.node.graph.call_function(function, (indices, *sizes))
            assert isinstance(tensor, FakeTensor)
            with tensor.fake_mode:
                example = function(tensor, *map(_value, sizes))
            node.meta.update(self._call.source_node.meta, example_value=example)
            return node

        lengths = ",".join(str(x.size(LENGTH)) for x in segments)
        return self._drafts.once((function, indices, block, lengths), self._call.node, [tensor], insert)


def _in_full_blocks(segments: Segments, block: int) -> bool:
    """Return True if the keys of segments are known to be full blocks."""
    sizes = [constant(x.size(LENGTH)) for x in segments]
    return None not in sizes and sum(x or 0 for x in sizes) % block == 0


def _total(segments: Segments) -> int | Node:
    """Return the number of keys of several segments, as an argument of an op."""
    total: int | Node = 0
    for size in (size_of(x, LENGTH) for x in segments):
        if isinstance(total, Node):
            total = _called(operator.add, total, size)
        else:
            total = total + size if isinstance(size, int) else _called(operator.add, size, total) if total else size
    return total


def _called(function: Callable[[Any, Any], Any], size: Node, other: int | Node) -> Node:
    """Insert a function of sizes."""
    node = size.graph.call_function(function, (size, other))
    node.meta["example_value"] = function(_value(size), _value(other))
    return node


def _value(number: int | Node) -> Any:
    return value_of(number) if isinstance(number, Node) else number
