"""Matches: what the passes find before they change anything."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch.fx import Node

from tatten.passes.cost import Cost, cost_of
from tatten.passes.drafts import Drafts
from tatten.passes.reasons import Decline
from tatten.passes.sdpa import SdpaCall
from tatten.passes.stored import Stored

AnyMatch = TypeVar("AnyMatch", bound="Insertable")
AnyOfSegments = TypeVar("AnyOfSegments", bound="Match")


class Insertable(Protocol):
    """A match whose tensors may be drafts."""

    def inserted(self: AnyMatch, drafts: Drafts) -> AnyMatch:
        """Insert the drafts that the op reads, and return the match on the nodes for them."""


@dataclass(frozen=True)
class Match:
    """An SDPA call that a tatten op can compute from its keys and values as they are stored, in one segment or more."""

    call: SdpaCall
    keys: tuple[Stored, ...]
    values: tuple[Stored, ...]

    @functools.cached_property
    def cost(self) -> Cost | None:
        """The estimate of what a rewrite saves; None if sizes are unknown."""
        return cost_of(self.call, self.keys, self.values)

    @property
    def unpaid(self) -> Decline | None:
        """The reason why a rewrite doesn't pay; None if it does, or if that is unknown."""
        raise NotImplementedError

    @property
    def doubt(self) -> str:
        """The reason why a rewrite might not pay after all; empty if there is none."""
        return ""

    def inserted(self: AnyOfSegments, drafts: Drafts) -> AnyOfSegments:
        """Insert the drafts that the op reads, and return the match on the nodes for them."""
        call, place = drafts.operands(self.call), self.call.node
        keys, values = (tuple(x.inserted(drafts, place) for x in stored) for stored in (self.keys, self.values))
        return dataclasses.replace(self, call=call, keys=keys, values=values)

    @property
    def path(self) -> set[Node]:
        """The nodes between the stored tensors and SDPA, which may have no users after a rewrite."""
        segments = (*self.keys, *self.values)
        views = set[Node]().union(*(stored.rows.views for stored in segments if stored.rows is not None))
        return views | {node for stored in segments for node in stored.path}
