"""Match calls for `options={"batch_invariant": True}`, even if it doesn't pay: SDPA isn't invariant."""

from __future__ import annotations

import dataclasses

from tatten.ops.layout import BATCH
from tatten.passes.bifurcated import BifurcatedMatch, correspond, match_bifurcated
from tatten.passes.decode import DecodeMatch, match_decode
from tatten.passes.drafts import Drafts
from tatten.passes.local import Share
from tatten.passes.reasons import Decline, Reason
from tatten.passes.sdpa import SdpaCall
from tatten.passes.segments import Cut, find_cuts, find_segments, in_one
from tatten.passes.stored import Stored
from tatten.passes.symbolic import known_equal, known_tensor


def check_invariant(call: SdpaCall) -> Decline | None:
    """Return the reason why no op can compute an eligible call with `batch_invariant=True`, or None."""
    if call.softcap is not None and known_tensor(call.query).device.type == "cpu":
        return Decline(Reason.BATCH_INVARIANT, f"a soft cap of {call.softcap} on a CPU")
    return None


def find_invariant(
    call: SdpaCall, drafts: Drafts, may_guard: bool
) -> tuple[BifurcatedMatch | DecodeMatch, str] | Decline:
    """Match a call without changing the graph.

    The cuts between segments must not depend on the batch, nor on which sequences share a segment: a graph of one
    sequence has the same cuts.

    Returns:
        The match and a note for the report, or the reason why there is no match.
    """
    if call.shares is not None:
        return _match_shares(call, call.shares, may_guard)
    keys, values = (find_cuts(x, call.vanishing) for x in (call.key, call.value))
    segments = _choose_segments(keys, values, may_guard)
    bifurcated = match_bifurcated(call, *segments, may_guard) if segments is not None else None
    if isinstance(bifurcated, BifurcatedMatch):
        return dataclasses.replace(bifurcated, batch_invariant=True), ""
    key, value = (in_one(x, find_segments(x, rows=False, vanishing=call.vanishing)) for x in (call.key, call.value))
    match = match_decode(call, key, value, drafts, may_guard)
    if isinstance(match, Decline):
        return match
    return dataclasses.replace(match, batch_invariant=True), match.note


def _choose_segments(
    keys: tuple[Cut, ...], values: tuple[Cut, ...], may_guard: bool
) -> tuple[tuple[Stored, ...], tuple[Stored, ...]] | None:
    """Choose for each segment whether it is read once for the sequences that share it, or once for each sequence.

    The last segment is read for each sequence.

    Returns:
        The segments of keys and of values, or None for a single segment, if keys and values have different cuts, or if
        a segment can't be read for each sequence.
    """
    if len(keys) != len(values) or len(keys) < 2:
        return None
    pairs = []
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        shared = i < len(keys) - 1 and correspond((key.shared,), (value.shared,), may_guard)
        pair = (key.shared, value.shared) if shared else (key.per_sequence, value.per_sequence)
        if pair[0] is None or pair[1] is None:
            return None
        pairs.append((pair[0], pair[1]))
    chosen_keys, chosen_values = zip(*pairs, strict=True)
    return chosen_keys, chosen_values


def _match_shares(
    call: SdpaCall, shares: tuple[tuple[Share, ...], tuple[Share, ...]], may_guard: bool
) -> tuple[BifurcatedMatch, str] | Decline:
    """Match segments that are DTensors, which can't be read in one piece."""
    keys, values = (tuple(x.part for x in each) for each in shares)
    match = match_bifurcated(call, keys, values, may_guard)
    if isinstance(match, BifurcatedMatch):
        query, last = known_tensor(call.query), match.keys[-1]
        if last.rows is None and known_equal(last.size(BATCH), query.shape[0]):
            return dataclasses.replace(match, batch_invariant=True), ""
    return (
        match
        if isinstance(match, Decline)
        else Decline(Reason.BATCH_INVARIANT, "the last of the DTensors that keys are concatenated of is shared")
    )
