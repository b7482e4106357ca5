"""Turn the block mask of a call of `flex_attention` into one mask tensor.

The body of the mask function is computed op by op, on positions that broadcast to all scores. A key counts if its block
is listed as full, or if its block is listed as partial and the function returns True.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from tatten.passes.calls import op_name
from tatten.passes.drafts import Drafting
from tatten.passes.flex import INDEXING, POSITIONS, FlexBlockList, FlexBlockMask, places_of, result_of
from tatten.passes.masks import Masks
from tatten.passes.sdpa import SdpaCall
from tatten.passes.symbolic import constant, known_tensor, tensor_of, value_of

SCALAR = (1, 1, 1, 1)  # a scalar among tensors that broadcast to scores


class DenseMask:
    """A function that drafts the dense mask of all queries and keys of a call."""

    def __init__(self, call: SdpaCall, masks: Masks) -> None:
        self._draft = Drafting(masks.drafts, call.node)
        self._call, self._masks = call, masks
        query, key = known_tensor(call.query), known_tensor(call.key)
        self._device = query.device
        self._extents = (*query.shape[:3], key.shape[2])

    def of(self, mask: FlexBlockMask) -> Node:
        """Draft the mask: bool, `[batch or 1, heads or 1, q_len, kv_len]`."""
        positions = [self._position(dim) for dim in range(POSITIONS)]
        captured = [self._masks.first_view(x) if isinstance(x, Node) else x for x in mask.captured]
        counts = None if mask.mask_mod is None else self._evaluate(mask.mask_mod.graph, (*positions, *captured))
        if mask.partial is not None:
            listed = self._listed(mask.partial, mask, positions)
            counts = listed if counts is None else self._draft(operator.and_, listed, counts)
        if mask.full is not None:
            full = self._listed(mask.full, mask, positions)
            counts = full if counts is None else self._draft(operator.or_, full, counts)
        assert counts is not None
        return counts

    def _size(self, dim: int) -> Any:
        """Return a size of scores as an argument: a number, or a draft if it is dynamic."""
        size = constant(self._extents[dim])
        if size is not None:
            return size
        return self._draft("size", self._call.key if dim == 3 else self._call.query, 2 if dim == 3 else dim)

    def _position(self, dim: int) -> Node:
        shape = [1] * POSITIONS
        shape[dim] = -1
        arange = self._draft(torch.arange, self._size(dim), dtype=torch.int32, device=self._device)
        return self._draft("view", arange, *shape)

    def _evaluate(self, body: Graph, arguments: Iterable[Any]) -> Node:
        """Draft the result of a function of positions, at all positions that `arguments` hold."""
        values: dict[Node, Any] = dict(zip(body.find_nodes(op="placeholder"), arguments, strict=True))
        values = {node: self._scalar(x) for node, x in values.items()}
        places: dict[Node, tuple[Any, ...]] = {}
        for node in body.nodes:
            if node.op == "output" or node in values:
                continue
            if op_name(node) in INDEXING:
                base, *at = (*places.get(node.args[0], (node.args[0],)), *places_of(node))
                places[node] = (base, *at)
                if value_of(node).dim() == 0:
                    values[node] = self._scalar(self._element(values[base], map_arg(at, values.__getitem__)))
            else:
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = self._scalar(self._draft(node.target, *args, **kwargs))
        result: Node = values[result_of(body)]
        return result

    def _scalar(self, x: Any) -> Any:
        """Draft a scalar as a tensor that broadcasts to scores. Return anything else unchanged."""
        tensor = tensor_of(x)
        return x if tensor is None or tensor.dim() else self._draft("view", x, *SCALAR)

    def _element(self, base: Node, places: Sequence[Any]) -> Node:
        """Draft `base[places]`. Places of unlisted blocks may be out of range, where any element will do."""
        tensor = known_tensor(base)
        inside = []
        for dim, place in enumerate(places):
            if isinstance(place, Node):
                size = constant(tensor.shape[dim])
                place = self._draft(torch.remainder, place, self._draft("size", base, dim) if size is None else size)
            inside.append(place)
        return self._draft(operator.getitem, base, tuple(inside))

    def _listed(self, blocks: FlexBlockList, mask: FlexBlockMask, positions: list[Node]) -> Node:
        """Draft a bool mask of the keys whose block is listed for the block of the query."""
        rounded = self._plus(self._size(3), mask.kv_block - 1)
        is_constant = isinstance(rounded, int)
        n_blocks = rounded // mask.kv_block if is_constant else self._draft(operator.floordiv, rounded, mask.kv_block)
        slots = self._draft(torch.arange, self._size_of(blocks.indices, 3), device=self._device)
        counts = self._draft("unsqueeze", blocks.counts, -1)
        # Entries that don't count name one more block, which no key is in.
        listed = self._draft(torch.where, self._draft(operator.lt, slots, counts), blocks.indices, n_blocks)
        listed = self._draft("long", listed)
        sizes = [self._size_of(blocks.indices, dim) for dim in range(3)]
        table = self._draft("new_zeros", listed, (*sizes, self._plus(n_blocks, 1)), dtype=torch.bool)
        table = self._draft("scatter", table, -1, listed, True)
        blocks_of = (positions[2], mask.q_block), (positions[3], mask.kv_block)
        rows, columns = (self._draft(operator.floordiv, position, block) for position, block in blocks_of)
        rows, columns = self._draft("view", rows, -1, 1), self._draft("view", columns, 1, -1)
        return self._draft(operator.getitem, table, (slice(None), slice(None), rows, columns))

    def _size_of(self, node: Node, dim: int) -> Any:
        size = constant(known_tensor(node).shape[dim])
        return self._draft("size", node, dim) if size is None else size

    def _plus(self, number: Any, more: int) -> Any:
        return number + more if isinstance(number, int) else self._draft(operator.add, number, more)
