"""The definition of a claim, and the figures that claims are about."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
OURS = ("auto", "triton")


@dataclass(frozen=True)
class Claim:
    """A bound on a figure of the rows of `<file>.json`; a run may miss it by the fraction `within`."""

    name: str
    file: str
    rows: int  # of a complete run, at least
    figure: Callable[[list[Row]], float]
    said: str
    at_most: float | None = None
    at_least: float | None = None
    within: float = 0.05

    def holds(self, figure: float) -> bool:
        """Return True if the figure supports the claim; NaN never does."""
        return (self.at_most is None or figure <= self.at_most * (1 + self.within)) and (
            self.at_least is None or figure >= self.at_least * (1 - self.within)
        )

    @property
    def bound(self) -> str:
        named = (("at most", self.at_most), ("at least", self.at_least))
        bounds = (f"{name} {bound:g}" for name, bound in named if bound is not None)
        return f"{' and '.join(bounds)}, within {self.within:.0%}"


def to_peers(r: Row) -> float:
    """Ours over the best of the others."""
    return r["us"]["auto"] / min(us for name, us in r["us"].items() if name not in OURS)


def over(ours: str, *others: str) -> Callable[[Row], float]:
    """One column over the least of others; the first of them has to be there."""
    return lambda r: r["us"][ours] / min(r["us"][others[0]], *(r["us"].get(x, float("inf")) for x in others))


def slower(key: str, than: str) -> Callable[[Row], float]:
    return lambda r: r[key] / r[than]


def over_push(merge: str) -> Callable[[Row], float]:
    return lambda r: r["us"][merge] / r["us"]["push"]


def geomean(ratio: Callable[[Row], float]) -> Callable[[list[Row]], float]:
    return lambda rows: statistics.geometric_mean(map(ratio, rows))


def largest(ratio: Callable[[Row], float]) -> Callable[[list[Row]], float]:
    return lambda rows: max(map(ratio, rows), key=lambda x: (math.isnan(x), x))


def least(ratio: Callable[[Row], float]) -> Callable[[list[Row]], float]:
    return lambda rows: min(map(ratio, rows), key=lambda x: (not math.isnan(x), x))


def one(key: str, value: object, figure: Callable[[Row], float]) -> Callable[[list[Row]], float]:
    """The figure of the row of which `key` is `value`; a ValueError if there is another number of them than one."""

    def found(rows: list[Row]) -> float:
        (row,) = (r for r in rows if r[key] == value)
        return figure(row)

    return found


def one_call(groups: str, given: str, figure: str) -> Callable[[list[Row]], float]:
    """A figure of `prefix_trees.py`'s groups, by which they are and how they are given."""
    return lambda rows: one("given", given, lambda r: r[figure])([r for r in rows if r["groups"] == groups])


def compiling(r: Row) -> float:
    """Seconds of compiling over Inductor's."""
    return r["compile_s"]["tatten"] / r["compile_s"]["inductor"]


def those(only: Callable[[Row], bool], figure: Callable[[list[Row]], float]) -> Callable[[list[Row]], float]:
    return lambda rows: figure([r for r in rows if only(r)])


def spread(values: Iterable[float]) -> float:
    """The largest over the least."""
    found = list(values)
    return max(found) / min(found)


def host(call: str) -> Callable[[list[Row]], float]:
    return one("call", call, lambda r: r["over_sdpa"])


def fork_over(backend: str) -> Callable[[Row], float]:
    return lambda r: r["tokens_per_second"]["fork"] / r["tokens_per_second"][backend]


def to_same_function(r: Row) -> float:
    """A step in eager mode over the best that computes the same: SDPA lacks Gemma 2's soft cap."""
    ms = r["ms"]
    return ms["tatten"] / min(
        ms[name] for name in ("eager", "sdpa") if name in ms and (name, r["model"]) != ("sdpa", "gemma2")
    )
