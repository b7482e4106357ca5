"""One mask tensor of what a block mask of `flex_attention` leaves, and the call that stands in for that attention.

The mask function is asked about all positions at once: its body, op by op, on positions that broadcast. A key is left
if its block is listed as full, or is listed and the function leaves the key.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from tatten.passes.calls import op_name
from tatten.passes.flex import INDEXING, POSITIONS, BlockList, BlockMask, FlexCall, places_of, result_of
from tatten.passes.masks import Masks, same_view
from tatten.passes.replace import Inserter
from tatten.passes.sdpa import SdpaCall
from tatten.passes.stand_in import StandIn
from tatten.passes.symbolic import FakeTensor, constant, tensor_of, value_of

SCALAR = (1, 1, 1, 1)  # a scalar among tensors that broadcast to scores


def insert_flex(found: FlexCall, masks: Masks) -> StandIn:
    """Insert a call in the place of `flex_attention`."""
    graph = found.node.graph
    factors = (found.query, found.key, found.value)
    with graph.inserting_before(found.node):
        node = graph.call_function(F.scaled_dot_product_attention, factors)
    node.meta.update(found.node.meta)
    node.meta["example_value"] = tensor_of(found.out)
    call = SdpaCall(
        node,
        *factors,
        scale=found.scale,
        enable_gqa=True,
        softcap=found.softcap,
        form=found.form,
        log_sums=found.log_sums,
        path=found.path,
    )
    mask = found.mask
    if mask is not None:
        made = DenseMask(call, masks)
        attn_mask = masks.once_unless_written(made.key(mask), call, mask.reads, lambda: made.insert(mask))
        call = dataclasses.replace(call, attn_mask=attn_mask)
        node.args = (*factors, attn_mask)
    masks.drafts.append(node)  # after what it uses
    return StandIn.put(call, [(node, found.out)])


class DenseMask:
    """Inserts the nodes that compute a block mask for all queries and keys of a call."""

    def __init__(self, call: SdpaCall, masks: Masks) -> None:
        self._insert = Inserter(call.node)
        self._call = call
        self._drafts = masks.drafts
        query, key = tensor_of(call.query), tensor_of(call.key)
        assert isinstance(query, FakeTensor)
        assert key is not None
        self._fake_mode, self._device = query.fake_mode, query.device
        self._extents = (*query.shape[:3], key.shape[2])

    def key(self, mask: BlockMask) -> object:
        """A key that is equal for block masks that leave the same keys."""
        code = "" if mask.leaves is None else mask.leaves.code
        captured = tuple(same_view(x) if isinstance(x, Node) else x for x in mask.captured)
        extents = tuple(map(str, self._extents))
        return "flex", code, captured, mask.partial, mask.full, mask.q_block, mask.kv_block, extents

    def insert(self, mask: BlockMask) -> Node:
        """Insert the mask: bool, `[batch or 1, heads or 1, q_len, kv_len]`."""
        positions = [self._position(dim) for dim in range(POSITIONS)]
        left = None if mask.leaves is None else self._leaves(mask.leaves.graph, (*positions, *mask.captured))
        if mask.partial is not None:
            listed = self._listed(mask.partial, mask, positions)
            left = listed if left is None else self(operator.and_, listed, left)
        if mask.full is not None:
            full = self._listed(mask.full, mask, positions)
            left = full if left is None else self(operator.or_, full, left)
        assert left is not None
        return left

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self._insert(target, *args)
        node.kwargs = kwargs
        values = map_arg(args, value_of)
        with self._fake_mode:
            run = getattr(values[0], target) if isinstance(target, str) else target
            value = run(*(values[1:] if isinstance(target, str) else values), **map_arg(kwargs, value_of))
        node.meta["example_value"] = value
        self._drafts.append(node)
        return node

    def _size(self, dim: int) -> Any:
        """A size of scores, as an argument."""
        size = constant(self._extents[dim])
        if size is not None:
            return size
        return self("size", self._call.key if dim == 3 else self._call.query, 2 if dim == 3 else dim)

    def _position(self, dim: int) -> Node:
        shape = [1] * POSITIONS
        shape[dim] = -1
        arange = self(torch.arange, self._size(dim), dtype=torch.int32, device=self._device)
        return self("view", arange, *shape)

    def _leaves(self, body: Graph, given: Iterable[Any]) -> Node:
        """Insert what a function says of all positions; `given` are its arguments."""
        made: dict[Node, Any] = dict(zip(body.find_nodes(op="placeholder"), given, strict=True))
        made = {node: self._scalar(x) for node, x in made.items()}
        places: dict[Node, tuple[Any, ...]] = {}
        for node in body.nodes:
            if node.op == "output" or node in made:
                continue
            if op_name(node) in INDEXING:
                base, *at = (*places.get(node.args[0], (node.args[0],)), *places_of(node))
                places[node] = (base, *at)
                if value_of(node).dim() == 0:
                    made[node] = self._scalar(self._element(made[base], map_arg(at, made.__getitem__)))
            else:
                args, kwargs = map_arg((node.args, node.kwargs), made.__getitem__)
                made[node] = self._scalar(self(node.target, *args, **kwargs))
        result: Node = made[result_of(body)]
        return result

    def _scalar(self, x: Any) -> Any:
        """A scalar as a tensor that broadcasts to scores; anything else as it is."""
        tensor = tensor_of(x)
        return x if tensor is None or tensor.dim() else self("view", x, *SCALAR)

    def _element(self, base: Node, places: Sequence[Any]) -> Node:
        """Insert `base[places]`. Places that only unlisted blocks have may lie outside: any element will do there."""
        tensor = tensor_of(base)
        assert tensor is not None
        inside = []
        for dim, place in enumerate(places):
            if isinstance(place, Node):
                size = constant(tensor.shape[dim])
                place = self(torch.remainder, place, self("size", base, dim) if size is None else size)
            inside.append(place)
        return self(operator.getitem, base, tuple(inside))

    def _listed(self, blocks: BlockList, mask: BlockMask, positions: list[Node]) -> Node:
        """Insert whether the block of each key is listed for that of each query."""
        indices = tensor_of(blocks.indices)
        assert indices is not None
        rounded = self._plus(self._size(3), mask.kv_block - 1)
        number = (
            rounded // mask.kv_block if isinstance(rounded, int) else self(operator.floordiv, rounded, mask.kv_block)
        )
        width = constant(indices.shape[3])
        slots = self(torch.arange, self("size", blocks.indices, 3) if width is None else width, device=self._device)
        counts = self("unsqueeze", blocks.counts, -1)
        there = self(torch.where, self(operator.lt, slots, counts), blocks.indices, number)
        there = self("long", there)
        sizes = [self._size_of(blocks.indices, dim) for dim in range(3)]
        table = self("new_zeros", there, (*sizes, self._plus(number, 1)), dtype=torch.bool)
        table = self("scatter", table, -1, there, True)
        rows, columns = (self(operator.floordiv, positions[d], n) for d, n in ((2, mask.q_block), (3, mask.kv_block)))
        rows, columns = self("view", rows, -1, 1), self("view", columns, 1, -1)
        every = slice(None)
        return self(operator.getitem, table, (every, every, rows, columns))

    def _size_of(self, node: Node, dim: int) -> Any:
        tensor = tensor_of(node)
        assert tensor is not None
        size = constant(tensor.shape[dim])
        return self("size", node, dim) if size is None else size

    def _plus(self, number: Any, more: int) -> Any:
        return number + more if isinstance(number, int) else self(operator.add, number, more)
