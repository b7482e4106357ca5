"""Tests of which only some run in `make test`.

Those marked `slow` don't, and CI draws a share of them. Of those marked `drawn(n)` n run, drawn by a seed.
"""

from __future__ import annotations

import os
import random
import zlib
from collections import Counter, defaultdict
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
    return _rank(nodeid, seed) < share * 2**32


def left_undrawn(items: Iterable[pytest.Item], times: int, seed: str) -> list[pytest.Item]:
    """The tests marked `drawn` but `times` n of each kind.

    A kind is all tests of the function, class or file that bears the mark `drawn(n)`, or all tests that bear the same
    `drawn(n, "kind")`. The mark next to a test counts. No test function runs twice before each of its kind runs once.
    """
    kinds: dict[tuple[Any, ...], list[pytest.Item]] = defaultdict(list)
    for item in sorted(items, key=lambda x: _rank(x.nodeid, seed)):
        for node, mark in item.iter_markers_with_node("drawn"):
            kinds[mark.args if mark.args[1:] else (*mark.args, node.nodeid.split("[")[0])].append(item)
            break
    return [test for (n, _), tests in kinds.items() for test in _in_turns(tests)[n * times :]]


def _in_turns(tests: list[pytest.Item]) -> list[pytest.Item]:
    """The first case of each test function, then the second of each, and so on."""
    turns: Counter[str] = Counter()
    turn = {}
    for test in tests:
        function = test.nodeid.split("[")[0]
        turns[function] += 1
        turn[test] = turns[function]
    return sorted(tests, key=turn.__getitem__)


def _rank(nodeid: str, seed: str) -> int:
    return zlib.crc32(f"{seed} {nodeid}".encode())


def slow_but_some(n: int, cases: Iterable[Any]) -> list[Any]:
    """All but n are slow, drawn by `TATTEN_FUZZ_SEED`."""
    cases = list(cases)
    drawn = random.Random(os.environ.get("TATTEN_FUZZ_SEED", "0")).sample(range(len(cases)), n)
    return [case if i in drawn else _slow(case) for i, case in enumerate(cases)]


def _slow(case: Any) -> Any:
    """A tuple holds a value for each of several parameters."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
