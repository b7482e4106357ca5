"""Rows of a batch that an index selects: read the ops that select, and insert a tensor of rows in place of a copy.

`x[index]` and other selections of rows of `x` make a copy. Attention can read rows where they are stored, given the row
of each sequence. The same selections, applied to the numbers of the rows, compute these rows.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import SymInt, Tensor
from torch.fx import Graph, Node

from tatten.passes.calls import argument, only_adds_dims, op_name, overloads
from tatten.passes.mutation import READING_OPERATORS, writes
from tatten.passes.symbolic import FakeTensor, known_equal, tensor_of, value_of

SELECTS = {"index_select", "getitem", "index", "gather", "take_along_dim", "embedding", "repeat_interleave"}
# Ops on an index that keep its numbers in order, if they keep their count.
EXPANDS = {"expand", "expand_as", "broadcast_to"}
VIEWS = EXPANDS | {"view", "reshape", "unsqueeze", "squeeze", "flatten", "getitem"}
INTEGER_CASTS = {"long", "int"}  # these have no schema
INTEGERS = (torch.int32, torch.int64)
MAX_DEPTH = 8  # indexes that are computed in more steps are equal only if they are one node


@dataclass(frozen=True)
class Select:
    """A selection of the rows `index`, a tensor of one dim.

    Attributes:
        wraps: whether negative numbers count from the end.
        views: the nodes between the index and the argument of the op that selects.
    """

    index: Node
    wraps: bool
    views: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Counts:
    """A selection of row i `index[i]` times, `total` rows in all."""

    index: Node
    total: int | Node


@dataclass(frozen=True)
class Repeat:
    """A repetition of each row `each` times, and of the result `times` times."""

    each: int
    times: int


@dataclass(frozen=True)
class SelectedRows:
    """The stored row that each sequence reads, as the selections that were applied to the stored rows, in order."""

    steps: tuple[Select | Counts | Repeat, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for equal rows, also if keys, values and layers compute their index separately."""
        return tuple((type(x), *(numbers_key(v) for name, v in vars(x).items() if name != "views")) for x in self.steps)

    @property
    def views(self) -> set[Node]:
        """The nodes between the indexes and the ops that select by them."""
        return {node for x in self.steps if isinstance(x, Select) for node in x.views}

    @property
    def read(self) -> set[Node]:
        """The nodes that hold the indexes, and the nodes from which `key` knows that they were computed."""
        return self.views.union(*(computed_from(x.index) for x in self.steps if not isinstance(x, Repeat)))

    def insert(self, graph: Graph, stored: int | Node) -> Node:
        """Insert the nodes that compute the rows, `[batch]` on the device of the index, of `stored` stored rows."""
        first = next(
            tensor for x in self.steps if not isinstance(x, Repeat) and (tensor := tensor_of(x.index)) is not None
        )
        rows: Node | None = None  # None for all rows in order

        def current_rows() -> Node:
            return graph.call_function(torch.arange, (stored,), {"device": first.device}) if rows is None else rows

        for step in self.steps:
            match step:
                case Select(index, True):
                    rows = graph.call_function(operator.getitem, (current_rows(), index))
                case Select(index, False):
                    rows = index if rows is None else graph.call_method("index_select", (rows, 0, index))
                case Counts(index, total):
                    args = (index,) if rows is None else (rows, index)
                    rows = graph.call_function(torch.repeat_interleave, args, {"output_size": total})
                case Repeat(each, times):
                    rows = (
                        graph.call_method("repeat_interleave", (current_rows(), each)) if each != 1 else current_rows()
                    )
                    rows = graph.call_method("repeat", (rows, times)) if times != 1 else rows
        assert rows is not None
        return rows


