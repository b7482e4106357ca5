"""Read the steps from indices to a mask backwards: each gives a tensor's contents inside and outside the named keys.

Only the operand that is made from indices is followed further. The contents of other operands at the named keys are
drafted.
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

from tatten.passes.calls import argument, op_name, where_arguments
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

Numbers = dict[Node, float | None]  # the number in all elements of a tensor, by node


def find_marked(mask: Node, place: Node, drafts: Drafts) -> Marked | None:
    """Read a mask at the time when the node `place` reads it. Makes drafts."""
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
        return _pointwise_of_numbers(reading, node) or (_sum(reading, node) if name == "add" else None)
    return None


def _local(reading: Reading, node: Node) -> Marked | None:
    """Read the local part of a DTensor that the graph made from a plain tensor."""
    dtensor = argument(node, 0, "self")
    local = local_input(dtensor) if isinstance(dtensor, Node) else None
    marked = reading.read(local, node)
    return None if marked is None else dataclasses.replace(marked, path=(*marked.path, dtensor, node))


def _name(node: Node) -> str:
    """Return the op's name. In graphs of torch 2.11, operators have names such as `__eq__`."""
    name = op_name(node)
    return name.strip("_") if name.startswith("__") else name


def _joined(reading: Reading, node: Node, join: Callable[..., Tensor], decides: float) -> Marked | None:
    """Read an `and` or `or`, one operand of which decides the result at all keys that are not named."""
    pair = argument(node, 0, "input"), argument(node, 1, "other")
    for operand, other in (pair, pair[::-1]):
        marked, aligned = reading.operand(operand, node), reading.aligned(other, node)
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
    """Read a fill with `number` where the marked mask is `filled`, and `x` elsewhere."""
    dtype, x_number, read = known_tensor(node).dtype, reading.number(x, node), list[Node]()
    unfilled: float | Node | None = None if x_number is None else rounded(x_number, dtype)
    if unfilled is None and (aligned := reading.aligned(x, node)) is not None:
        unfilled, read = reading.draft.cast(aligned, dtype), [x]
    if x_number is not None and isinstance(x, Node):
        marked = dataclasses.replace(marked, path=(*marked.path, x))
    if marked.inside is None or marked.counts or unfilled is None:
        return marked.after(node, outside=number, inside=None)
    if isinstance(marked.inside, float):
        return marked.after(node, *read, outside=number, inside=number if marked.inside == filled else unfilled)
    fills = marked.inside if filled else reading.draft("logical_not", marked.inside)
    base = unfilled if isinstance(unfilled, Node) else reading.draft(torch.full_like, fills, unfilled, dtype=dtype)
    return marked.after(node, *read, outside=number, inside=reading.draft(torch.masked_fill, base, fills, number))


def _nan_without_keys(reading: Reading, node: Node, x: Any, condition: Node) -> Marked | None:
    """Read a fill of NaN in rows that are all -inf, as in softmax that is written out.

    These rows are NaN at all keys, the named ones included.
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
        return marked.after(node)  # each row has keys that are not named and not -inf, so none becomes NaN
    names_a_key = marked.in_range and known_different(picks, 0)
    # A row of -inf that names no key becomes NaN, which none of its picks would show.
    return marked.after(node, inside=None) if marked.outside > -math.inf or names_a_key else None


def _chosen(reading: Reading, node: Node) -> Marked | None:
    condition, a, b = where_arguments(node)
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
        same_dtype = marked is not None and known_tensor(x).dtype == dtype
        if marked is not None and same_dtype and number is not None and rounded(number, dtype) == marked.outside:
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


def _pointwise_of_numbers(reading: Reading, node: Node) -> Marked | None:
    """Read a pointwise op whose only operand besides the marked tensor is a number, if there is one."""
    operands = [x for x in node.args if isinstance(x, Node) and tensor_of(x) is not None]
    operands = [x for x in operands if rank_of(x) == rank_of(node)]
    for operand in operands:
        others = {x: reading.number(x, node) for x in node.all_input_nodes if x is not operand}
        is_only = None not in others.values() and node.args.count(operand) == 1
        marked = reading.operand(operand, node) if is_only else None
        if marked is not None:
            return _applied(reading, node, operand, marked, others)
    return None


def _applied(reading: Reading, node: Node, operand: Node, marked: Marked, others: Numbers) -> Marked | None:
    """Apply a pointwise op to the numbers, or drafts, inside and outside the named keys."""

    def apply(number: float) -> float | None:
        return _number(node, {**others, operand: number})

    outside, inside = apply(marked.outside), marked.inside
    if marked.counts:
        other_numbers = [reading.number(x, node) for x in node.args if x is not operand]
        if _name(node) not in TESTS or other_numbers not in ([], [0.0]) or "other" in node.kwargs:
            return None
        if apply(1.0) != apply(2.0):
            return None
    if isinstance(inside, Node):
        arguments: Any = map_arg((node.args, node.kwargs), {operand: inside}.get)
        inside = None if others else reading.draft(node.target, *arguments[0], **arguments[1])
    elif inside is not None:
        inside = apply(inside)
    return None if outside is None else marked.after(node, outside=outside, inside=inside, counts=False)


def _sum(reading: Reading, node: Node) -> Marked | None:
    """Read the sum of a bias that is -inf at all keys that are not named, and another bias.

    The other bias is assumed to have no +inf or NaN there.
    """
    pair, dtype = (argument(node, 0, "input"), argument(node, 1, "other")), known_tensor(node).dtype
    if node.kwargs.get("alpha", 1) != 1 or not dtype.is_floating_point:
        return None
    for operand, other in (pair, pair[::-1]):
        marked, aligned = reading.operand(operand, node), reading.aligned(other, node)
        if marked is None or aligned is None or marked.outside != -math.inf or marked.counts:
            continue
        inside = marked.inside
        if inside is not None:
            added = aligned if inside == 0 else reading.draft(torch.add, aligned, inside)
            inside = reading.draft.cast(added, dtype)
        return marked.after(node, other, inside=inside)
    return None


def _in_dtype(number: float, dtype: torch.dtype) -> float | None:
    """Return the number that a cast to `dtype` makes of another, or None if it is undefined."""
    if dtype == torch.bool:
        return float(number != 0)
    if not dtype.is_floating_point and not (math.isfinite(number) and number == int(number)):
        return None
    return rounded(number, dtype)


def _is_bool(x: Any) -> bool:
    tensor = tensor_of(x)
    return tensor is not None and tensor.dtype == torch.bool


def _number(node: Node, numbers: Numbers) -> float | None:
    """Return the result of a pointwise op on tensors of one number each, or None if it is NaN or unknown."""

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
