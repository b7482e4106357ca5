"""An SDPA call as the matchers see it, and the way back from the state that an op returns to what SDPA returned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from torch.fx import Node

from tatten.passes.eligible import check_plain
from tatten.passes.masks import Masks
from tatten.passes.match import Match
from tatten.passes.reasons import Decline
from tatten.passes.replace import output_of
from tatten.passes.sdpa import SdpaCall
from tatten.passes.stored import Stored

AnyMatch = TypeVar("AnyMatch", bound=Match)


@dataclass(frozen=True)
class PlainCall:
    """An SDPA call on plain tensors, which are what the matchers see. `tatten.passes.tree` has one on DTensors."""

    call: SdpaCall
    weighed: ClassVar[bool] = True  # whether a rewrite has to pay

    @property
    def note(self) -> str:
        """What a report says of the call, whatever it becomes."""
        return ""

    def check(self) -> Decline | None:
        """Why the matchers can't see the call's tensors."""
        return check_plain(self.call)

    def seen(self) -> SdpaCall:
        """The call on the tensors that the matchers see."""
        return self.call

    def seen_segments(self, whole: Node, segments: tuple[Stored, ...]) -> tuple[Stored, ...]:
        """What the matchers see of the segments of `whole`, the call's key or value."""
        return segments

    def insert(self, match: AnyMatch, masks: Masks) -> AnyMatch:
        """The match, with a node before the call for each tensor that was seen."""
        return match

    def output(self, state: Node) -> Node:
        """What SDPA returned, from the state of the tensors that were seen; put before the call."""
        return output_of(self.call, state)
