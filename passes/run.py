"""The settings and the state of one run of the passes over a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from tatten.passes.mask_lengths import MaskLength
from tatten.passes.masks import Masks
from tatten.passes.reasons import Decline


@dataclass(frozen=True)
class Run:
    """The settings and the state of one run of the passes over a graph.

    Attributes:
        max_q_len: the largest number of queries per sequence of a call that is rewritten.
        may_guard: whether guards may be added. If not, a match relies only on facts that hold in every run.
        fuses: whether the graph's compiler is Inductor, which fuses attention that is written out and looks into ops.
        batch_invariant: whether each call that can becomes an op with `batch_invariant=True`, even if that doesn't pay.
        linears: whether linear layers of few rows become ops of tatten in graphs that call one.
        counters: whether such graphs add to all counters at once.
        masks: the nodes that were computed from masks, and the drafts.
        movers: the nodes that change a tensor's memory or shape in place.
        unsupported: the reason to leave the graph as it is, or None.
        mask_lengths: the masks that are read as a length, if a call has one sequence.
    """

    max_q_len: int
    may_guard: bool
    fuses: bool
    batch_invariant: bool
    linears: bool
    counters: bool
    masks: Masks
    movers: Sequence[Node]
    unsupported: Decline | None
    mask_lengths: Mapping[Node, MaskLength] = field(default_factory=dict)
