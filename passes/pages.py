"""Keys and values that a program gathers through a block table: found as pages of the pool that it gathers from.

`pool[table]` copies the pages of each sequence. The op reads them in the pool, if the copy has pages and the keys in
each of them in order, and nothing else reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from tatten.ops.layout import BATCH, LENGTH
from tatten.ops.pages import LARGEST_PAGE
from tatten.passes.block_table import BlockTable, integers_cast_by, of_flat_index, of_slots, without_casts
from tatten.passes.calls import argument, op_name
from tatten.passes.drafts import Drafting, Drafts, dtensor_behind
from tatten.passes.metadata import reads_values
from tatten.passes.mutation import writes
from tatten.passes.op_names import CASTS, REORDERS, RESHAPES
from tatten.passes.reasons import Decline, Reason
from tatten.passes.rows import INTEGERS, index_among
from tatten.passes.sdpa import SdpaCall
from tatten.passes.stored import Stored, stored_at, walk_on
from tatten.passes.symbolic import (
    FakeTensor,
    constant,
    guard_equal,
    known_equal,
    known_shape,
    known_tensor,
    same_storage,
    tensor_of,
)
from tatten.passes.views import Part, Size, Walk, source_of, step_back, undo_reshape, way_back

ALONG = {"gather", "take_along_dim"}
BY_INDEX = {"getitem", "index", "index_select"}


@dataclass(frozen=True)
class _Selection:
    """The selection of pages, or of keys, that a node makes.

    Attributes:
        walk: a walk to the tensor that it selects from; the part of the dim of pages is of no use.
        dim: that dim.
        places: the parts of the index's dims: sequences, and the pages of each.
        table: the pages.
    """

    walk: Walk
    dim: int
    places: tuple[Part | None, Part | None]
    table: BlockTable


def both_in_pages(
    call: SdpaCall, key: Stored, value: Stored, drafts: Drafts, may_guard: bool
) -> tuple[Stored, Stored] | Decline | None:
    """Find the pools of pages from which keys and values were gathered. Makes drafts.

    With `may_guard`, a guard is added if the pools' numbers of pages can't be proven equal.

    Returns:
        Keys and values as pages; why they are read as the program gathers them; None where neither is gathered.
    """
    if call.sharding is not None:
        return None
    outcomes = {name: _in_pages(x, Drafting(drafts, call.shown)) for name, x in (("key", key), ("value", value))}
    for name, x in outcomes.items():
        if isinstance(x, str):
            return Decline(Reason.PAGES, f"{name} {x}")
    pages_of_key, pages_of_value = outcomes.values()
    if pages_of_key is None and pages_of_value is None:
        return None
    if not isinstance(pages_of_key, Stored) or not isinstance(pages_of_value, Stored):
        gathered, other = ("value", "key") if pages_of_key is None else ("key", "value")
        return Decline(Reason.PAGES, f"{gathered} is gathered through a block table, {other} is not")
    pair = pages_of_key, pages_of_value
    if call.picks is not None and not call.picks.names_all:
        return Decline(Reason.PAGES, f"the op reads {call.picks}, and takes no block table beside indices")
    return _check_pair(*pair) or _check_uses(call, pair) or _check_numbers_of_pages(*pair, may_guard) or pair


def _check_pair(key: Stored, value: Stored) -> Decline | None:
    """Return the reason why one call of the op doesn't take these pages of keys and of values, or None."""
    assert key.table is not None
    assert value.table is not None
    if key.table.key != value.table.key:
        return Decline(Reason.PAGES, f"key and value have block tables of their own, {key.table} and {value.table}")
    page, other = key.size_in_base(LENGTH), value.size_in_base(LENGTH)
    if not known_equal(page, other):
        return Decline(Reason.PAGES, f"a page has {page} keys and {other} values")
    if not _is_page(page):
        return Decline(Reason.PAGES, f"a page has {page} keys, no power of two up to {LARGEST_PAGE}")
    return None


def _check_numbers_of_pages(key: Stored, value: Stored, may_guard: bool) -> Decline | None:
    n, other = key.size_in_base(BATCH), value.size_in_base(BATCH)
    if (guard_equal if may_guard else known_equal)(n, other):
        return None
    return Decline(Reason.PAGES, f"the pool of keys has {n} pages, that of values {other}")


def _is_page(size: Size) -> bool:
    """Return True if the op takes pages of so many keys."""
    known = constant(size)
    return known is not None and 1 <= known <= LARGEST_PAGE and known & (known - 1) == 0


