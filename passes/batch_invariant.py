"""Matching calls for `options={"batch_invariant": True}`: as attention of each sequence to keys of its own."""

from __future__ import annotations

import dataclasses

from tatten.passes.decode import DecodeMatch, match_decode
from tatten.passes.plain import PlainCall
from tatten.passes.reasons import Decline, Reason
from tatten.passes.symbolic import tensor_of


def check_invariant(given: PlainCall) -> Decline | None:
    """Return the reason why no op can compute each sequence of an eligible call as if it were alone, or None."""
    query = tensor_of(given.call.query)
    assert query is not None
    if not given.in_one_piece:
        return Decline(
            Reason.BATCH_INVARIANT, "keys are concatenated of DTensors, so no rank has its part in one piece"
        )
    if given.call.softcap is not None and query.device.type == "cpu":
        return Decline(Reason.BATCH_INVARIANT, f"a soft cap of {given.call.softcap} on a CPU")
    return None


def find_invariant(given: PlainCall) -> tuple[DecodeMatch, str] | Decline:
    """Match a call without changing the graph, whether it pays or not: SDPA isn't invariant.

    Keys that sequences share are read as a copy of each, since who shares them is about the batch. Returns the match
    and a note for the report, or why there is none.
    """
    call = given.call
    key, value = (given.in_one(x, given.segments(x, rows=False)) for x in (call.key, call.value))
    match = match_decode(given.seen(), key, value)
    if isinstance(match, Decline):
        return match
    return dataclasses.replace(match, batch_invariant=True), match.note
