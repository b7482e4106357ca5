"""Read indices back to the top-k that made them: its rows name no key twice, and some later steps keep it so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from tatten.ops.picks import counted_from, key_indices, with_first
from tatten.passes.calls import argument, op_name, where_arguments
from tatten.passes.drafts import is_draft, number_at
from tatten.passes.mutation import written_between
from tatten.passes.op_names import CASTS, COPIES, RESHAPES
from tatten.passes.symbolic import known_equal, known_tensor, rank_of, tensor_of
from tatten.passes.views import Size

INTEGERS = {torch.int32, torch.int64}  # in narrower dtypes two indices may become equal
TOP_K = {"topk", "sort", "argsort"}
Outside = Callable[[float], bool]  # whether a number names no key
KEEP_ROWS = CASTS | COPIES | RESHAPES | {"long", "int", "expand", "expand_as", "broadcast_to", "detach"}


@dataclass(frozen=True)
class Origin:
    """The origin of indices.

    Attributes:
        candidates: the number of scores that a top-k chose from; None if these aren't the indices of a top-k.
        distinct: whether no row contains an index in range twice.
        all_in_range: whether all indices are those of the top-k, unchanged.
    """

    candidates: Size | None = None
    distinct: bool = False
    all_in_range: bool = False


def origin_of(indices: Node, size: int | None, place: Node) -> Origin:
    """Follow indices `[..., picks]` back to the top-k that made them.

    Args:
        indices: the indices.
        size: the number of keys, or of blocks of keys, that indices may name; None if it is dynamic.
        place: the node that reads the indices.
    """
    node, reader, all_in_range, is_outside = indices, place, True, _outside(size)
    while True:
        tensor = tensor_of(node)
        if tensor is None or _is_written(node, reader, place):
            return Origin()
        candidates = _candidates(node)
        if candidates is not None:
            return Origin(candidates, True, all_in_range)
        source = _same_rows(node)
        if node.target in RENUMBERED:
            source, *numbers = node.args  # type: ignore[assignment]
            is_outside, all_in_range = RENUMBERED[node.target](is_outside, *numbers), False  # type: ignore[index, arg-type]
        if source is None:
            source, all_in_range = _before_fill(node, is_outside, place), False
        if source is None:
            return Origin()
        node, reader = source, node


def _outside(size: int | None) -> Outside:
    return lambda number: number < 0 or (size is not None and number >= size)


def _before_with_first(is_outside: Outside, n: int) -> Outside:
    return lambda number: number < 0 or is_outside(number + n)


def _before_counted_from(is_outside: Outside, first: int, step: int = 1) -> Outside:
    return lambda number: (number - first) % step != 0 or is_outside((number - first) // step)


def _before_key_indices(is_outside: Outside, _: object, block: int) -> Outside:
    return lambda number: all(is_outside(number * block + i) for i in range(block))


# For each function that renumbers indices: a function that returns the test for inputs that name no key, given the test
# for results that name no key and the function's other arguments.
RENUMBERED: dict[object, Callable[..., Outside]] = {
    with_first: _before_with_first,
    counted_from: _before_counted_from,
    key_indices: _before_key_indices,
}


def _is_written(node: Node, reader: Node, place: Node) -> bool:
    reader = place if is_draft(reader) else reader
    return not is_draft(node) and written_between([known_tensor(node)], node, reader) is not None


def _candidates(node: Node) -> Size | None:
    """Return the number of columns that a top-k over the last dim chose from, or None if `node` isn't its indices."""
    top_k, item = node, None
    if op_name(node) in ("getitem", "getattr"):
        top_k, item = node.args[0], node.args[1]  # type: ignore[assignment]
    if not isinstance(top_k, Node) or op_name(top_k) not in TOP_K or (op_name(top_k) == "argsort") != (item is None):
        return None
    scores = tensor_of(argument(top_k, 0, "input", top_k.kwargs.get("self")))
    if scores is None or item not in (None, 1, "indices") or top_k.kwargs.get("out") is not None:
        return None
    position = 2 if op_name(top_k) == "topk" else 1
    dim = top_k.kwargs.get("dim", next((x for x in top_k.args[position:] if not isinstance(x, bool)), -1))
    columns: Size = scores.shape[-1]
    return columns if dim in (-1, scores.dim() - 1) else None


def _same_rows(node: Node) -> Node | None:
    """Return a tensor of which each row of `node` is a row or a part of one, or None."""
    source: Node | None = argument(node, 0, "input", node.kwargs.get("self"))
    before, after, name = tensor_of(source), known_tensor(node), op_name(node)
    if before is None or before.dim() == 0 or after.dim() == 0 or not {before.dtype, after.dtype} <= INTEGERS:
        return None
    if name in KEEP_ROWS:
        return source if known_equal(before.shape[-1], after.shape[-1]) else None
    if name in ("slice", "narrow"):
        return source
    if name == "select":
        return source if argument(node, 1, "dim") not in (-1, before.dim() - 1) else None
    slices = name == "getitem" and _slices_rows(node.args[1], before.dim())
    return source if slices else None


def _slices_rows(index: Any, rank: int) -> bool:
    """Return True if `x[index]` has the last dim of `x`, of that rank, or a slice of it, as its last dim."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(x is None or x is ... or isinstance(x, slice) or type(x) is int for x in parts):
        return False
    taken = sum(x is not None and x is not ... for x in parts)
    if not any(x is ... for x in parts) and taken < rank:
        return True
    return isinstance(parts[-1], slice) or (parts[-1] is ... and taken < rank)


def _before_fill(node: Node, is_outside: Outside, place: Node) -> Node | None:
    """Return the indices before some of them were replaced by a number out of range, or None."""
    if op_name(node) == "masked_fill":
        pair = [argument(node, 0, "input"), argument(node, 2, "value")]
    elif op_name(node) == "where":
        pair = [*where_arguments(node)[1:]]
    else:
        return None
    for source, fill in (pair, pair[::-1]):
        number = number_at(fill, node, place)
        outside = number is not None and is_outside(number)
        if outside and isinstance(source, Node) and rank_of(source) == rank_of(node):
            same_columns = known_equal(known_tensor(source).shape[-1], known_tensor(node).shape[-1])
            return source if same_columns and known_tensor(source).dtype in INTEGERS else None
    return None
