"""How many examples the property tests draw, from which seed, and how small shapes reach every path.

`TATTEN_FUZZ_N` draws that many times as many examples as a run of the suite does, `TATTEN_FUZZ_SEED` others than it
does; `make fuzz SEED= N=` sets both. Without them every run draws the same.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest

from tatten.ops.cpu import thresholds
from tatten.passes import cost, sliding

REAL_RATES = dict(cost.RATES)


def settings(default_n: int, **changes: Any) -> Callable[[Any], Any]:
    """A decorator above `@given`: so many examples in a run of the suite, the same each time, and no deadlines."""
    seed, factor = os.environ.get("TATTEN_FUZZ_SEED"), int(os.environ.get("TATTEN_FUZZ_N", "1"))
    chosen = hypothesis.settings(
        max_examples=default_n * factor,
        derandomize=seed is None,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        **changes,
    )

    def decorate(test: Any) -> Any:
        return chosen(test if seed is None else hypothesis.seed(int(seed))(test))

    return decorate


@contextlib.contextmanager
def small_shapes(
    run_bytes: int = 0, split_bytes: int = 1, packed_rows: int = 1, *, free: bool = True
) -> Iterator[None]:
    """Inside, a CPU's ops go the ways that otherwise only large tensors go, and if `free` a rewrite always pays."""
    with pytest.MonkeyPatch.context() as patch:
        free_rates = dict.fromkeys(("cpu", "cuda"), cost.Rates(bytes_per_us=1.0, segment_us=0.0))
        patch.setattr(cost, "RATES", free_rates if free else REAL_RATES)
        patch.setitem(sliding.LEAST_BYTES, "cpu", 1)
        patch.setattr(thresholds, "CPU", thresholds.Thresholds(run_bytes, split_bytes, packed_rows))
        yield
