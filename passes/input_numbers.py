"""Attention written out with numbers that are inputs of the graph, such as float attributes under `dynamic=True`.

A scale may stay an input: it multiplies the queries instead. A soft cap is an argument of the op, and has to be known.
"""

from __future__ import annotations

from tatten.passes.reasons import Decline, Reason
from tatten.passes.symbolic import guard_between, guard_number, tensor_of
from tatten.passes.written_out import WrittenOut, read_written_out

# Of a factor of queries: float16 keeps all bits of 1e-2 times this, and nothing leaves its range.
LEAST = 2.0**-7


def settle_numbers(found: WrittenOut, may_guard: bool) -> WrittenOut | Decline:
    """Return attention whose numbers are known, or may multiply queries in every run of the graph; else a reason.

    Adds guards: that a factor of queries is in a range, and for any other number that it is the same.
    """
    scores = found.scores
    if not scores.factors and not scores.fixed:
        return found
    if not may_guard:
        numbers = ", ".join(f"`{x}`" for x in (*scores.fixed, *(x for x, _ in scores.factors)))
        return Decline(Reason.SCALE, f"{numbers} may be another number in each run")
    query, product = tensor_of(found.query.node), tensor_of(scores.product.node)
    as_wide = query is not None and product is not None and query.dtype == product.dtype
    fixed = [*scores.fixed]
    for number, divides in scores.factors:
        least, most = (1.0, 1 / LEAST) if divides else (LEAST, 1.0)
        if not as_wide or not guard_between(number, least, most):
            fixed.append(number)
    unknown = next((x for x in fixed if not guard_number(x)), None)
    if unknown is not None:
        return Decline(Reason.SCALE, f"`{unknown}` may be another number in each run")
    again = read_written_out(found.softmax) if fixed else found
    assert again is not None
    return again
