"""Rows of a batch that an index selects: the ops that do so, and the tensor of rows that takes the place of a copy.

`x[index]`, and whatever else selects rows of `x`, makes a copy. Attention reads rows where they are stored, if it is
told the row of each sequence: what the ops do to the rows of `x`, done to a tensor of their numbers.
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
# What an index may go through that leaves its numbers in order, if it leaves as many.
EXPANDS = {"expand", "expand_as", "broadcast_to"}
VIEWS = EXPANDS | {"view", "reshape", "unsqueeze", "squeeze", "flatten", "getitem"}
INTEGER_CASTS = {"long", "int"}  # these have no schema
INTEGERS = (torch.int32, torch.int64)
MAX_DEPTH = 8  # two indexes that are computed in more steps are only equal if they are one node


@dataclass(frozen=True)
class Select:
    """Rows `index`, a tensor of one dim; if it `wraps`, negative ones count from the end.

    `views` are the nodes between the index and the argument of the op that selects.
    """

    index: Node
    wraps: bool
    views: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Counts:
    """Row i `index[i]` times, `total` rows in all."""

    index: Node
    total: int | Node


@dataclass(frozen=True)
class Repeat:
    """Each row `each` times, and all of those `times` times."""

    each: int
    times: int


@dataclass(frozen=True)
class SelectedRows:
    """The stored row that each sequence reads, as what was done to the stored rows, in order."""

    steps: tuple[Select | Counts | Repeat, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal rows of as many stored ones: keys, values and layers may each compute their index."""
        return tuple(
            (type(x), *(same_numbers(v) for name, v in vars(x).items() if name != "views")) for x in self.steps
        )

    @property
    def views(self) -> set[Node]:
        """The nodes between the indexes and the ops that select by them."""
        return {node for x in self.steps if isinstance(x, Select) for node in x.views}

    @property
    def read(self) -> set[Node]:
        """The nodes that hold the indexes, and what `key` says that these were computed of."""
        return self.views.union(*(made_of(x.index) for x in self.steps if not isinstance(x, Repeat)))

    def insert(self, graph: Graph, stored: int | Node) -> Node:
        """Insert what computes the rows, of so many `stored` ones, as a tensor `[batch]` on the device of the index."""
        first = next(
            tensor for x in self.steps if not isinstance(x, Repeat) and (tensor := tensor_of(x.index)) is not None
        )
        rows: Node | None = None  # None: all, in order

        def so_far() -> Node:
            return graph.call_function(torch.arange, (stored,), {"device": first.device}) if rows is None else rows

        for step in self.steps:
            match step:
                case Select(index, True):
                    rows = graph.call_function(operator.getitem, (so_far(), index))
                case Select(index, False):
                    rows = index if rows is None else graph.call_method("index_select", (rows, 0, index))
                case Counts(index, total):
                    args = (index,) if rows is None else (rows, index)
                    rows = graph.call_function(torch.repeat_interleave, args, {"output_size": total})
                case Repeat(each, times):
                    rows = graph.call_method("repeat_interleave", (so_far(), each)) if each != 1 else so_far()
                    rows = graph.call_method("repeat", (rows, times)) if times != 1 else rows
        assert rows is not None
        return rows


def selection_of(node: Node, source: Tensor) -> tuple[int, Select | Counts] | None:
    """Return the selection that `node` makes by a tensor along one dim of its source, after that dim.

    The result is None if the node does something else, or may do so.
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
        case "index":  # what `x[key]` is in an exported graph
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
        return None  # one count is for all rows
    return dim, Counts(index, total)


def index_among(key: Any, rank: int) -> tuple[Any, int | None]:
    """The one index of `x[key]` and its dim, if the others take whole dims."""
    parts = list(key) if isinstance(key, tuple) else [key]
    if builtins.Ellipsis in parts:
        at = parts.index(builtins.Ellipsis)
        parts[at : at + 1] = [slice(None)] * (rank - len(parts) + 1)
    dims = [dim for dim, part in enumerate(parts) if part != slice(None)]
    return (parts[dims[0]], dims[0]) if len(dims) == 1 else (None, None)


def _along(index: Node, dim: int, rank: int) -> tuple[Node, tuple[Node, ...]] | None:
    """The tensor of one dim that an index `[1, ..., n, ..., 1]`, expanded over the other dims, was made of.

    Returns it with the nodes from there to the index, last first.
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
            return None  # another order, unless it is expanded over other dims
        if known_equal(numbers.numel(), size) and not known_equal(viewed.numel(), size):
            return None
        views.append(index)
        index, numbers = source, viewed
    return index, tuple(views)


def viewed_by(node: Node) -> Node | None:
    """The index that `node` is a view of, its numbers in order."""
    if op_name(node) not in VIEWS or writes(node) or not node.args or not isinstance(node.args[0], Node):
        return None
    return node.args[0] if op_name(node) != "getitem" or only_adds_dims(node.args[1]) else None


def _is_computed(node: Node) -> bool:
    """Return True if a node computes integers from integers alone, always the same."""
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


def same_numbers(value: Any, depth: int = MAX_DEPTH) -> object:
    """Equal for nodes that compute the same of the same nodes, and for equal arguments."""
    if isinstance(value, Node):
        if depth == 0 or not _is_computed(value):
            return value
        return value.target, same_numbers(value.args, depth - 1), same_numbers(value.kwargs, depth - 1)
    if isinstance(value, (list, tuple)):
        return tuple(same_numbers(x, depth) for x in value)
    if isinstance(value, dict):
        return tuple((name, same_numbers(x, depth)) for name, x in value.items())
    return repr(value)


def made_of(node: Node, depth: int = MAX_DEPTH) -> Iterator[Node]:
    yield node
    if depth and _is_computed(node):
        for x in node.all_input_nodes:
            yield from made_of(x, depth - 1)
