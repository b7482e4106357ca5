"""Matching calls for `options={"batch_invariant": True}`: whether it pays or not, as SDPA isn't invariant."""

from __future__ import annotations

import dataclasses

from tatten.ops.layout import BATCH
from tatten.passes.bifurcated import BifurcatedMatch, match_bifurcated
from tatten.passes.decode import DecodeMatch, match_decode
from tatten.passes.plain import PlainCall
from tatten.passes.reasons import Decline, Reason
from tatten.passes.symbolic import known_equal, tensor_of


def check_invariant(given: PlainCall) -> Decline | None:
    """Return the reason why no op can compute each sequence of an eligible call as if it were alone, or None."""
    query = tensor_of(given.call.query)
    assert query is not None
    if given.call.softcap is not None and query.device.type == "cpu":
        return Decline(Reason.BATCH_INVARIANT, f"a soft cap of {given.call.softcap} on a CPU")
    return None


def find_invariant(given: PlainCall, may_guard: bool) -> tuple[BifurcatedMatch | DecodeMatch, str] | Decline:
    """Match a call without changing the graph. Returns the match and a note for the report, or why there is none.

    Segments that sequences share are read as such before a last one that each has for itself. Where that one is shared,
    too, all are read as a copy for each sequence: who shares them is about the batch.
    """
    segments = given.segments(given.call.key), given.segments(given.call.value)
    bifurcated = match_bifurcated(given.seen(), *segments, may_guard)
    if isinstance(bifurcated, BifurcatedMatch) and _last_is_own(bifurcated):
        return dataclasses.replace(bifurcated, batch_invariant=True), ""
    if not given.in_one_piece:
        return (
            bifurcated
            if isinstance(bifurcated, Decline)
            else Decline(Reason.BATCH_INVARIANT, "the last of the DTensors that keys are concatenated of is shared")
        )
    call = given.call
    key, value = (given.in_one(x, given.segments(x, rows=False)) for x in (call.key, call.value))
    match = match_decode(given.seen(), key, value, may_guard)
    if isinstance(match, Decline):
        return match
    return dataclasses.replace(match, batch_invariant=True), match.note


def _last_is_own(match: BifurcatedMatch) -> bool:
    """Whether each sequence has a row of the last segment for itself."""
    query, last = tensor_of(match.call.query), match.keys[-1]
    assert query is not None
    return last.rows is None and known_equal(last.size(BATCH), query.shape[0])