def _check_uses(call: SdpaCall, pair: tuple[Stored, Stored]) -> Decline | None:
    """Return the reason not to read pages though they are known, or None."""
    path = {node for stored in pair for node in stored.path}
    for stored in pair:
        pool = known_tensor(stored.base)
        for node in stored.path:
            copy = tensor_of(node)
            if copy is None or same_storage(copy, pool):
                continue  # a view of the pool
            for user in node.users:
                if user not in path and user not in call.vanishing and reads_values(user, node):
                    return Decline(Reason.PAGES_USED, f"`{node}` is read by `{user}`, too, so it is gathered anyway")
    for name, stored in zip(("key", "value"), pair, strict=True):
        writer = stored.written_before(call.node)
        if writer is not None:
            return Decline(Reason.WRITTEN, f"the pool or the block table of {name} is written by `{writer}`")
    return None


def _in_pages(stored: Stored, draft: Drafting) -> Stored | str | None:
    """Return what `stored` was gathered from, as pages; or why it is read as it is, though it was gathered.

    The result is None if `stored` was not gathered through a table.
    """
    if dtensor_behind(stored.base) is not None or stored.shared or stored.overlaid:
        return None
    last = walk_on(stored, stored.base, stored.path)
    for walk in way_back(last):
        if walk.rows:
            return None
        selection = _selection_at(walk, draft)
        if selection is not None:
            return _pages_of(selection, draft)
        last = walk
    return _unread(last)


def _selection_at(walk: Walk, draft: Drafting) -> _Selection | None:
    """The selection that the node makes that a walk has reached."""
    node, name = walk.here, op_name(walk.here)
    source = source_of(node)
    before, after = tensor_of(source), tensor_of(node)
    if source is None or not isinstance(before, FakeTensor) or after is None or writes(node):
        return None
    if before.dtype != after.dtype or before.device != after.device:
        return None
    if name in ALONG:
        return _along_keys(walk, source)
    if name in RESHAPES and op_name(source) in BY_INDEX:
        return _split_after(walk, source, draft)
    index = _index_of(node, before.dim())
    if index is None:
        return None
    dim, entries, wraps = index
    numbers, shape = known_tensor(entries), before.shape
    if not known_shape(after.shape, (*shape[:dim], *numbers.shape, *shape[dim + 1 :])):
        return None
    if numbers.dim() == 2:
        return _selected(walk, walk.parts, (node,), source, dim, BlockTable(entries, wraps))
    part = walk.parts[dim]
    if numbers.dim() == 1 and part is not None and part[0] == LENGTH:  # of one sequence
        table = BlockTable(draft("unsqueeze", entries, 0), wraps)
        parts = (*walk.parts[:dim], None, *walk.parts[dim:])
        return _selected(walk, parts, (node,), source, dim, table)
    return None


def _selected(
    walk: Walk, parts: Sequence[Part | None], path: Sequence[Node], source: Node, dim: int, table: BlockTable
) -> _Selection:
    """The selection along `dim` of `source` by a table: `parts` are those of the result, whose dims are two there."""
    of_source = (*parts[:dim], None, *parts[dim + 2 :])
    path = (*walk.path, *path)
    back = dataclasses.replace(walk, here=source, parts=of_source, path=path)
    return _Selection(back, dim, (parts[dim], parts[dim + 1]), table)


def _index_of(node: Node, rank: int) -> tuple[int, Node, bool] | None:
    """The dim along which a node selects, its index, and whether negative numbers count from the end."""
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


def _split_after(walk: Walk, selected: Node, draft: Drafting) -> _Selection | None:
    """The selection by a flattened table, whose result `walk.here` splits: `x[table.flatten()].view(batch, ...)`."""
    source, after, chosen = source_of(selected), known_tensor(walk.here), known_tensor(selected)
    before = tensor_of(source)
    if source is None or before is None or writes(selected) or before.dtype != chosen.dtype:
        return None
    index = _index_of(selected, before.dim())
    if index is None or known_tensor(index[1]).dim() != 1:
        return None
    dim, entries, wraps = index
    table = of_flat_index(entries, wraps)
    if table is None:
        return None
    shape = (*chosen.shape[:dim], *table.shape, *chosen.shape[dim + 1 :])
    split = undo_reshape(walk, selected, shape, after.shape)
    if split is None:
        return None
    return _selected(walk, split.parts, (walk.here, selected), source, dim, table)


