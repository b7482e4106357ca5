"""Parameters of which only some run in `make test`; the others are marked `slow`, and CI draws a share of them."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_after(n: int, cases: Iterable[Any]) -> list[Any]:
    """All but the first n are slow."""
    return [case if i < n else _slow(case) for i, case in enumerate(cases)]


def slow_but(fast: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """All but those in `fast` are slow; each of those has to be there."""
    cases = list(cases)
    missing = [case for case in fast if case not in cases]
    assert not missing, f"no such cases: {missing}"
    return [case if case in fast else _slow(case) for case in cases]


def is_drawn(nodeid: str, share: float, seed: str) -> bool:
    """Tell whether a slow test runs: all processes of a run agree, and a seed always draws the same tests."""
    return zlib.crc32(f"{seed} {nodeid}".encode()) < share * 2**32


def slow_but_some(n: int, cases: Iterable[Any]) -> list[Any]:
    """All but n are slow, drawn by `TATTEN_FUZZ_SEED`."""
    cases = list(cases)
    drawn = random.Random(os.environ.get("TATTEN_FUZZ_SEED", "0")).sample(range(len(cases)), n)
    return [case if i in drawn else _slow(case) for i, case in enumerate(cases)]


def _slow(case: Any) -> Any:
    """A tuple holds a value for each of several parameters."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
