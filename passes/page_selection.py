"""Read how a program selects pages, or single keys, from a pool through a block table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from tatten.ops.layout import BATCH, LENGTH
from tatten.passes.block_table import BlockTable, integers_cast_by, table_of_flat_index
from tatten.passes.calls import argument, op_name
from tatten.passes.drafts import Drafting
from tatten.passes.mutation import writes
from tatten.passes.op_names import RESHAPES
from tatten.passes.rows import INTEGERS, index_among
from tatten.passes.symbolic import FakeTensor, known_equal, known_shape, known_tensor, tensor_of
from tatten.passes.views import Part, Walk, source_of, step_back, undo_reshape, walks_back

ALONG = {"gather", "take_along_dim"}
BY_INDEX = {"getitem", "index", "index_select"}


@dataclass(frozen=True)
class PageSelection:
    """The selection of pages, or of keys, that a node makes.

    Attributes:
        walk: a walk to the tensor that it selects from. The part of `dim` in it has no meaning.
        dim: the dim of pages.
        places: the parts of the index's dims: sequences, and the pages of each.
        table: the block table.
    """

    walk: Walk
    dim: int
    places: tuple[Part | None, Part | None]
    table: BlockTable


def selection_at(walk: Walk, draft: Drafting) -> PageSelection | None:
    """Return the selection that the node at the end of a walk makes, or None."""
    node, name = walk.node, op_name(walk.node)
    source = source_of(node)
    before, after = tensor_of(source), tensor_of(node)
    if source is None or not isinstance(before, FakeTensor) or after is None or writes(node):
        return None
    if before.dtype != after.dtype or before.device != after.device:
        return None
    if name in ALONG:
        return _along_keys(walk, source)
    if name in RESHAPES and op_name(source) in BY_INDEX:
        return _split_after(walk, source)
    index = index_of(node, before.dim())
    if index is None:
        return None
    dim, entries, wraps = index
    numbers, shape = known_tensor(entries), before.shape
    if not known_shape(after.shape, (*shape[:dim], *numbers.shape, *shape[dim + 1 :])):
        return None
    if numbers.dim() == 2:
        return _selection_along(walk, walk.parts, (node,), source, dim, BlockTable(entries, wraps))
    part = walk.parts[dim]
    if numbers.dim() == 1 and part is not None and part[0] == LENGTH:  # of one sequence
        table = BlockTable(draft("unsqueeze", entries, 0), wraps)
        parts = (*walk.parts[:dim], None, *walk.parts[dim:])
        return _selection_along(walk, parts, (node,), source, dim, table)
    return None


def _selection_along(
    walk: Walk, parts: Sequence[Part | None], path: Sequence[Node], source: Node, dim: int, table: BlockTable
) -> PageSelection:
    """Return the selection along `dim` of `source` by a table.

    `parts` are those of the result, which has two dims, of sequences and pages, in place of `dim`.
    """
    source_parts = (*parts[:dim], None, *parts[dim + 2 :])
    path = (*walk.path, *path)
    back = dataclasses.replace(walk, node=source, parts=source_parts, path=path)
    return PageSelection(back, dim, (parts[dim], parts[dim + 1]), table)


def index_of(node: Node, rank: int) -> tuple[int, Node, bool] | None:
    """Return the dim along which a node selects, its index, and whether negative numbers wrap, or None."""
    match op_name(node):
        case "index_select":
            index, dim = argument(node, 2, "index"), argument(node, 1, "dim")
        case "getitem":
            index, dim = index_among(node.args[1], rank)
        case "index":
            key = tuple(slice(None) if part is None else part for part in argument(node, 1, "indices", ()))
            index, dim = index_among(key, rank)
        case _:
            return None
    numbers = tensor_of(index)
    if not isinstance(index, Node) or not isinstance(dim, int) or not isinstance(numbers, FakeTensor):
        return None
    device = known_tensor(source_of(node)).device
    if numbers.dtype not in INTEGERS or numbers.device != device:
        return None
    return dim % rank, index, op_name(node) != "index_select"


def _split_after(walk: Walk, selected: Node) -> PageSelection | None:
    """Return the selection by a flattened table in `x[table.flatten()].view(batch, ...)`, or None."""
    source, after, rows = source_of(selected), known_tensor(walk.node), known_tensor(selected)
    before = tensor_of(source)
    if source is None or before is None or writes(selected) or before.dtype != rows.dtype:
        return None
    index = index_of(selected, before.dim())
    if index is None or known_tensor(index[1]).dim() != 1:
        return None
    dim, entries, wraps = index
    table = table_of_flat_index(entries, wraps)
    if table is None:
        return None
    shape = (*rows.shape[:dim], *table.shape, *rows.shape[dim + 1 :])
    split = undo_reshape(walk, selected, shape, after.shape)
    if split is None:
        return None
    return _selection_along(walk, split.parts, (walk.node, selected), source, dim, table)


def _along_keys(walk: Walk, source: Node) -> PageSelection | None:
    """Return the selection of keys from one pool in `x.expand(batch, ...).gather(2, index)`, or None."""
    node = walk.node
    index, dim = argument(node, 2, "index"), argument(node, 1, "dim")
    if op_name(node) == "take_along_dim":
        index, dim = argument(node, 1, "indices"), argument(node, 2, "dim")
    before, after, numbers = known_tensor(source), known_tensor(node), tensor_of(index)
    if not isinstance(dim, int) or not isinstance(numbers, FakeTensor) or numbers.dtype not in INTEGERS:
        return None
    dim %= before.dim()
    others = [n for d, n in enumerate(before.shape) if d != dim]
    if not known_shape(others, [n for d, n in enumerate(after.shape) if d != dim]):
        return None
    if not known_shape(numbers.shape, after.shape) or walk.parts[dim] not in (None, (LENGTH,)):
        return None
    table = _table_along(index, walk.parts, dim, op_name(node) == "take_along_dim")
    if table is None:
        return None
    for back in walks_back(dataclasses.replace(walk, node=source, stretched=(), path=(*walk.path, node))):
        pool = known_tensor(back.node)
        keys = [d for d, part in enumerate(back.parts) if part == walk.parts[dim]]
        batch_dims = (d for d, part in enumerate(back.parts) if part is not None and part[0] == BATCH)
        if back.rows or len(keys) != 1 or not all(known_equal(pool.shape[d], 1) for d in batch_dims):
            continue
        parts = tuple(None if part is None or part[0] in (BATCH, LENGTH) else part for part in back.parts)
        grown = tuple((part, n) for part, n in back.stretched if part[0] != BATCH)
        back = dataclasses.replace(back, parts=parts, stretched=(*walk.stretched, *grown))
        return PageSelection(back, keys[0], ((BATCH,), walk.parts[dim]), table)
    return None


def _table_along(index: Node, parts: tuple[Part | None, ...], dim: int, wraps: bool) -> BlockTable | None:
    """Return the table `[batch, keys]` that an index was expanded from, or None.

    The dims of the index have these parts. Keys are along `dim`.
    """
    walk: Walk | None = Walk(index, parts)
    while walk is not None and known_tensor(walk.node).dim() != 2:
        source = integers_cast_by(walk.node)
        walk = step_back(walk) if source is None else walk.step(source, walk.parts)
    if walk is None or walk.rows or any(part[0] in (BATCH, LENGTH) for part, _ in walk.stretched):
        return None
    batch, keys = walk.parts
    in_order = (batch == (BATCH,) or known_equal(known_tensor(walk.node).shape[0], 1)) and keys == parts[dim]
    return BlockTable(walk.node, wraps, walk.path) if in_order else None
