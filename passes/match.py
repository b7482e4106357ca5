"""What a pass has found: an SDPA call that a tatten op answers."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch.fx import Node

from tatten.passes.cost import Cost, cost_of
from tatten.passes.reasons import Decline
from tatten.passes.sdpa import SdpaCall
from tatten.passes.stored import Stored


@dataclass(frozen=True)
class Match:
    """An SDPA call, and where its keys and values are stored: in one, or in segments of the sequence."""

    call: SdpaCall
    keys: tuple[Stored, ...]
    values: tuple[Stored, ...]

    @functools.cached_property
    def cost(self) -> Cost | None:
        """What a rewrite saves; None if sizes aren't known."""
        return cost_of(self.call, self.keys, self.values)

    @property
    def unpaid(self) -> Decline | None:
        """Why a rewrite doesn't pay; None where it does, and where that isn't known."""
        raise NotImplementedError

    @property
    def doubt(self) -> str:
        """Why a rewrite may not pay; empty where it does."""
        return ""

    @property
    def path(self) -> set[Node]:
        """The nodes between what is stored and SDPA, which nobody may need after a rewrite."""
        return {node for stored in (*self.keys, *self.values) for node in stored.path}
