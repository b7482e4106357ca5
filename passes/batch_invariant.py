"""Matching calls for `options={"batch_invariant": True}`: as attention of each sequence to keys of its own."""

from __future__ import annotations

import dataclasses

from tatten.passes.decode import DecodeMatch, match_decode
from tatten.passes.plain import PlainCall
from tatten.passes.reasons import Decline, Reason
from tatten.passes.symbolic import tensor_of
from tatten.passes.tree import MergedCall


def find_invariant(given: PlainCall) -> tuple[DecodeMatch, str] | Decline:
    """Match an eligible call without changing the graph, whether it pays or not: SDPA isn't invariant.

    Keys that sequences share are read as a copy of each, since who shares them is about the batch. Returns the match
    and a note for the report, or why there is none.
    """
    call, query = given.call, tensor_of(given.call.query)
    assert query is not None
    if isinstance(given, MergedCall):
        return Decline(
            Reason.BATCH_INVARIANT, "states of keys that are sharded are not merged in an order of their own"
        )
    if call.softcap is not None and query.device.type == "cpu":
        return Decline(Reason.BATCH_INVARIANT, f"a soft cap of {call.softcap} on a CPU")
    key, value = (given.in_one(x, given.segments(x, rows=False)) for x in (call.key, call.value))
    match = match_decode(given.seen(), key, value)
    if isinstance(match, Decline):
        return match
    return dataclasses.replace(match, batch_invariant=True), match.note
