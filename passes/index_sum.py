"""The weighted sum over index heads for each query, and the steps from the sums to the scores that pick keys."""

from __future__ import annotations

import builtins
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from tatten.passes.calls import argument, op_name, where_arguments
from tatten.passes.index_operands import OF_BATCH, OF_HEADS, OF_LENGTH, OF_QUERIES, SCORES, mask_operand
from tatten.passes.index_steps import ScaleSteps, next_step, only_reader
from tatten.passes.literals import number_of
from tatten.passes.mutation import writes
from tatten.passes.op_names import INVERTS, MATMULS, RESHAPES
from tatten.passes.products import Factor, spelled_out
from tatten.passes.symbolic import known_equal, known_shape, known_tensor, rank_of, tensor_of
from tatten.passes.views import Part, Size

TIMES = {"mul", "imul", "multiply"}


@dataclass(frozen=True)
class Summed:
    """A weighted sum over heads.

    Attributes:
        steps: the steps from relu to the summed tensor, `steps.node`.
        node: the sum.
        parts: the part that each dim of the summed tensor counts.
        weights, weight_parts: the weights, and the part that each of their dims counts.
        dim: the dim of size 1 that `node` has in place of heads; None if it has none.
        path: the nodes between the summed tensor and the sum.
    """

    steps: ScaleSteps
    node: Node
    parts: tuple[Part, ...]
    weights: Node
    weight_parts: tuple[Part, ...]
    dim: int | None
    path: tuple[Node, ...] = ()

    @property
    def sizes(self) -> dict[Part, Size]:
        """The sizes of the parts."""
        return dict(zip(self.parts, known_tensor(self.steps.node).shape, strict=True))


@dataclass(frozen=True)
class Masked:
    """The scores by which keys are picked.

    Attributes:
        node: the last node of the scores.
        scale: the factor of the sum.
        dim: as in `Summed`.
        path: the nodes from the sum to the one before `node`.
        mask: the mask as the op takes it; None without a mask.
        inverted: whether the op gets the mask inverted.
    """

    node: Node
    scale: float
    dim: int | None
    path: tuple[Node, ...] = ()
    mask: Factor | None = None
    inverted: bool = False


def find_sum(relu: Node) -> Summed | None:
    """Find the weighted sum over heads that a relu leads to, or return None."""
    steps = ScaleSteps(relu, (relu,))
    while True:
        for user in sorted(steps.node.users):
            summed = _matmul(steps, user) or _times(steps, user) or _einsum(steps, user)
            if summed is not None:
                return summed
        following = next_step(steps.node)
        if following is None or rank_of(steps.node) != 4:
            return None
        node, step = following
        steps = steps.after(node, step)


def _matmul(steps: ScaleSteps, user: Node) -> Summed | None:
    """Read a sum `weights[..., None, :] @ scores`."""
    if op_name(user) not in MATMULS or argument(user, 1, "other") is not steps.node:
        return None
    weights = argument(user, 0, "input", user.kwargs.get("self"))
    left, parts = tensor_of(weights), (OF_BATCH, OF_QUERIES, OF_HEADS, OF_LENGTH)
    if left is None or left.dim() != 4 or rank_of(steps.node) != 4 or not known_equal(left.shape[2], 1):
        return None
    return Summed(steps, user, parts, weights, (OF_BATCH, OF_QUERIES, OF_LENGTH, OF_HEADS), 2)


def _times(steps: ScaleSteps, user: Node) -> Summed | None:
    """Read a sum `(scores * weights[..., None]).sum(heads)`, with heads before or after queries."""
    if op_name(user).removesuffix("_") not in TIMES:
        return None
    operands = argument(user, 0, "input"), argument(user, 1, "other")
    weights = operands[0] if operands[1] is steps.node else operands[1]
    tensor, reader = tensor_of(weights), _sum_of(user)
    times_read = sum(x is steps.node for x in operands)  # twice if they are squared; not at all if they are `out`
    if times_read != 1 or tensor is None or tensor.dim() != 4 or rank_of(steps.node) != 4 or reader is None:
        return None
    dim = argument(reader, 1, "dim")
    dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
    if not isinstance(dim, int) or dim % 4 not in (1, 2) or not known_equal(tensor.shape[-1], 1):
        return None
    dim %= 4
    parts = (OF_BATCH, *((OF_HEADS, OF_QUERIES) if dim == 1 else (OF_QUERIES, OF_HEADS)), OF_LENGTH)
    return Summed(steps, reader, parts, weights, parts, dim if argument(reader, 2, "keepdim", False) else None, (user,))


def _sum_of(products: Node) -> Node | None:
    """Return the first user of weighted products that is their `sum`, or None."""
    return next((x for x in sorted(products.users) if op_name(x) == "sum" and x.args[0] is products), None)


