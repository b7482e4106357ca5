"""Read the scores of attention that is written out, backwards from a softmax to the product of queries and keys.

The steps between are proven to be `softmax([softcap * tanh(scale / softcap * product) + bias, sinks])`. The bias is
the result of the steps for a score of 0: a step either adds to scores or replaces them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx import Node

from tatten.passes.calls import argument, cat_arguments, op_name, where_arguments
from tatten.passes.literals import TIMES, factor_of, number_of, rounded
from tatten.passes.metadata import depends, reads_values
from tatten.passes.mutation import inactive_dropout, writes, written_arguments
from tatten.passes.no_effect import keeps_rows, subtracts_maximum
from tatten.passes.op_names import CASTS, CATS, COPIES, RESHAPES
from tatten.passes.products import Product, product_of
from tatten.passes.reasons import Decline, Reason
from tatten.passes.symbolic import is_input_number, known_equal, known_shape, known_tensor, tensor_of

# A bias at or below this absorbs any score in float32, so that adding it replaces the score.
ABSORBS = -1e30

ADDS = {"add": 1, "iadd": 1, "sub": -1, "isub": -1}
FILLS = {"where", "masked_fill"}
BOUNDS = {"max", "maximum", "clamp", "clamp_min"}


@dataclass(frozen=True)
class Step:
    """A step from scores to the input of softmax.

    Attributes:
        kind: "add" adds `number * node` to scores; "times" and "over" multiply and divide them by `number`; "where" and
            "where_not" replace them by `number` where `node` is True or False; "at_least" is their maximum with
            `number`; "to" only rounds them to `dtype`.
        dtype: the dtype of scores after the step.
    """

    kind: Literal["add", "times", "over", "where", "where_not", "at_least", "to"]
    number: float | Node
    dtype: torch.dtype
    node: Node | None = None


@dataclass(frozen=True)
class Scores:
    """Scores of attention that is written out.

    Attributes:
        product: the product of queries and keys.
        scale, softcap, sinks: as `tatten.decode_attention` takes them; `sinks` is `[heads]`, a node.
        factors: input numbers that also multiply scores, or divide them if paired with True.
        fixed: input numbers from which the soft cap is computed. They must become known first.
        steps: the steps that follow, in order.
        path: the nodes from softmax's input to the product, and to the sinks.
        column: the column of softmax's input that has the sinks: 0, or -1 for the last.
    """

    product: Product
    scale: float = 1.0
    softcap: float | None = None
    sinks: Node | None = None
    factors: tuple[tuple[Node, bool], ...] = ()
    fixed: tuple[Node, ...] = ()
    steps: tuple[Step, ...] = ()
    path: tuple[Node, ...] = ()
    column: int = -1


@dataclass
class _Walk:
    """A walk from a softmax back to `node`."""

    node: Node
    steps: list[Step] = field(default_factory=list)  # the last step first
    path: list[Node] = field(default_factory=list)
    sinks: Node | None = None
    column: int = -1
    scale: float = 1.0
    outer: float | None = None  # the factor of tanh's result
    factors: list[tuple[Node, bool]] = field(default_factory=list)
    caps: list[Node] = field(default_factory=list)

    def go(self, source: Node, *others: Node) -> None:
        """Go back to `source`, and add the passed nodes to the path."""
        self.path += [self.node, *others]
        self.node = source


def find_scores(softmax: Node, above: set[Node]) -> Scores | Decline | None:
    """Read the scores of a softmax.

    Args:
        softmax: the softmax.
        above: the nodes that depend on products of activations.

    Returns:
        The scores, the reason why they have another form, or None if softmax's input is not made from a product.
    """
    source = argument(softmax, 0, "input", softmax.kwargs.get("self"))
    if not isinstance(source, Node) or source not in above:
        return None
    walk = _Walk(source)
    _round(walk, source, softmax)
    return _read(walk, above)


def _read(walk: _Walk, above: set[Node]) -> Scores | Decline | None:
    while walk.node in above:
        product = product_of(walk.node)
        if product is not None:
            dependent = next((x.node for x in walk.steps if x.node and depends(x.node, product.node, above)), None)
            if dependent is not None:
                return Decline(Reason.RELATIVE, f"`{dependent}` joins the scores, and depends on them itself")
            return _finish(walk, product)
        obstacle = _step_back(walk, above)
        if obstacle is not None:
            return obstacle
    return None


def _finish(walk: _Walk, product: Product) -> Scores | Decline:
    if product.bias is not None and number_of(product.bias, product.node) != 0:
        if walk.outer is not None:
            return Decline(Reason.RELATIVE, f"`{product.node}` adds a bias before the soft cap")
        beta = product.beta if product.unknown_beta is None else product.unknown_beta
        walk.steps.append(Step("add", beta, _dtype(product.node), product.bias))
    scale = walk.scale * product.scale * (1.0 if walk.outer is None else walk.outer)
    softcap = None if walk.outer is None else abs(walk.outer)
    if not math.isfinite(scale) or scale == 0:
        return Decline(Reason.SCALE, f"scores are multiplied by {scale}")
    path = (*walk.path, product.node)
    factors, caps, steps = tuple(walk.factors), tuple(walk.caps), tuple(reversed(walk.steps))
    if product.unknown_scale is not None:
        factors = (*factors, (product.unknown_scale, False))
    return Scores(product, scale, softcap, walk.sinks, factors, caps, steps, path, walk.column)


def _step_back(walk: _Walk, above: set[Node]) -> Decline | None:
    """Go one op back, or return the reason why that isn't possible."""
    node, name = walk.node, op_name(walk.node)
    sources = [x for x in node.all_input_nodes if x in above and reads_values(node, x)]
    if writes(node):
        name = name.removesuffix("_")
        if name not in _HANDLERS or {*written_arguments(node)} != {node.args[0]}:
            return Decline(Reason.IN_PLACE, f"`{node}` changes scores in place")
    if name in CASTS | COPIES and _is_float(node) and len(sources) == 1:
        _round(walk, sources[0], node)
        walk.go(sources[0])
        return None
    if name in RESHAPES and len(sources) == 1 and keeps_rows(sources[0], node):
        walk.go(sources[0])
        return None
    if inactive_dropout(node):
        walk.go(sources[0])
        return None
    maximum = subtracts_maximum(node)
    if maximum is not None and walk.sinks is None and walk.outer is None:
        if all(x.kind == "to" for x in walk.steps):  # rounding after the subtraction keeps the maximum, 0
            walk.steps.clear()
        walk.go(node.args[0], *maximum)  # type: ignore[arg-type]
        return None
    if name in CATS:
        return _concatenated(walk, sources)
    if len(sources) > 1:  # a mask may also depend on products, such as those of an indexer
        sources = [x for x in sources if isinstance(_read(_Walk(x), above), Scores)]
    if not sources:
        return Decline(Reason.RELATIVE, f"`{node}` is a product of a form that is not known")
    if len(sources) != 1:
        return Decline(Reason.RELATIVE, f"`{node}` joins {len(sources)} terms that depend on products")
    if writes(node) and node.args[0] is not sources[0]:
        return Decline(Reason.IN_PLACE, f"`{node}` writes scores into `{node.args[0]}`")
    if not _same_shape(node, sources[0]):
        return Decline(Reason.RELATIVE, f"`{node}` changes the shape of scores")
    handle = _HANDLERS.get(name)
    return _unknown(node) if handle is None else handle(walk, node, name, sources[0])


