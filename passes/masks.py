"""Masks and rows of a graph. A tensor made from them is computed once for all layers that share them."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import SymInt
from torch.fx import Node

from tatten.ops.layout import BATCH, HEADS, LENGTH
from tatten.passes.autocast import autocast_dtype
from tatten.passes.calls import op_name
from tatten.passes.drafts import Drafting, Drafts
from tatten.passes.mask_lengths import MaskLength
from tatten.passes.recomputed import Recomputed
from tatten.passes.sdpa import SdpaCall
from tatten.passes.stored import Stored
from tatten.passes.symbolic import constant, known_equal, same_storage, tensor_of


class Masks:
    """The nodes that were computed from masks and rows, and the drafts, while the calls of a graph are rewritten."""

    def __init__(self) -> None:
        self._columns: dict[object, list[Node]] = {}
        self._lengths: dict[MaskLength, Node] = {}
        self._recomputed = Recomputed()
        self._views: dict[object, Node] = {}
        self.drafts = Drafts()

    def first_view(self, node: Node) -> Node:
        """Return the first node that was passed here, is the same view as `node` and is still in the graph.

        Return `node` itself if there is no earlier one.
        """
        key = same_view(node)
        first = self._views.get(key)
        if first is None or node < first or first.prev.next is not first:  # or it was erased
            self._views[key] = first = node
        return first

    def _once(self, key: object, call: SdpaCall, read: Iterable[object], make: Callable[[], Node]) -> Node:
        """Return the node that `make` inserts before this call, or inserted for an equal `key` before an earlier call.

        A new node is made if a tensor of one of the nodes in `read` was written since.
        """
        tensors = [tensor for tensor in map(tensor_of, read) if tensor is not None]
        return self.drafts.once(key, call.node, tensors, make)

    def cast(self, call: SdpaCall) -> SdpaCall:
        """Return the call with the first of equal masks, cast as autocast would cast SDPA's mask."""
        if call.attn_mask is not None:
            call = dataclasses.replace(call, attn_mask=self._recomputed.first(call.attn_mask, call.node))
        mask = tensor_of(call.attn_mask)
        if mask is None or mask.dtype in (torch.bool, torch.float64) or call.form:
            return call
        dtype = autocast_dtype(call.node, mask.device.type)
        if dtype is None or dtype == mask.dtype:
            return call
        cast = self.drafts.make(call.source_node, "to", self.first_view(call.attn_mask), dtype)
        return dataclasses.replace(call, attn_mask=self.drafts.insert(cast, call.node))

    def as_operand(self, stored: Stored, call: SdpaCall) -> Node:
        """Insert the views that make stored keys or values `[batch, heads, length, head_dim]` before the call."""
        return self.drafts.insert(stored.as_operand(Drafting(self.drafts, stored.base)), call.node)

    def block_table(self, call: SdpaCall, pool: Stored) -> Node:
        """Insert the block table of keys in pages, as the op takes it, once for all layers."""
        table, n_pages = pool.table, pool.size_in_base(BATCH)
        assert table is not None
        draft, entries = Drafting(self.drafts, call.source_node), self._recomputed.first(table.entries, call.node)
        size = constant(n_pages)
        pages = draft("size", pool.base, pool.dims[BATCH]) if size is None else size
        drafted = table.as_operand(self.first_view(entries), pages, draft)
        return self.drafts.insert(drafted, call.node)

    def all_pages(self, call: SdpaCall, pool: Stored, table: Node) -> Node:
        """Insert the lengths of sequences that fill all pages of a table, once for all layers."""
        draft = Drafting(self.drafts, call.source_node)
        batch, length, page = (constant(n) for n in (pool.size(BATCH), pool.size(LENGTH), pool.size_in_base(LENGTH)))
        rows = draft("size", table, 0) if batch is None else batch
        keys = draft(operator.mul, draft("size", table, 1), page) if length is None else length
        return self.drafts.insert(draft("new_full", table, (rows,), keys), call.node)

    @property
    def reads_lengths(self) -> bool:
        """True if an op reads a length in place of a mask."""
        return bool(self._lengths)

    def length(self, length: MaskLength) -> Node:
        """Insert the length behind a mask, once for all layers, where the mask compares its bound."""
        if length not in self._lengths:
            draft = length.as_operand(Drafting(self.drafts, length.compared))
            self._lengths[length] = self.drafts.insert(draft, length.compared.next)
        return self._lengths[length]

    def columns(self, call: SdpaCall, segments: Sequence[Stored]) -> list[Node | None]:
        """Insert the mask's columns for each segment, or for this rank's part of it if the segments are DTensors.

        They are the mask itself for one segment, or if the mask broadcasts over keys, and None without a mask.
        """
        mask = tensor_of(call.attn_mask)
        if call.shares is not None:
            segments = [x.segment for x in call.shares[0]]
        if mask is None or len(segments) == 1 or known_equal(mask.shape[-1], 1):
            return [call.attn_mask] * len(segments)
        cuts = () if call.shares is None else tuple((x.chunks, x.stripe) for x in call.shares[0])
        key = (call.attn_mask, ",".join(str(segment.size(LENGTH)) for segment in segments), cuts)
        if key not in self._columns or call.node < self._columns[key][0]:
            graph = call.node.graph
            with graph.inserting_before(call.node):
                sizes = [size_of(segment, LENGTH) for segment in segments]
                split = graph.call_function(torch.split, (call.attn_mask, sizes, -1))
                columns = [graph.call_function(operator.getitem, (split, i)) for i in range(len(segments))]
            parts = [mask.new_empty((*mask.shape[:-1], segment.size(LENGTH))) for segment in segments]
            for node, value in zip((split, *columns), (parts, *parts), strict=True):
                node.meta["example_value"] = value  # without one, a node might write to its inputs
            if call.shares is not None:
                draft, dim = Drafting(self.drafts, call.source_node), mask.dim() - 1
                drafted = [share.columns(draft, x, dim) for share, x in zip(call.shares[0], columns, strict=True)]
                columns = [self.drafts.insert(x, call.node) for x in drafted]
            self._columns[key] = columns
        return list(self._columns[key])

    def rows(self, call: SdpaCall, segment: Stored) -> Node | None:
        """Insert the stored row of a segment that each sequence reads, or return None for aligned blocks."""
        if segment.rows is None:
            return None
        rows, key = segment.rows, (segment.rows.key, str(segment.size(BATCH)))
        return self._once(key, call, rows.read, lambda: rows.insert(call.node.graph, size_of(segment, BATCH)))

    def row_groups(self, call: SdpaCall, segment: Stored, rows: Node | None) -> Node | None:
        """Insert the row groups of a segment, once for all layers, or return None without `rows`.

        `rows` is the row that each sequence reads.
        """
        query, stored = tensor_of(call.query), segment.size(BATCH)
        if rows is None or query is None:
            return None
        group_size = constant(query.shape[HEADS] // segment.size(HEADS))
        queries = query.shape[HEADS] // segment.size(HEADS) * query.shape[LENGTH]

        def insert() -> Node:
            graph, number = call.node.graph, constant(queries)
            if number is None:
                q_len = _size_of(call.query, LENGTH, query.shape[LENGTH])
                product = graph.call_function(operator.mul, (q_len, group_size))
                product.meta["example_value"] = queries
            args = rows, size_of(segment, BATCH), product if number is None else number
            groups = graph.call_function(torch.ops.tatten.row_groups.default, args)
            groups.meta["stack_trace"] = call.source_node.meta.get("stack_trace")
            return groups

        return self._once((rows, str(stored), str(queries)), call, (rows,), insert)

    def block_mask(
        self,
        call: SdpaCall,
        columns: Node | None,
        segment: Stored | None = None,
        rows: Node | None = None,
        every_block: bool = False,
    ) -> Node | None:
        """Insert the block mask of a mask, or of its columns for one segment, once for all layers.

        Args:
            call: the call, before which the node is inserted.
            columns: the mask, or its columns for `segment`.
            segment: the segment; None if each sequence has keys of its own.
            rows: the row of the segment that each sequence reads; None without an index.
            every_block: whether empty blocks are listed too, on CUDA.

        Returns:
            The node, or None without a mask, if the mask may broadcast over keys, or if indices name the keys.
        """
        mask, key, query = (tensor_of(x) for x in (call.attn_mask, call.key, call.query))
        selects = call.picks is not None and not call.picks.names_all
        if selects or columns is None or mask is None or key is None or query is None:
            return None
        if not known_equal(mask.shape[-1], key.shape[2]):
            return None
        one_to_one = segment is None or (rows is None and known_equal(segment.size(BATCH), query.shape[0]))
        key_of_mask = columns, "" if segment is None or one_to_one else str(segment.size(BATCH)), rows, every_block

        def insert() -> Node:
            kv_batch = () if segment is None or one_to_one else (size_of(segment, BATCH),)
            args = (columns, *kv_batch, *(() if rows is None else (rows,)))
            listing: dict[str, Any] = {"every_block": True} if every_block else {}
            block_mask = call.node.graph.call_function(torch.ops.tatten.block_mask.default, args, listing)
            block_mask.meta["stack_trace"] = call.source_node.meta.get("stack_trace")
            return block_mask

        return self._once(key_of_mask, call, (call.attn_mask, rows), insert)


def same_view(node: Node) -> object:
    """Return a key that is equal for equal views of one tensor, as each layer may slice the mask separately.

    For a copy, the key is the node itself. An index copies if it is True or a list. Any index copies if PyTorch gathers
    a DTensor first.
    """
    if op_name(node) == "from_local":
        tensor: Any = tensor_of(node)
        return same_view(node.all_input_nodes[0]), tensor.device_mesh, tensor.placements, str(tensor.shape)
    if node.target is operator.getitem and len(node.all_input_nodes) == 1 and _is_basic(node.args[1]):
        (source,) = node.all_input_nodes
        before, after = tensor_of(source), tensor_of(node)
        if before is not None and after is not None and same_storage(before, after):
            return same_view(source), repr(node.args[1])
    return node


def _is_basic(index: Any) -> bool:
    """Return True if this index makes a view and not a copy."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is ... or isinstance(part, int | slice) for part in parts)


def size_of(segment: Stored, role: int) -> int | Node:
    """Return a size of the segment as an argument of an op: a number if it is the same in every run, else a node."""
    return _size_of(segment.base, segment.dims[role], segment.size(role))


def _size_of(tensor: Node, dim: int | None, size: int | SymInt) -> int | Node:
    """Return a size of a tensor as an argument of an op: a number if it is the same in every run, else a node."""
    known = constant(size)
    if known is not None:
        return known
    node = tensor.graph.call_method("size", (tensor, dim))
    node.meta["example_value"] = size  # without one, it might write to its inputs
    return node
