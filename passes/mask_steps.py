"""Steps from indices to a mask, read backwards: each tells what a tensor is where indices don't point, and what there.

The tensors that a step joins are followed no further than to the one that indices made: what else there is at the keys
that are named is drafted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from tatten.passes.calls import argument, op_name
from tatten.passes.drafts import Drafts, is_draft
from tatten.passes.literals import rounded
from tatten.passes.local import local_input
from tatten.passes.marked import Marked, Reading, on_one_device, written
from tatten.passes.mask_columns import SLICES, read_beside, read_in_blocks, read_sliced
from tatten.passes.op_names import CASTS, CATS, COPIES
from tatten.passes.scattered import INTEGER_CASTS, SCATTERS, WIDE_ENOUGH, read_scatter
from tatten.passes.symbolic import (
    constant,
    known_different,
    known_equal,
    known_shape,
    known_tensor,
    rank_of,
    tensor_of,
)

ANDS = {"and", "and_", "logical_and", "bitwise_and", "mul"}
ORS = {"or", "or_", "logical_or", "bitwise_or"}
TESTS = {"eq", "ne", "lt", "le", "gt", "ge", "logical_not"}
POINTWISE = TESTS | {"invert", "bitwise_not", "add", "sub", "rsub", "mul", "neg"}

Numbers = dict[Node, float | None]  # the one number that a tensor is made of


def find_marked(mask: Node, place: Node, drafts: Drafts) -> Marked | None:
    """Read a mask as the node `place` finds it. Makes drafts and changes nothing else."""
    reading = Reading(place, drafts, _step)
    marked = reading.read(mask, place)
    if marked is None or any(written(x, reading.at(reader), place) for x, reader in marked.reads):
        return None
    return marked


def _step(reading: Reading, node: Node) -> Marked | None:
    name, tensor = _name(node), tensor_of(node)
    if tensor is None:
        return None
    if name in SCATTERS:
        return read_scatter(reading, node)
    if name in ANDS and tensor.dtype == torch.bool:
        return _joined(reading, node, torch.logical_and, 0.0)
    if name in ORS and tensor.dtype == torch.bool:
        return _joined(reading, node, torch.logical_or, 1.0)
    if name == "masked_fill":
        return _filled(reading, node)
    if name == "where":
        return _chosen(reading, node)
    if name == "repeat_interleave":
        return read_in_blocks(reading, node)
    if name in CASTS | COPIES | INTEGER_CASTS:
        return _cast(reading, node)
    if name in SLICES:
        return read_sliced(reading, node)
    if name in CATS:
        return read_beside(reading, node)
    if name == "to_local":
        return _local(reading, node)
    if name in POINTWISE:
        return _of_numbers(reading, node) or (_sum(reading, node) if name == "add" else None)
    return None


def _local(reading: Reading, node: Node) -> Marked | None:
    """The local part of a DTensor that the graph made of it."""
    dtensor = argument(node, 0, "self")
    local = local_input(dtensor) if isinstance(dtensor, Node) else None
    marked = reading.read(local, node)
    return None if marked is None else dataclasses.replace(marked, path=(*marked.path, dtensor, node))


def _name(node: Node) -> str:
    """The op's name; that of an operator is `__eq__` in graphs of torch 2.11."""
    name = op_name(node)
    return name.strip("_") if name.startswith("__") else name


def _joined(reading: Reading, node: Node, join: Callable[..., Tensor], decides: float) -> Marked | None:
    """`and` or `or`, of which one side is what decides the result wherever indices don't point."""
    pair = argument(node, 0, "input"), argument(node, 1, "other")
    for one, other in (pair, pair[::-1]):
        marked, aligned = reading.operand(one, node), reading.aligned(other, node)
        if marked is None or aligned is None or marked.outside != decides:
            continue
        if any(known_tensor(x).dtype != torch.bool for x in pair):
            return None
        inside: float | Node | None = None
        if isinstance(marked.inside, float):
            inside = aligned if marked.inside != decides else decides
        elif marked.inside is not None:
            inside = reading.draft(join, marked.inside, aligned)
        return marked.after(node, other, inside=inside)
    return None