def _unknown(node: Node) -> Decline:
    return Decline(Reason.RELATIVE, f"`{op_name(node) or node.target}` is applied to scores")


def _add(walk: _Walk, node: Node, name: str, source: Node) -> Decline | None:
    a, b = argument(node, 0, "input"), argument(node, 1, "other")
    other, sign = (b, ADDS[name]) if a is source else (a, 1)
    alpha = node.kwargs.get("alpha", 1)
    if other is source or (a is not source and (name not in ("add", "iadd") or alpha != 1)):
        return Decline(Reason.RELATIVE, f"`{node}` does not add to scores alone")
    if isinstance(other, Node) and _is_float(other) and isinstance(alpha, int | float):
        if walk.outer is not None:
            return Decline(Reason.RELATIVE, f"`{node}` adds a bias before the soft cap")
        walk.steps.append(Step("add", float(sign * alpha), _dtype(node), other))
    elif number_of(other, node) != 0:
        return _unknown(node)
    walk.go(source)
    return None


def _times(walk: _Walk, node: Node, name: str, source: Node) -> Decline | None:
    source_and_factor = factor_of(node)
    if node.kwargs.get("rounding_mode") is not None:
        return _unknown(node)
    a, b = argument(node, 0, "input"), argument(node, 1, "other")
    factor = b if a is source else a
    if is_input_number(factor) and (a is source or "div" not in name):
        divides = "div" in name
        walk.factors.append((factor, divides))
        if walk.outer is None:
            walk.steps.append(Step("over" if divides else "times", factor, _dtype(node)))
        walk.go(source)
        return None
    number = number_of(factor, node)
    if number is not None and (number == 0 or not math.isfinite(number)):
        return Decline(Reason.SCALE, f"`{node}` multiplies scores by {number}, or divides by it")
    if source_and_factor is None or source_and_factor[0] is not source:
        return Decline(Reason.RELATIVE, f"`{node}` multiplies scores by something else than a number")
    _, factor = source_and_factor
    walk.scale *= factor
    if walk.outer is None:
        walk.steps.append(Step("times", factor, _dtype(node)))
    walk.go(source)
    return None


