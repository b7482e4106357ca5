"""Block tables of a program: the integers by which it selects pages of a pool for each sequence.

A program may select single keys by numbers that it computes from a table, `table * page + arange(page)`. These numbers
name the keys of each page in order, so the op can read the pages through the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from tatten.passes.calls import op_name
from tatten.passes.drafts import Drafting
from tatten.passes.mutation import writes
from tatten.passes.op_names import CASTS, MULTIPLIES
from tatten.passes.rows import INTEGER_CASTS, INTEGERS, computed_from, numbers_key, viewed_by
from tatten.passes.symbolic import FakeTensor, constant, known_equal, known_shape, known_tensor, tensor_of, value_of
from tatten.passes.views import Size

FLAT = {"flatten", "reshape", "view"}


@dataclass(frozen=True)
class BlockTable:
    """The pages of each sequence, in order.

    Attributes:
        entries: integers `[batch, max_pages]`, a node or a draft.
        wraps: whether entries count modulo the number of pages, as negative entries of `pool[entries]` and all entries
            of `take_along_dim` do.
        views: the nodes between the entries and the op that selects by them.
    """

    entries: Node
    wraps: bool
    views: tuple[Node, ...] = ()

    @property
    def shape(self) -> tuple[Size, Size]:
        batch, columns = known_tensor(self.entries).shape
        return batch, columns

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for tables of the same pages, also if keys and values compute their index separately."""
        return numbers_key(self.entries), self.wraps

    @property
    def read(self) -> set[Node]:
        """The nodes that hold the entries, and the nodes from which `key` knows that they were computed."""
        return {*self.views, *computed_from(self.entries)}

    def as_operand(self, entries: Node, n_pages: int | Node, draft: Drafting) -> Node:
        """Draft the table in int32. Each entry that names a page is then the number of the page.

        Args:
            entries: the entries, or another node that holds the same numbers.
            n_pages: the number of pages in the pool.
            draft: makes the drafts.
        """
        if self.wraps:
            entries = draft("remainder", entries, n_pages)
        return draft.cast(entries, torch.int32)

    def __str__(self) -> str:
        tensor = known_tensor(self.entries)
        return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"


def without_casts(table: BlockTable) -> BlockTable:
    """Return the table before casts between int32 and int64."""
    node, views = table.entries, table.views
    while (source := integers_cast_by(node)) is not None:
        node, views = source, (*views, node)
    return BlockTable(node, table.wraps, views)


def integers_cast_by(node: Node) -> Node | None:
    """Return the integers that a node casts to another dtype without changing them, or None."""
    source = node.args[0] if node.args else None
    before, after = tensor_of(source), tensor_of(node)
    if not isinstance(source, Node) or op_name(node) not in CASTS | INTEGER_CASTS or before is None or after is None:
        return None
    # A cast from 64 bits to 32 may change numbers.
    widens = before.dtype in INTEGERS and after.dtype == torch.int64 and before.device == after.device
    return source if widens and not writes(node) else None


def table_of_flat_index(index: Node, wraps: bool) -> BlockTable | None:
    """Return the table `[batch, max_pages]` that was flattened to an index of one dim, or None."""
    node, views = index, list[Node]()
    while True:
        tensor = tensor_of(node)
        if not isinstance(tensor, FakeTensor) or tensor.dtype not in INTEGERS:
            return None
        if tensor.dim() == 2:
            return BlockTable(node, wraps, tuple(views))
        source = viewed_by(node) or integers_cast_by(node)
        before = tensor_of(source)
        if source is None or before is None or not known_equal(before.numel(), known_tensor(index).shape[0]):
            return None
        views.append(node)
        node = source


@dataclass(frozen=True)
class Slots:
    """Numbers of keys that were computed from a table: entry `i` stands for the `page` keys from `i * page` on."""

    table: BlockTable
    page: int


def slots_of(slots: BlockTable) -> Slots | None:
    """Return the table from which numbers of keys were computed, or None.

    The form is `(table[:, :, None] * page + arange(page)).flatten(1)`.
    """
    flat, total = slots.entries, None
    if op_name(flat) in FLAT and not writes(flat) and flat.args:
        total = flat.args[0]
    sizes = tensor_of(total)
    if not isinstance(total, Node) or sizes is None or sizes.dim() != 3 or op_name(total) != "add":
        return None
    batch, columns, page = sizes.shape
    length = constant(page)
    if length is None or not known_shape(slots.shape, (batch, columns * page)) or writes(total):
        return None
    if total.kwargs or len(total.args) != 2:  # `alpha`
        return None
    for first, offset in (total.args, total.args[::-1]):
        scaled = _times(first, length)
        steps = _counting(offset, length)
        if scaled is None or steps is None:
            continue
        source, views = scaled
        entries = known_tensor(source)
        if known_shape(entries.shape, (batch, columns)) and entries.dtype in INTEGERS:
            views = (*slots.views, flat, total, *views, *steps)
            return Slots(without_casts(BlockTable(source, slots.wraps, views)), length)
    return None


def _times(node: object, page: int) -> tuple[Node, tuple[Node, ...]] | None:
    """Return the table of a product `table[:, :, None] * page`, in either order, and its nodes, or None."""
    if not isinstance(node, Node):
        return None
    inner, views = node, [node]
    if page != 1 or op_name(node) in MULTIPLIES:
        if op_name(node) not in MULTIPLIES or writes(node) or node.kwargs or len(node.args) != 2:
            return None
        a, b = node.args
        factor, number = (a, b) if isinstance(a, Node) and _integer(b) is not None else (b, a)
        if not isinstance(factor, Node) or _integer(number) != page:
            return None
        inner = factor
        views.append(inner)
    spread = tensor_of(inner)
    if spread is None or spread.dim() != 3 or not known_equal(spread.shape[2], 1):
        return None
    table = viewed_by(inner)
    viewed = tensor_of(table)
    if table is None or viewed is None or viewed.dim() != 2 or not known_shape(viewed.shape, spread.shape[:2]):
        return None
    return table, tuple(views)


def _counting(node: object, page: int) -> tuple[Node, ...] | None:
    """Return the nodes that compute `arange(page)` along the last dim, last first, or None if `node` isn't that."""
    views = list[Node]()
    while isinstance(node, Node) and op_name(node) != "arange":
        numbers = tensor_of(node)
        if numbers is None or not known_equal(numbers.shape[-1], page) or not known_equal(numbers.numel(), page):
            return None
        views.append(node)
        node = viewed_by(node)
    if not isinstance(node, Node) or node.kwargs.get("out") is not None:
        return None
    numbers, bounds = known_tensor(node), [_integer(x) for x in node.args]
    bounds_by_name = [node.kwargs.get(name) for name in ("start", "end", "step")]
    counts = bounds in ([page], [0, page], [0, page, 1]) and bounds_by_name == [None] * 3
    return (*views, node) if counts and numbers.dtype in INTEGERS else None


def _integer(x: object) -> int | None:
    """Return an integer that is the same in every run, or None."""
    value = value_of(x) if isinstance(x, Node) else x
    return constant(value) if isinstance(value, int | torch.SymInt) and not isinstance(value, bool) else None
