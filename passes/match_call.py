"""The decision about one attention call: which op computes it from what, or why it is left as it is."""

from __future__ import annotations

from dataclasses import dataclass

from tatten.passes.batch_invariant import check_invariant, find_invariant
from tatten.passes.bifurcated import BifurcatedMatch, match_bifurcated
from tatten.passes.decode import DecodeMatch, match_decode
from tatten.passes.eligible import check_call, check_transformed
from tatten.passes.latents import LatentMatch
from tatten.passes.mutation import mover_of
from tatten.passes.plain import PlainCall
from tatten.passes.reasons import Decline, Reason
from tatten.passes.run import Run
from tatten.passes.sdpa import SdpaCall
from tatten.passes.stored import Stored
from tatten.passes.tree import find_sharded


@dataclass(frozen=True)
class Found:
    """A call that is rewritten.

    Attributes:
        given: the call as matchers see it.
        match: what an op computes it from.
        note: a remark for the report.
    """

    given: PlainCall
    match: DecodeMatch | BifurcatedMatch | LatentMatch
    note: str = ""


def match_call(call: SdpaCall, run: Run) -> Found | Decline:
    """Decide about one call. Changes nothing but for guards."""
    given = (
        check_transformed((call.query, call.key, call.value, call.attn_mask, call.result))
        or find_sharded(call, run.masks)
        or PlainCall(call, run.masks)
    )
    if isinstance(given, Decline):
        return given
    decline = given.check() or check_call(call, run.max_q_len) or _check_movers(call, run)
    if run.batch_invariant:
        decline = decline or check_invariant(given)
    if decline is not None:
        return decline
    latents = None if call.log_sums else given.latents(run.batch_invariant)
    if isinstance(latents, LatentMatch):
        return Found(given, latents)
    found = find_invariant(given, run.may_guard) if run.batch_invariant else _match_stored(given, run.may_guard)
    if isinstance(found, Decline):
        return latents or found
    match, note = found
    if latents is not None:
        note = "; ".join(filter(None, (f"not absorbed [{latents.reason.value}]: {latents.detail}", note)))
    return Found(given, match, note)


def _check_movers(call: SdpaCall, run: Run) -> Decline | None:
    """Return the reason why fake tensors may not tell what this call reads, or None."""
    mover = mover_of(call.node, run.moving)
    if mover is None:
        return None
    return Decline(Reason.WRITTEN, f"`{mover}` gives a tensor other memory or another shape, in place")


def _match_stored(given: PlainCall, may_guard: bool) -> tuple[DecodeMatch | BifurcatedMatch, str] | Decline:
    """Match keys and values as they are stored: in one piece, or in segments where sequences share some.

    Returns the match and a note for the report, or the reason why there is none.
    """
    call, copied = given.call, ""
    keys, values = given.segments(call.key), given.segments(call.value)
    bifurcated = _match_segments(given, keys, values, may_guard)
    if isinstance(bifurcated, Decline) and any(x.rows for x in (*keys, *values)):
        copied = f"selected rows are copied [{bifurcated.reason.value}]: {bifurcated.detail}"
        keys, values = given.segments(call.key, rows=False), given.segments(call.value, rows=False)
        bifurcated = _match_segments(given, keys, values, may_guard)
    if isinstance(bifurcated, BifurcatedMatch):
        return bifurcated, copied
    if bifurcated is not None and not given.in_one_piece:
        return bifurcated
    decode = match_decode(given.seen(), given.in_one(call.key, keys), given.in_one(call.value, values), may_guard)
    if isinstance(decode, DecodeMatch) and given.weighs(decode):
        decode = decode.unpaid or decode
    if isinstance(decode, Decline):
        return bifurcated or decode
    if bifurcated is not None:
        copied = f"not bifurcated [{bifurcated.reason.value}]: {bifurcated.detail}"
    return decode, "; ".join(filter(None, (decode.note, copied)))


def _match_segments(
    given: PlainCall, keys: tuple[Stored, ...], values: tuple[Stored, ...], may_guard: bool
) -> BifurcatedMatch | Decline | None:
    """Match segments that a rewrite would read where they are stored, if that pays."""
    match = match_bifurcated(given.seen(), keys, values, may_guard)
    return (match.unpaid or match) if isinstance(match, BifurcatedMatch) and given.weighs(match) else match
