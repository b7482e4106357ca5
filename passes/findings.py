"""What the passes did to a graph and what they left alone: the values that reports are made of."""

from __future__ import annotations

from dataclasses import dataclass

from tatten.passes.cost import Cost
from tatten.passes.reasons import Decline
from tatten.passes.source_location import SourceLocation


@dataclass(frozen=True)
class Rewritten:
    """An SDPA call that became a tatten op, and what that saves at least; `note` says why it isn't a better one."""

    location: SourceLocation
    op: str
    shapes: str
    cost: Cost | None
    note: str = ""
    provider: str = ""  # who computes it on a GPU, for the sizes of the example


@dataclass(frozen=True)
class Declined:
    """An SDPA call that stayed as it was, or attention that is no SDPA call."""

    location: SourceLocation
    shapes: str
    decline: Decline


@dataclass(frozen=True)
class GraphReport:
    """The findings of one graph in order, and the time that the passes took."""

    findings: tuple[Rewritten | Declined, ...]
    milliseconds: float
