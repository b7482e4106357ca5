"""Matches of the passes, which are found before the graph is changed."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from tatten.passes.cost import Cost, cost_of
from tatten.passes.drafts import dtensor_of
from tatten.passes.reasons import Decline
from tatten.passes.sdpa import SdpaCall
from tatten.passes.stored import Stored


@dataclass(frozen=True)
class Match:
    """An SDPA call that a tatten op can compute from keys and values as they are stored, in one or more segments.

    Attributes:
        batch_invariant: whether the op is called with `batch_invariant=True`.
    """

    call: SdpaCall
    keys: tuple[Stored, ...]
    values: tuple[Stored, ...]
    batch_invariant: bool = False

    @functools.cached_property
    def cost(self) -> Cost | None:
        """The estimate of what a rewrite saves; None if sizes are unknown."""
        return cost_of(self.call, self.keys, self.values)

    @property
    def too_costly(self) -> Decline | None:
        """The reason why a rewrite doesn't pay, or None if it does or that is unknown."""
        raise NotImplementedError

    @property
    def cost_remark(self) -> str:
        """The reason why a rewrite might not pay; empty without one."""
        return ""

    @property
    def must_pay(self) -> bool:
        """True if the match is rewritten only if that pays.

        A match that reads a DTensor's local part is always rewritten, as PyTorch would gather the keys of all ranks. If
        it reads tensors behind local parts it has to pay: a simpler match can read the local parts.
        """
        return all(dtensor_of(x.base) is None for x in self.keys) and self.call.shares is None

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the op that SDPA lacks."""
        return self.call.variant | ({"batch_invariant": True} if self.batch_invariant else {})

    @property
    def path(self) -> set[Node]:
        """The nodes between the stored tensors and SDPA, which may have no users after a rewrite."""
        segments = (*self.keys, *self.values)
        indexes = [x for stored in segments for x in (stored.rows, stored.table) if x is not None]
        return set[Node]().union(*(x.views for x in indexes)) | {node for stored in segments for node in stored.path}
