"""Findings of the passes about one graph: what reports are made of."""

from __future__ import annotations

from dataclasses import dataclass

from tatten.passes.cost import Cost
from tatten.passes.latent_cost import LatentCost
from tatten.passes.reasons import Decline
from tatten.passes.source_location import SourceLocation


@dataclass(frozen=True)
class Rewritten:
    """An SDPA call that became a tatten op.

    Attributes:
        location: the call in the user's program.
        op: the op that replaced SDPA.
        shapes: dtypes and shapes of the query, of keys and values as they are stored, and of the mask.
        cost: the estimate of what this saves at least; None if unknown.
        note: what else to know, such as why it isn't a better op; empty if nothing.
        provider: the kernel library that computes it on a GPU, for the sizes of the example; empty on a CPU.
    """

    location: SourceLocation
    op: str
    shapes: str
    cost: Cost | LatentCost | None
    note: str = ""
    provider: str = ""


@dataclass(frozen=True)
class Declined:
    """An SDPA call that stayed as it was, or attention that isn't an SDPA call."""

    location: SourceLocation
    shapes: str
    decline: Decline


@dataclass(frozen=True)
class GraphReport:
    """The findings of one graph in order, the time that the passes took, and a note on the whole graph."""

    findings: tuple[Rewritten | Declined, ...]
    milliseconds: float
    note: str = ""
