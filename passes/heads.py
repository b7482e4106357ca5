"""Undoing `repeat_kv`: finding the tensor whose heads were repeated to match the query's.

All spellings end in the same indexing, `repeated[b, h, s, d] == base[b, h // repeats, s, d]`. Each step back through
the graph is justified by what the op does to shapes, never by how its arguments are written: dims of size 1 that an op
may only stretch, and reshapes that may only merge two neighbours.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Node

from tatten.passes.symbolic import constant, known_equal, known_shape, tensor_of, value_of

IDENTITY: tuple[int, ...] = (0, 1, 2, 3)
STRETCHES = {"expand", "broadcast_to", "repeat", "tile", "expand_as"}
RESHAPES = {"reshape", "view", "flatten", "reshape_as", "view_as", "_unsafe_view"}
COPIES = {"contiguous", "clone", "alias"}


@dataclass(frozen=True)
class Peeled:
    """`key` or `value`: the tensor `base` with its dims in the order `dims`, and then each head `repeats` times."""

    base: Node
    dims: tuple[int, ...] = IDENTITY
    repeats: int = 1
    chain: tuple[Node, ...] = ()  # the nodes between, from SDPA's argument to the one that reads `base`


def peel_heads(node: Node) -> Peeled:
    """Walk from SDPA's key or value back to the tensor before its heads were repeated, or stay where it is."""
    here, dims = node, IDENTITY
    while True:
        head_dim = dims[1]  # where `here` has its heads
        found = _unrepeat(here, head_dim)
        if found is not None:
            base, repeats = found
            return Peeled(base, dims, repeats, _chain(node, base))
        step = _reorder(here)
        if step is None:
            return Peeled(node)
        here, order = step
        dims = tuple(order[d] for d in dims)


def _chain(node: Node, base: Node) -> tuple[Node, ...]:
    """From `node` back to the node that takes `base` as input."""
    chain = [node]
    while base not in chain[-1].all_input_nodes:
        chain.append(chain[-1].all_input_nodes[0])
    return tuple(chain)