def selection_of(node: Node, source: Tensor) -> tuple[int, Select | Counts] | None:
    """Return the dim along which `node` selects from its source by a tensor, and the selection.

    Return None if the node does something else, or may do so.
    """
    rank, total = source.dim(), None
    match op_name(node):
        case "index_select" | "gather":
            index, dim = argument(node, 2, "index"), argument(node, 1, "dim")
        case "take_along_dim":
            index, dim = argument(node, 1, "indices"), argument(node, 2, "dim")
        case "embedding":
            index, dim = argument(node, 0, "input") if node.target is F.embedding else argument(node, 1, "indices"), 0
        case "getitem":
            index, dim = index_among(node.args[1], rank)
        case "index":  # `x[key]` in an exported graph
            key = tuple(slice(None) if part is None else part for part in argument(node, 1, "indices", ()))
            index, dim = index_among(key, rank)
        case "repeat_interleave":
            index, dim = argument(node, 1, "repeats"), argument(node, 2, "dim")
            total = argument(node, 3, "output_size")
        case _:
            return None
    if not isinstance(index, Node) or not isinstance(dim, int):
        return None
    dim %= rank
    views: tuple[Node, ...] = ()
    if op_name(node) in ("gather", "take_along_dim"):
        index_and_views = _along(index, dim, rank)
        if index_and_views is None:
            return None
        index, views = index_and_views
    numbers = tensor_of(index)
    if not isinstance(source, FakeTensor) or not isinstance(numbers, FakeTensor):
        return None
    if numbers.dim() != 1 or numbers.dtype not in INTEGERS or numbers.device != source.device:
        return None
    if op_name(node) != "repeat_interleave":
        return dim, Select(index, op_name(node) in ("getitem", "index", "take_along_dim"), views)
    if total is None or not known_equal(numbers.shape[0], source.shape[dim]):
        return None  # a single count applies to all rows
    return dim, Counts(index, total)


def index_among(key: Any, rank: int) -> tuple[Any, int | None]:
    """Return the only index of `x[key]` and its dim, or None twice unless `key` takes all of the other dims."""
    parts = list(key) if isinstance(key, tuple) else [key]
    if builtins.Ellipsis in parts:
        at = parts.index(builtins.Ellipsis)
        parts[at : at + 1] = [slice(None)] * (rank - len(parts) + 1)
    dims = [dim for dim, part in enumerate(parts) if part != slice(None)]
    return (parts[dims[0]], dims[0]) if len(dims) == 1 else (None, None)


def _along(index: Node, dim: int, rank: int) -> tuple[Node, tuple[Node, ...]] | None:
    """Return the tensor of one dim that was expanded over all other dims to an index, or None.

    Also return the nodes from the tensor to the index, last first.
    """
    views: list[Node] = []
    expanded = tensor_of(index)
    if expanded is None or expanded.dim() != rank:
        return None
    size, numbers = expanded.shape[dim], expanded
    while not known_equal(numbers.numel(), size) or numbers.dim() != 1:
        source = viewed_by(index)
        viewed = tensor_of(source)
        if source is None or viewed is None or viewed.dtype != expanded.dtype:
            return None
        if not known_equal(numbers.numel(), size) and (
            op_name(index) not in EXPANDS
            or viewed.dim() < rank - dim
            or not known_equal(viewed.shape[dim - rank], size)
        ):
            return None  # not an expansion over other dims: it may repeat or reorder numbers along `dim`
        if known_equal(numbers.numel(), size) and not known_equal(viewed.numel(), size):
            return None
        views.append(index)
        index, numbers = source, viewed
    return index, tuple(views)


def viewed_by(node: Node) -> Node | None:
    """Return the index that `node` views with its numbers in order, or None."""
    if op_name(node) not in VIEWS or writes(node) or not node.args or not isinstance(node.args[0], Node):
        return None
    return node.args[0] if op_name(node) != "getitem" or only_adds_dims(node.args[1]) else None


def _is_computed(node: Node) -> bool:
    """Return True if a node computes integers from integers only, and the same each time."""
    return (
        node.op in ("call_function", "call_method")
        and _is_integers(node)
        and all(_is_integers(x) or isinstance(value_of(x), int | SymInt) for x in node.all_input_nodes)
        and (node.target in READING_OPERATORS or op_name(node) in INTEGER_CASTS or bool(overloads(node)))
        and not any(torch.Tag.nondeterministic_seeded in x.tags for x in overloads(node))
        and not writes(node)
    )


def _is_integers(node: Node) -> bool:
    tensor = tensor_of(node)
    return tensor is not None and tensor.dtype in INTEGERS


def numbers_key(value: Any, depth: int = MAX_DEPTH) -> object:
    """Return a key that is equal for equal arguments, and for nodes that compute equal numbers from the same nodes."""
    if isinstance(value, Node):
        if depth == 0 or not _is_computed(value):
            return value
        return value.target, numbers_key(value.args, depth - 1), numbers_key(value.kwargs, depth - 1)
    if isinstance(value, (list, tuple)):
        return tuple(numbers_key(x, depth) for x in value)
    if isinstance(value, dict):
        return tuple((name, numbers_key(x, depth)) for name, x in value.items())
    return repr(value)


def computed_from(node: Node, depth: int = MAX_DEPTH) -> Iterator[Node]:
    """Yield a node and the nodes from which `numbers_key` knows that it is computed."""
    yield node
    if depth and _is_computed(node):
        for x in node.all_input_nodes:
            yield from computed_from(x, depth - 1)
