"""The frame around the matchers: what they see of an SDPA call, and how an op's state becomes SDPA's result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from tatten.passes.eligible import check_plain
from tatten.passes.latents import LatentMatch, match_latents
from tatten.passes.masks import Masks
from tatten.passes.match import AnyMatch, Match
from tatten.passes.reasons import Decline
from tatten.passes.replace import output_of
from tatten.passes.sdpa import SdpaCall
from tatten.passes.segments import Cut, find_cuts, find_segments, in_one
from tatten.passes.stored import Stored


@dataclass(frozen=True)
class PlainCall:
    """An SDPA call on plain tensors, which the matchers see as they are; `tatten.passes.tree` has DTensors."""

    call: SdpaCall
    masks: Masks
    in_one_piece: ClassVar[bool] = True  # whether an op may read key and value as they are

    @property
    def note(self) -> str:
        """A remark for the report, whatever the call becomes."""
        return ""

    def check(self) -> Decline | None:
        """Return the reason why matchers can't be shown this call, or None."""
        return check_plain(self.call)

    def seen(self) -> SdpaCall:
        """Return the call with the tensors that the matchers see."""
        return self.call

    def segments(self, whole: Node, rows: bool = True) -> tuple[Stored, ...]:
        """Return the segments of `whole`, the call's key or value, that the matchers see.

        Without `rows`, what an index selected is read as a copy.
        """
        return find_segments(whole, rows)

    def cuts(self, whole: Node) -> tuple[Cut, ...]:
        """Return the segments of `whole` that the matchers see, between cuts that don't depend on the batch."""
        return find_cuts(whole)

    def in_one(self, whole: Node, segments: tuple[Stored, ...]) -> Stored:
        """Return what the matchers see of `whole` before its heads were repeated; `segments` are those of it."""
        return in_one(whole, segments)

    def weighs(self, match: Match) -> bool:
        """Whether a rewrite has to pay."""
        return True

    def latents(self, batch_invariant: bool) -> LatentMatch | Decline | None:
        """Match keys and values that are expanded from latents; see `match_latents`."""
        return match_latents(self.call, batch_invariant)

    def insert(self, match: AnyMatch) -> AnyMatch:
        """Insert nodes for the drafts of a match, and return the match on those."""
        return match.inserted(self.masks.drafts)

    def output(self, state: Node, out: Node | None = None) -> Node:
        """Insert what turns a state over the tensors that were seen into SDPA's result, and return that.

        `out` is what the state's own has become, if that is not the output yet.
        """
        return output_of(self.call, state, out)