def _einsum(steps: ScaleSteps, user: Node) -> Summed | None:
    """Read an einsum of scores and weights, with dims in any order."""
    if op_name(user) != "einsum":
        return None
    equation, factors = spelled_out(user)
    inputs, _, out = equation.partition("->")
    letters = dict(zip(factors, inputs.split(","), strict=True)) if equation else {}
    scores = letters.pop(steps.node, "")
    if len(letters) != 1 or len({*scores}) != 4 or len({*out}) != 3 or out[2] != scores[3]:
        return None
    ((weights, weight_letters),) = letters.items()
    (heads,) = {*scores} - {*out} if {*out} < {*scores} else {""}
    if not heads or not {*weight_letters} <= {*scores[:3]} or len({*weight_letters}) != len(weight_letters):
        return None
    part_of = {out[0]: OF_BATCH, out[1]: OF_QUERIES, heads: OF_HEADS, out[2]: OF_LENGTH}
    parts_of_scores, parts_of_weights = (tuple(part_of[x] for x in text) for text in (scores, weight_letters))
    return Summed(steps, user, parts_of_scores, weights, parts_of_weights, None)


def find_mask(summed: Summed) -> Masked:
    """Follow a weighted sum to its mask, as long as each node has only one reader."""
    node, scale, dim, path = summed.node, 1.0, summed.dim, list[Node]()
    sizes = summed.sizes
    while (reader := only_reader(node)) is not None:
        following = next_step(node)
        if dim is not None and _drops(reader, node, [sizes[x] for x in SCORES]):
            dim = None
        elif following is not None and following[1].factor is None and not following[1].obstacle:
            scale *= following[1].scale
        else:
            break
        path.append(node)
        node = reader
    mask = None if reader is None or dim is not None else _mask_of(reader, node, sizes)
    if reader is None or mask is None:
        return Masked(node, scale, dim, tuple(path))
    return Masked(reader, scale, None, (*path, node), *mask)


def _drops(node: Node, source: Node, shape: list[Size]) -> bool:
    """Return True if a node drops a dim of size 1 and has this shape."""
    tensor = tensor_of(node)
    if tensor is None or not node.args or node.args[0] is not source or not known_shape(tensor.shape, shape):
        return False
    if op_name(node) == "getitem":
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return all(x in (0, -1) if isinstance(x, int) else x in (slice(None), builtins.Ellipsis) for x in index)
    return op_name(node) in RESHAPES | {"select"} and not writes(node)


def _mask_of(node: Node, scores: Node, sizes: dict[Part, Size]) -> tuple[Factor, bool] | None:
    """Return the mask that a node applies to scores, and whether the op gets it inverted, or None for another node."""
    before, after = known_tensor(scores), tensor_of(node)
    if after is None or after.dtype != before.dtype or not known_shape(after.shape, before.shape):
        return None
    if after.requires_grad:  # a learned bias
        return None
    name, true_keeps, value = op_name(node), True, None
    mask: Any = None
    if name.removesuffix("_") == "masked_fill" and argument(node, 0, "input") is scores:
        mask, value, true_keeps = argument(node, 1, "mask"), argument(node, 2, "value"), False
    elif name == "where":
        mask, a, b = where_arguments(node)
        true_keeps = a is scores
        value = b if true_keeps else a
    elif name in ("add", "iadd", "add_") and node.kwargs.get("alpha", 1) == 1:
        a, b = argument(node, 0, "input"), argument(node, 1, "other")
        return _bias(b if a is scores else a, before.dtype, sizes)
    if not isinstance(mask, Node) or value is scores or number_of(value, node) != -math.inf:
        return None
    return _bool(mask, true_keeps, sizes)


def _bias(mask: Any, scores: torch.dtype, sizes: dict[Part, Size]) -> tuple[Factor, bool] | None:
    tensor = tensor_of(mask)
    if tensor is None or tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, scores):
        return None
    operand = mask_operand(mask, sizes)
    return None if operand is None else (operand, False)


def _bool(mask: Node, true_keeps: bool, sizes: dict[Part, Size]) -> tuple[Factor, bool] | None:
    """Return a bool mask, before `~` if it is inverted, and whether the op gets it inverted, or None.

    `true_keeps` tells whether True in `mask` keeps a key or removes it.
    """
    tensor, path = tensor_of(mask), tuple[Node, ...]()
    if tensor is None or tensor.dtype != torch.bool:
        return None
    source = mask.args[0] if op_name(mask) in INVERTS and not writes(mask) else None
    before = tensor_of(source)
    if isinstance(source, Node) and before is not None and before.dtype == torch.bool:
        mask, true_keeps, path = source, not true_keeps, (mask,)
    operand = mask_operand(mask, sizes)
    return None if operand is None else (Factor(operand.node, operand.views, path), not true_keeps)