def op_name(node: Node) -> str:
    """`repeat_interleave` for the method, the function and the aten overload alike; empty for what is no call."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[1]
    return getattr(node.target, "__name__", "")


def _source(node: Node) -> Node | None:
    """The tensor that a view-like node reads: its first argument."""
    first = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
    return first if isinstance(first, Node) and tensor_of(first) is not None else None


def _reorder(node: Node) -> tuple[Node, tuple[int, ...]] | None:
    """`(source, order)` if `node` is a copy of `source` or its 4-D permutation: dim d of `node` is `order[d]` of it."""
    source, name = _source(node), op_name(node)
    if source is None:
        return None
    before, after = tensor_of(source), tensor_of(node)
    if before is None or after is None or before.dim() != 4 or after.dim() != 4 or before.dtype != after.dtype:
        return None
    if name in COPIES or (name == "to" and before.device == after.device):
        return source, IDENTITY
    args = node.args[1:]
    if name in ("transpose", "swapaxes", "swapdims") and len(args) == 2:
        if not isinstance(args[0], int) or not isinstance(args[1], int):
            return None
        order = list(IDENTITY)
        i, j = args[0] % 4, args[1] % 4
        order[i], order[j] = order[j], order[i]
        return source, tuple(order)
    if name == "permute":
        wanted = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
        dims = tuple(d % 4 for d in wanted if isinstance(d, int))
        if len(dims) == len(wanted) == 4:
            return source, dims
    return None


def _unrepeat(node: Node, dim: int) -> tuple[Node, int] | None:
    """`(base, repeats)` if `node` is `base` with each index of `dim` repeated in place, one way or another."""
    source, name = _source(node), op_name(node)
    result = tensor_of(node)
    if source is None or result is None or result.dim() != 4:
        return None
    before = tensor_of(source)
    assert before is not None
    if before.dtype != result.dtype:
        return None
    if name in RESHAPES and before.dim() == 5:
        # [.., heads, repeats, ..] -> [.., heads * repeats, ..]: a row-major reshape has no other way to this shape
        merged = (*before.shape[:dim], before.shape[dim] * before.shape[dim + 1], *before.shape[dim + 2 :])
        return _unstretch(source, dim) if known_shape(result.shape, merged) else None
    if before.dim() != 4:
        return None
    if name == "repeat_interleave":
        return _ratio(source, before, result, dim) if _interleaves_evenly(node, 4, dim) else None
    if name in STRETCHES and known_equal(before.shape[dim], 1):
        return _ratio(source, before, result, dim)  # one head for all
    return None


def _interleaves_evenly(node: Node, rank: int, dim: int) -> bool:
    """Whether a `repeat_interleave` repeats each index of `dim` the same number of times."""
    arguments = dict(zip(("repeats", "dim"), node.args[1:], strict=False)) | dict(node.kwargs)
    repeats, along = arguments.get("repeats"), arguments.get("dim")
    if isinstance(repeats, Node):
        repeats = value_of(repeats)
    if not isinstance(repeats, int | SymInt):
        return False  # one count for each index
    return isinstance(along, int) and along % rank == dim


def _ratio(source: Node, before: Tensor, result: Tensor, dim: int) -> tuple[Node, int] | None:
    """`repeats` from the sizes, if they are constants and no other dim changed."""
    small, large = constant(before.shape[dim]), constant(result.shape[dim])
    if not small or not large or large % small:
        return None
    same = all(known_equal(before.shape[d], result.shape[d]) for d in range(before.dim()) if d != dim)
    return (source, large // small) if same else None


def _unstretch(node: Node, dim: int) -> tuple[Node, int] | None:
    """`(base, repeats)` if the 5-D `node` is the 4-D `base` with `repeats` equal copies along a new dim after `dim`."""
    result = tensor_of(node)
    assert result is not None
    repeats = constant(result.shape[dim + 1])
    if not repeats:
        return None
    here = node
    while op_name(here) in COPIES:
        source = _source(here)
        if source is None:
            return None
        here = source
    name = op_name(here)
    if name == "stack":
        return _stacked(here, dim)
    while name in STRETCHES or name in COPIES or name == "repeat_interleave":
        source = _source(here)
        before = tensor_of(source)
        if source is None or before is None or before.dim() != 5:
            return None
        after = tensor_of(here)
        assert after is not None
        others = [d for d in range(5) if d != dim + 1]
        if not all(known_equal(before.shape[d], after.shape[d]) for d in others):
            return None
        if name == "repeat_interleave" and not _interleaves_evenly(here, 5, dim + 1):
            return None
        if not (known_equal(before.shape[dim + 1], 1) or known_equal(before.shape[dim + 1], after.shape[dim + 1])):
            return None
        here, name = source, op_name(source)
    base = _without_new_dim(here, dim + 1)
    return None if base is None else (base, repeats)


def _stacked(node: Node, dim: int) -> tuple[Node, int] | None:
    """`torch.stack([base] * repeats, dim=dim + 1)`."""
    arguments = dict(zip(("tensors", "dim"), node.args, strict=False)) | dict(node.kwargs)
    parts, along = arguments.get("tensors"), arguments.get("dim", 0)
    if not isinstance(parts, (list, tuple)) or not isinstance(along, int) or along % 5 != dim + 1:
        return None
    return (parts[0], len(parts)) if all(part is parts[0] for part in parts) else None


def _without_new_dim(node: Node, dim: int) -> Node | None:
    """The 4-D tensor of which the 5-D `node` is the same elements in the same order, with a size 1 at `dim`."""
    source, after = _source(node), tensor_of(node)
    before = tensor_of(source)
    if source is None or before is None or after is None or before.dim() != 4:
        return None
    if not known_shape(after.shape, (*before.shape[:dim], 1, *before.shape[dim:])):
        return None
    name = op_name(node)
    if name == "unsqueeze" or name in RESHAPES:
        return source
    if node.target is operator.getitem and _only_adds_dims(node.args[1]):
        return source
    return None


def _only_adds_dims(index: Any) -> bool:
    parts: Sequence[Any] = index if isinstance(index, (list, tuple)) else (index,)
    return all(part is None or part is builtins.Ellipsis or part == slice(None) for part in parts)