def _tanh(walk: _Walk, node: Node, name: str, source: Node) -> Decline | None:
    """Read `a * tanh(b * x)`, a soft cap of a: `a * tanh(a * b * x / a)`."""
    if walk.outer is not None:
        return _unknown(node)
    walk.outer, walk.scale = walk.scale, 1.0
    walk.caps, walk.factors = [x for x, _ in walk.factors], []
    walk.go(source)
    return None


def _fill(walk: _Walk, node: Node, name: str, source: Node) -> Decline | None:
    if name == "where":
        condition, a, b = where_arguments(node)
        kind: Any = "where_not" if a is source else "where"
        value = b if a is source else a
    else:
        condition, value, kind = argument(node, 1, "mask"), argument(node, 2, "value"), "where"
    number, mask = number_of(value, node), tensor_of(condition)
    if is_input_number(value):
        return Decline(Reason.MASK_VALUE, f"`{node}` replaces scores by `{value}`, which may be any number")
    if mask is None or mask.dtype != torch.bool or number is None or math.isnan(number) or walk.outer is not None:
        return _unknown(node)
    if number > ABSORBS:
        return Decline(Reason.MASK_VALUE, f"`{node}` replaces scores by {number}, which others may be near")
    walk.steps.append(Step(kind, rounded(number, _dtype(node)), _dtype(node), condition))
    walk.go(source)
    return None


def _at_least(walk: _Walk, node: Node, name: str, source: Node) -> Decline | None:
    bound = (
        node.kwargs.get("min", argument(node, 1, "other")) if name.startswith("clamp") else argument(node, 1, "other")
    )
    if name == "clamp" and argument(node, 2, "max") is not None:
        return _unknown(node)
    if node.args[0] is not source:
        bound = node.args[0]
    number = number_of(bound, node)
    if number is None or not number <= ABSORBS or walk.outer is not None:
        return _unknown(node)
    number = rounded(number, _dtype(node))
    if number > -math.inf:
        walk.steps.append(Step("at_least", number, _dtype(node)))
    walk.go(source)
    return None


def _concatenated(walk: _Walk, sources: list[Node]) -> Decline | None:
    """Read a `cat` of scores and one column of sinks."""
    node = walk.node
    tensors, dim = cat_arguments(node)
    joined = tensor_of(node)
    if joined is None or len(sources) != 1 or len(tensors) != 2 or dim not in (-1, joined.dim() - 1):
        return Decline(Reason.RELATIVE, f"`{node}` joins scores with others")
    if walk.sinks is not None or any(x.kind != "to" for x in walk.steps) or walk.outer is not None or walk.scale != 1:
        return Decline(Reason.RELATIVE, f"the columns that `{node}` adds to scores are changed before softmax")
    other = tensors[1] if tensors[0] is sources[0] else tensors[0]
    column = tensor_of(other)
    if column is None or not known_equal(column.shape[-1], 1):
        return Decline(Reason.RELATIVE, f"`{node}` adds more than one column to scores")
    walk.sinks, walk.column = other, -1 if tensors[0] is sources[0] else 0
    walk.go(sources[0])
    return None


def _round(walk: _Walk, source: Node, node: Node) -> None:
    """Add a step if `node` has a dtype that may round the scores of `source`."""
    before, after = _dtype(source), _dtype(node)
    if before != after and before.itemsize >= after.itemsize:
        walk.steps.append(Step("to", 1.0, after))


def _dtype(node: Node) -> torch.dtype:
    return known_tensor(node).dtype


def _same_shape(a: Node, b: Node) -> bool:
    x, y = tensor_of(a), tensor_of(b)
    return x is not None and y is not None and known_shape(x.shape, y.shape)


def _is_float(node: Node) -> bool:
    tensor = tensor_of(node)
    return tensor is not None and tensor.is_floating_point()


_HANDLERS = {
    **dict.fromkeys(ADDS, _add),
    **dict.fromkeys(TIMES, _times),
    **dict.fromkeys(FILLS, _fill),
    **dict.fromkeys(BOUNDS, _at_least),
    "tanh": _tanh,
}
