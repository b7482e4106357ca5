"""Find keys and values that a program gathers through a block table, as pages of the pool that it gathers from.

`pool[table]` copies the pages of each sequence. The op reads them from the pool instead, if pages and their keys are in
order in the copy, and nothing else reads it.
"""

from __future__ import annotations

import dataclasses

from tatten.ops.layout import BATCH, LENGTH
from tatten.ops.pages import LARGEST_PAGE, is_page_size
from tatten.passes.block_table import BlockTable, slots_of, table_of_flat_index, without_casts
from tatten.passes.calls import op_name
from tatten.passes.drafts import Drafting, Drafts, dtensor_behind
from tatten.passes.metadata import reads_values
from tatten.passes.op_names import CASTS, REORDERS, RESHAPES
from tatten.passes.page_selection import BY_INDEX, PageSelection, index_of, selection_at
from tatten.passes.reasons import Decline, Reason
from tatten.passes.sdpa import SdpaCall
from tatten.passes.stored import Stored, stored_at, walk_on
from tatten.passes.symbolic import (
    constant,
    guard_equal,
    known_equal,
    known_tensor,
    same_storage,
    tensor_of,
)
from tatten.passes.views import Size, Walk, source_of, walks_back


def both_in_pages(
    call: SdpaCall, key: Stored, value: Stored, drafts: Drafts, may_guard: bool
) -> tuple[Stored, Stored] | Decline | None:
    """Find the pools of pages from which keys and values were gathered. Makes drafts.

    With `may_guard`, a guard is added if the pools' numbers of pages can't be proven equal.

    Returns:
        Keys and values as pages, the reason why they are read as the program gathers them, or None if neither is
        gathered.
    """
    if call.sharding is not None:
        return None
    outcomes = {name: _in_pages(x, Drafting(drafts, call.source_node)) for name, x in (("key", key), ("value", value))}
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
    """Return True if the op supports pages of `size` keys."""
    fixed = constant(size)
    return fixed is not None and is_page_size(fixed)


def _check_uses(call: SdpaCall, pair: tuple[Stored, Stored]) -> Decline | None:
    """Return the reason if the program still needs the copy of the pages, or pages are written too early, or None."""
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
    """Return the pool from which `stored` was gathered, as pages, or the reason why the pool can't be read.

    Return None if `stored` was not gathered through a table.
    """
    if dtensor_behind(stored.base) is not None or stored.shared or stored.overlaid:
        return None
    last = walk_on(stored, stored.base, stored.path)
    for walk in walks_back(last):
        if walk.rows:
            return None
        selection = selection_at(walk, draft)
        if selection is not None:
            return _pages_of(selection, draft)
        last = walk
    return _unread_reason(last)


def _pages_of(selection: PageSelection, draft: Drafting) -> Stored | str:
    """Return the pool of a selection as pages, or the reason why it can't be read."""
    walk, dim, table = selection.walk, selection.dim, without_casts(selection.table)
    pool = known_tensor(walk.node)
    batch, _ = table.shape
    batch_part, page_part = selection.places
    shown = f"is gathered by {table} from `{walk.node}`"
    roles = [None if part is None else part[0] for part in walk.parts]
    has_batch = any(role == BATCH and not known_equal(n, 1) for role, n in zip(roles, pool.shape, strict=True))
    if has_batch or not (batch_part == (BATCH,) or known_equal(batch, 1)):
        return f"{shown}, but not one row for each sequence"
    minor = [d for d, role in enumerate(roles) if role == LENGTH]
    if len(minor) > 1 or not (page_part is None or page_part[0] == LENGTH):
        return f"{shown}, and a page doesn't hold keys one after the other"
    if minor and page_part is not None and (walk.parts[minor[0]] or ()) < page_part:
        return f"{shown}, and the keys of its pages are interleaved"
    parts = [(BATCH,) if d == dim else (LENGTH,) if d in minor else part for d, part in enumerate(walk.parts)]
    base = walk.node
    slots = slots_of(table) if not minor else None
    if slots is not None and is_page_size(slots.page) and known_equal(pool.shape[dim] % slots.page, 0):
        base = draft("unflatten", base, dim, (-1, slots.page))
        parts[dim : dim + 1] = [(BATCH,), (LENGTH,)]
        table = slots.table
    stored = stored_at(dataclasses.replace(walk, node=base, parts=tuple(parts)))
    if stored is None or stored.shared:
        return f"{shown}, whose dims {list(pool.shape)} aren't those of pages, keys, heads and head_dim"
    return dataclasses.replace(stored, table=table)


def _unread_reason(walk: Walk) -> str | None:
    """Return the reason why keys at the end of a walk aren't read as pages, or None if no table selected them."""
    node, dtype, index = walk.node, known_tensor(walk.node).dtype, None
    while (source := source_of(node)) is not None and op_name(node) in CASTS | RESHAPES | REORDERS | BY_INDEX:
        index = index_of(node, known_tensor(source).dim())
        if index is not None:
            break
        node = source
    if index is None:
        return None
    table = table_of_flat_index(*index[1:]) or BlockTable(*index[1:])
    if known_tensor(table.entries).dim() < 2:
        return None
    shown, before = f"is gathered by {table}", known_tensor(node).dtype
    return f"{shown}, in a form that isn't known" if before == dtype else f"{shown}, and cast from {before} to {dtype}"