def _filled(reading: Reading, node: Node) -> Marked | None:
    x, condition = argument(node, 0, "input"), argument(node, 1, "mask")
    number, dtype = reading.number(argument(node, 2, "value"), node), known_tensor(node).dtype
    if number is None or not _is_bool(condition):
        return None
    if math.isnan(number):
        return _nan_without_keys(reading, node, x, condition)
    number = rounded(number, dtype)
    marked = reading.operand(condition, node)
    if marked is not None and marked.outside == 1:
        return _by_mask(reading, node, marked, number, x, filled=1.0)
    marked = reading.operand(x, node)
    if marked is None or marked.outside != number or marked.counts:
        return None
    inside, aligned = marked.inside, reading.aligned(condition, node)
    if inside is not None and aligned is not None:
        base = inside if isinstance(inside, Node) else reading.draft(torch.full_like, aligned, inside, dtype=dtype)
        inside = reading.draft(torch.masked_fill, base, aligned, number)
    return marked.after(node, condition, inside=inside)


def _by_mask(reading: Reading, node: Node, marked: Marked, number: float, x: Any, filled: float) -> Marked | None:
    """`number` where the marked mask is `filled`, elsewhere `x`."""
    dtype, other, read = known_tensor(node).dtype, reading.number(x, node), list[Node]()
    kept: float | Node | None = None if other is None else rounded(other, dtype)
    if kept is None and (aligned := reading.aligned(x, node)) is not None:
        kept, read = reading.draft.cast(aligned, dtype), [x]
    if other is not None and isinstance(x, Node):
        marked = dataclasses.replace(marked, path=(*marked.path, x))
    if marked.inside is None or marked.counts or kept is None:
        return marked.after(node, outside=number, inside=None)
    if isinstance(marked.inside, float):
        return marked.after(node, *read, outside=number, inside=number if marked.inside == filled else kept)
    fills = marked.inside if filled else reading.draft("logical_not", marked.inside)
    base = kept if isinstance(kept, Node) else reading.draft(torch.full_like, fills, kept, dtype=dtype)
    return marked.after(node, *read, outside=number, inside=reading.draft(torch.masked_fill, base, fills, number))


def _nan_without_keys(reading: Reading, node: Node, x: Any, condition: Node) -> Marked | None:
    """NaN in rows that are all -inf, as where softmax is written out.

    Such rows are NaN at all keys, those that indices name among them: the mask itself tells.
    """
    test = argument(condition, 0, "input") if op_name(condition) == "all" else None
    rows = tensor_of(condition)
    if not isinstance(test, Node) or op_name(test) != "eq" or argument(test, 0, "input") is not x:
        return None
    if reading.number(argument(test, 1, "other"), test) != -math.inf or rows is None or not is_draft(node):
        return None
    if argument(condition, 1, "dim") != -1 or not known_equal(rows.shape[-1], 1):
        return None
    marked = reading.operand(x, node)
    if marked is None or marked.counts:
        return None
    keys, picks = known_tensor(x).shape[-1], known_tensor(marked.indices).shape[-1]
    most, least = constant(picks * marked.block), constant(keys)
    if marked.outside > -math.inf and most is not None and least is not None and most < least:
        return marked.after(node)  # a row has keys that are not named, which are not -inf
    names_one = marked.in_range and known_different(picks, 0)
    # A row that names no key is all -inf, but NaN at none of its picks.
    return marked.after(node, inside=None) if marked.outside > -math.inf or names_one else None


def _chosen(reading: Reading, node: Node) -> Marked | None:
    names = ("input", "condition", "other") if node.op == "call_method" else ("condition", "input", "other")
    arguments = {name: argument(node, i, name) for i, name in enumerate(names)}
    condition, a, b = arguments["condition"], arguments["input"], arguments["other"]
    if not _is_bool(condition) or a is None or b is None:
        return None
    marked, dtype = reading.operand(condition, node), known_tensor(node).dtype
    if marked is not None:
        outer, inner = (a, b) if marked.outside else (b, a)
        number = reading.number(outer, node)
        if number is not None and not math.isnan(number):
            return _by_mask(reading, node, marked, rounded(number, dtype), inner, filled=float(marked.outside != 0))
    for x, other in ((a, b), (b, a)):
        number, marked = reading.number(other, node), reading.operand(x, node)
        as_it_is = marked is not None and known_tensor(x).dtype == dtype
        if marked is not None and as_it_is and number is not None and rounded(number, dtype) == marked.outside:
            return None if marked.counts else marked.after(node, inside=None)
    return None