def _along_keys(walk: Walk, source: Node) -> _Selection | None:
    """The selection of keys of one sequence for each of several: `x.expand(batch, ...).gather(2, index)`."""
    node = walk.here
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
    table = _table_along(index, walk.parts, dim)
    if table is None:
        return None
    for back in way_back(dataclasses.replace(walk, here=source, stretched=(), path=(*walk.path, node))):
        pool = known_tensor(back.here)
        keys = [d for d, part in enumerate(back.parts) if part == walk.parts[dim]]
        own = (d for d, part in enumerate(back.parts) if part is not None and part[0] == BATCH)
        if back.rows or len(keys) != 1 or not all(known_equal(pool.shape[d], 1) for d in own):
            continue
        parts = tuple(None if part is None or part[0] in (BATCH, LENGTH) else part for part in back.parts)
        grown = tuple((part, n) for part, n in back.stretched if part[0] != BATCH)
        back = dataclasses.replace(back, parts=parts, stretched=(*walk.stretched, *grown))
        return _Selection(back, keys[0], ((BATCH,), walk.parts[dim]), table)
    return None


def _table_along(index: Node, parts: tuple[Part | None, ...], dim: int) -> BlockTable | None:
    """The table `[batch, keys]` that an index was expanded from, whose dims have these parts; keys are along `dim`."""
    walk: Walk | None = Walk(index, parts)
    while walk is not None and known_tensor(walk.here).dim() != 2:
        source = integers_cast_by(walk.here)
        walk = step_back(walk) if source is None else walk.step(source, walk.parts)
    if walk is None or walk.rows or any(part[0] in (BATCH, LENGTH) for part, _ in walk.stretched):
        return None
    batch, keys = walk.parts
    in_order = (batch == (BATCH,) or known_equal(known_tensor(walk.here).shape[0], 1)) and keys == parts[dim]
    return BlockTable(walk.here, False, walk.path) if in_order else None


def _pages_of(selection: _Selection, draft: Drafting) -> Stored | str:
    """The pool of a selection, as pages; or why it can't be read."""
    walk, dim, table = selection.walk, selection.dim, without_casts(selection.table)
    pool = known_tensor(walk.here)
    batch, _ = table.shape
    of_batch, of_pages = selection.places
    shown = f"is gathered by {table} from `{walk.here}`"
    own = [d for d, x in enumerate(walk.parts) if x is not None and x[0] == BATCH and not known_equal(pool.shape[d], 1)]
    if own or not (of_batch == (BATCH,) or known_equal(batch, 1)):
        return f"{shown}, but not one row for each sequence"
    minor = [d for d, x in enumerate(walk.parts) if x is not None and x[0] == LENGTH]
    if len(minor) > 1 or not (of_pages is None or of_pages[0] == LENGTH):
        return f"{shown}, and a page doesn't hold keys one after the other"
    if minor and of_pages is not None and (walk.parts[minor[0]] or ()) < of_pages:
        return f"{shown}, and the keys of its pages are interleaved"
    parts = [(BATCH,) if d == dim else (LENGTH,) if d in minor else part for d, part in enumerate(walk.parts)]
    here = walk.here
    slots = of_slots(table) if not minor else None
    if slots is not None and _is_page(slots.page) and known_equal(pool.shape[dim] % slots.page, 0):
        here = draft("unflatten", here, dim, (-1, slots.page))
        parts[dim : dim + 1] = [(BATCH,), (LENGTH,)]
        table = slots.table
    stored = stored_at(dataclasses.replace(walk, here=here, parts=tuple(parts)))
    if stored is None or stored.shared:
        return f"{shown}, whose dims {list(pool.shape)} aren't those of pages, keys, heads and head_dim"
    return dataclasses.replace(stored, table=table)


def _unread(walk: Walk) -> str | None:
    """Why keys that a walk can't follow further are no pages, if a table selected them; None if none did."""
    node, dtype, index = walk.here, known_tensor(walk.here).dtype, None
    while (source := source_of(node)) is not None and op_name(node) in CASTS | RESHAPES | REORDERS | BY_INDEX:
        index = _index_of(node, known_tensor(source).dim())
        if index is not None:
            break
        node = source
    if index is None:
        return None
    table = of_flat_index(*index[1:]) or BlockTable(*index[1:])
    if known_tensor(table.entries).dim() < 2:
        return None
    how, before = f"is gathered by {table}", known_tensor(node).dtype
    return f"{how}, in a form that isn't known" if before == dtype else f"{how}, and cast from {before} to {dtype}"
