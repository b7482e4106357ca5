"""Attention written out with numbers that are inputs of the graph, such as float attributes under `dynamic=True`.

A scale may stay an input: it then multiplies the queries, as the factor of a bias multiplies the bias. A soft cap is an
argument of the op, and has to be known.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from tatten.passes.reasons import Decline, Reason
from tatten.passes.symbolic import guard_between, guard_number, integers_in, known_tensor, value_of
from tatten.passes.written_out import WrittenOut, read_written_out

# The least and the largest factor of queries. float16 keeps all bits of 1e-2 times the least; other dtypes can hold
# queries times two factors. A number out of range is guarded to stay the same, so that each value captures a graph.
RANGE_IN_FLOAT16 = 2.0**-7, 1.0
RANGE = 2.0**-32, 2.0**32


def settle_numbers(attention: WrittenOut, may_guard: bool, may_fix: bool) -> WrittenOut | Decline:
    """Return attention whose input numbers are known, or may multiply queries in every run; else the reason.

    Adds guards: a factor of queries is in a range and, with `may_fix`, any other number stays the same.
    """
    scores = attention.scores
    # `baddbmm` ignores a bias times 0, even an infinite one. The range excludes 0.
    beta = () if scores.product.unknown_beta is None else (scores.product.unknown_beta,)
    numbers = (*scores.fixed, *beta, *(x for x, _ in scores.factors))
    if not numbers:
        return attention
    if not may_guard:
        names = ", ".join(f"`{x}`" for x in numbers)
        return Decline(Reason.SCALE, f"{names} may be another number in each run")
    query, product = known_tensor(attention.query.node), known_tensor(scores.product.node)
    sized = next((x for x in numbers if _depends_on_sizes(x, query, product)), None)
    if sized is not None:
        return Decline(Reason.SCALE, f"`{sized}` depends on a dynamic size or on another integer that is an input")
    # The product of two factors may be too small for float16.
    as_wide = query.dtype == product.dtype and (query.dtype != torch.float16 or len(scores.factors) == 1)
    fixed = [*scores.fixed, *(x for x in beta if not guard_between(x, *RANGE))]
    least, most = RANGE_IN_FLOAT16 if query.dtype == torch.float16 else RANGE
    for number, divides in scores.factors:
        between = (1 / most, 1 / least) if divides else (least, most)
        if not as_wide or not guard_between(number, *between):
            fixed.append(number)
    unknown = next((x for x in fixed if not may_fix or not guard_number(x)), None)
    if unknown is not None:
        return Decline(Reason.SCALE, f"`{unknown}` may be another number in each run")
    settled = read_written_out(attention.softmax) if fixed else attention
    assert settled is not None
    return settled


def _depends_on_sizes(number: Node, query: Tensor, product: Tensor) -> bool:
    """Return True if a guard on a number would fix a size that may grow, such as the length of keys."""
    integers = integers_in(value_of(number))
    in_query, others = ([integers_in(n) for n in shape] for shape in (query.shape, product.shape[-2:]))
    if integers is None or None in in_query or None in others:
        return True
    return not integers <= set().union(*in_query) - set().union(*others)  # type: ignore[arg-type]