def _cast(reading: Reading, node: Node) -> Marked | None:
    source = argument(node, 0, "input", node.kwargs.get("self"))
    marked, dtype = reading.operand(source, node), known_tensor(node).dtype
    same_shape = marked is not None and known_shape(known_tensor(source).shape, known_tensor(node).shape)
    if marked is None or not same_shape or not on_one_device(source, node):
        return None
    if dtype == torch.bool:
        marked = dataclasses.replace(marked, counts=False)
    if marked.counts and dtype not in WIDE_ENOUGH:
        return None
    inside = marked.inside
    if isinstance(inside, Node):
        inside = reading.draft.cast(inside, dtype)
    elif inside is not None:
        inside = _in_dtype(inside, dtype)
    outside = _in_dtype(marked.outside, dtype)
    return None if outside is None else marked.after(node, outside=outside, inside=inside)


def _of_numbers(reading: Reading, node: Node) -> Marked | None:
    """An op of the tensor and numbers, at most: what it makes of the two numbers."""
    operands = [x for x in node.args if isinstance(x, Node) and tensor_of(x) is not None]
    operands = [x for x in operands if rank_of(x) == rank_of(node)]
    for one in operands:
        others = {x: reading.number(x, node) for x in node.all_input_nodes if x is not one}
        marked = reading.operand(one, node) if None not in others.values() and node.args.count(one) == 1 else None
        if marked is not None:
            return _applied(reading, node, one, marked, others)
    return None


def _applied(reading: Reading, node: Node, one: Node, marked: Marked, others: Numbers) -> Marked | None:
    def apply(number: float) -> float | None:
        return _number(node, {**others, one: number})

    outside, inside = apply(marked.outside), marked.inside
    if marked.counts:
        by = [reading.number(x, node) for x in node.args if x is not one]
        if _name(node) not in TESTS or by not in ([], [0.0]) or "other" in node.kwargs:
            return None
        if apply(1.0) != apply(2.0):
            return None
    if isinstance(inside, Node):
        arguments: Any = map_arg((node.args, node.kwargs), {one: inside}.get)
        inside = None if others else reading.draft(node.target, *arguments[0], **arguments[1])
    elif inside is not None:
        inside = apply(inside)
    return None if outside is None else marked.after(node, outside=outside, inside=inside, counts=False)


def _sum(reading: Reading, node: Node) -> Marked | None:
    """A bias of -inf wherever indices don't point, and another bias, which is taken to have no +inf or NaN there."""
    pair, dtype = (argument(node, 0, "input"), argument(node, 1, "other")), known_tensor(node).dtype
    if node.kwargs.get("alpha", 1) != 1 or not dtype.is_floating_point:
        return None
    for one, other in (pair, pair[::-1]):
        marked, aligned = reading.operand(one, node), reading.aligned(other, node)
        if marked is None or aligned is None or marked.outside != -math.inf or marked.counts:
            continue
        inside = marked.inside
        if inside is not None:
            added = aligned if inside == 0 else reading.draft(torch.add, aligned, inside)
            inside = reading.draft.cast(added, dtype)
        return marked.after(node, other, inside=inside)
    return None


def _in_dtype(number: float, dtype: torch.dtype) -> float | None:
    """A number that a cast makes of another; None if it is undefined."""
    if dtype == torch.bool:
        return float(number != 0)
    if not dtype.is_floating_point and not (math.isfinite(number) and number == int(number)):
        return None
    return rounded(number, dtype)


def _is_bool(x: Any) -> bool:
    tensor = tensor_of(x)
    return tensor is not None and tensor.dtype == torch.bool


def _number(node: Node, numbers: Numbers) -> float | None:
    """The number that a pointwise op makes of those in its tensors; None if that is NaN, or unknown."""

    def value(x: Node) -> Any:
        tensor, number = tensor_of(x), numbers[x]
        if tensor is None:
            return number
        return torch.tensor(number, dtype=torch.float64).to(tensor.dtype).expand([1] * tensor.dim())

    arguments: Any = map_arg((node.args, node.kwargs), value)
    args, kwargs = arguments
    try:
        call: Any = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
        result = call(*(args[1:] if node.op == "call_method" else args), **kwargs)
    except (TypeError, RuntimeError):
        return None
    number = float(result) if result.dtype == known_tensor(node).dtype else math.nan
    return None if math.isnan(number) else number
