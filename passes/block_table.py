"""Block tables of a program: the integers by which it selects pages of a pool for each sequence.

A program may select single keys by numbers that it computes from a table, `table * page + arange(page)`. They name the
keys of a page in order, so that the pages can be read by the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from tatten.passes.calls import op_name
from tatten.passes.drafts import Drafting
from tatten.passes.mutation import writes
from tatten.passes.op_names import CASTS
from tatten.passes.rows import INTEGER_CASTS, INTEGERS, made_of, same_numbers, viewed_by
from tatten.passes.symbolic import FakeTensor, constant, known_equal, known_shape, known_tensor, tensor_of, value_of
from tatten.passes.views import Size

PRODUCTS = {"mul", "multiply"}
FLAT = {"flatten", "reshape", "view"}


@dataclass(frozen=True)
class BlockTable:
    """The pages of each sequence, in order.

    Attributes:
        entries: integers `[batch, max_pages]`, a node or a draft.
        wraps: whether entries count modulo the number of pages: negative ones of `pool[entries]` do, and all those of
            `take_along_dim`.
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
        """Equal for tables that name the same pages: keys and values may each compute their index."""
        return same_numbers(self.entries), self.wraps

    @property
    def read(self) -> set[Node]:
        """The nodes that hold the entries, and what `key` says that these were computed of."""
        return {*self.views, *made_of(self.entries)}

    def as_attention_takes_it(self, entries: Node, n_pages: int | Node, draft: Drafting) -> Node:
        """Draft the table in int32, in which each entry that names a page is the page's number.

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
    """The table before it was cast between int32 and int64."""
    node, views = table.entries, table.views
    while (source := integers_cast_by(node)) is not None:
        node, views = source, (*views, node)
    return BlockTable(node, table.wraps, views)


def integers_cast_by(node: Node) -> Node | None:
    """The integers that a node casts to other ones; None if it does something else."""
    source = node.args[0] if node.args else None
    before, after = tensor_of(source), tensor_of(node)
    if not isinstance(source, Node) or op_name(node) not in CASTS | INTEGER_CASTS or before is None or after is None:
        return None
    # From 64 bits to 32, numbers out of range become others.
    widens = before.dtype in INTEGERS and after.dtype == torch.int64 and before.device == after.device
    return source if widens and not writes(node) else None


def of_flat_index(index: Node, wraps: bool) -> BlockTable | None:
    """The table `[batch, max_pages]` whose entries, row by row, are an index of one dim; None without one."""
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
    """Numbers of keys: entry `i` of a table names the `page` keys from `i * page` on."""

    table: BlockTable
    page: int


def of_slots(slots: BlockTable) -> Slots | None:
    """The table from which numbers of keys are computed, as `(table[:, :, None] * page + arange(page)).flatten(1)`."""
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
    """The table of which a node is `table[:, :, None] * page`, in either order, and the nodes from there."""
    if not isinstance(node, Node):
        return None
    inner, views = node, [node]
    if page != 1 or op_name(node) in PRODUCTS:
        if op_name(node) not in PRODUCTS or writes(node) or node.kwargs or len(node.args) != 2:
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
    """The nodes that make `arange(page)` along the last dim, last first; None if `node` isn't that."""
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
    named = [node.kwargs.get(name) for name in ("start", "end", "step")]
    counts = bounds in ([page], [0, page], [0, page, 1]) and named == [None] * 3
    return (*views, node) if counts and numbers.dtype in INTEGERS else None


def _integer(x: object) -> int | None:
    """The integer that is the same in every run."""
    value = value_of(x) if isinstance(x, Node) else x
    return constant(value) if isinstance(value, int | torch.SymInt) and not isinstance(value, bool) else None
