"""Decide about one attention call: the op that computes it and its operands, or the reason to leave it alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tatten.ops.layout import HEADS, LENGTH
from tatten.passes.batch_invariant import check_invariant, find_invariant
from tatten.passes.bifurcated import BifurcatedMatch, match_bifurcated
from tatten.passes.decode import DecodeMatch, match_decode
from tatten.passes.drafts import Drafts
from tatten.passes.eligible import check_call, check_plain, check_transformed
from tatten.passes.find_picks import find_picks
from tatten.passes.latents import LatentMatch, match_latents
from tatten.passes.local import local_input
from tatten.passes.mask_lengths import length_of
from tatten.passes.mutation import mover_of
from tatten.passes.reasons import Decline, Reason
from tatten.passes.run import Run
from tatten.passes.sdpa import SdpaCall
from tatten.passes.segments import find_segments, in_one
from tatten.passes.stored import Stored
from tatten.passes.symbolic import constant, known_equal
from tatten.passes.tree import find_local


@dataclass(frozen=True)
class MatchedCall:
    """A call that is rewritten.

    Attributes:
        call: the call in the program.
        match: the op and its operands. `match.call` is the call that matchers read: for DTensors, on local parts.
        note: a remark for the report.
    """

    call: SdpaCall
    match: DecodeMatch | BifurcatedMatch | LatentMatch
    note: str = ""


def match_call(call: SdpaCall, run: Run) -> MatchedCall | Decline:
    """Decide about one call without changing the graph. Matchers may make drafts and add guards."""
    tensors = call.query, call.key, call.value, call.attn_mask, call.result
    local = run.unsupported or check_transformed(tensors) or find_local(call, run.masks)
    if isinstance(local, Decline):
        return local
    decline = (check_plain(call) if local is None else None) or check_call(call, run.max_q_len)
    decline = decline or _check_movers(call, run)
    if run.batch_invariant:
        decline = decline or check_invariant(call)
    if decline is not None:
        return decline
    local_call = local or call
    picks = find_picks(local_call, run.masks.drafts)
    if isinstance(picks, Decline):
        call = _with_remark(call, picks)
    else:
        local_call = dataclasses.replace(local_call, picks=picks)
    if local is None:
        call = dataclasses.replace(call, picks=local_call.picks)
    latents = None if call.log_sums else _match_latents(call, local_call, run)
    if isinstance(latents, LatentMatch):
        return _with_supported_picks(MatchedCall(call, latents))
    find = find_invariant if run.batch_invariant else _match_stored
    matched = find(local_call, run.masks.drafts, run.may_guard)
    if isinstance(matched, Decline):
        return latents or matched
    match, note = matched
    if isinstance(match, DecodeMatch) and (length := length_of(match.call, run.mask_lengths)) is not None:
        match = dataclasses.replace(match, length=length)
        note = "; ".join(filter(None, (note, "the mask is read as a length")))
    if latents is not None:
        note = "; ".join(filter(None, (f"not absorbed [{latents.reason.value}]: {latents.detail}", note)))
    return _with_supported_picks(MatchedCall(call, match, note))


def _with_remark(call: SdpaCall, decline: Decline) -> SdpaCall:
    remark = f"not read by indices [{decline.reason.value}]: {decline.detail}"
    return dataclasses.replace(call, picks=None, remarks=(*call.remarks, remark))


def _with_supported_picks(matched: MatchedCall) -> MatchedCall:
    """Return the match, without its picks if its op doesn't take them: it then reads the mask as it is."""
    decline = _check_picks(matched.match)
    if decline is None:
        return matched
    match = dataclasses.replace(matched.match, call=dataclasses.replace(matched.match.call, picks=None))
    return dataclasses.replace(matched, call=_with_remark(matched.call, decline), match=match)


def _check_picks(match: DecodeMatch | BifurcatedMatch | LatentMatch) -> Decline | None:
    """Return the reason why the op of a match doesn't take the indices of its call, or None."""
    picks = match.call.picks
    if picks is None or picks.names_all:
        return None
    if any(constant(x.segment.size(LENGTH)) is None for shares in match.call.shares or () for x in shares):
        return Decline(Reason.PICKS, f"{picks}, in DTensors of several placements and dynamic lengths")
    parts = [x.latent for x in match.parts] if isinstance(match, LatentMatch) else match.keys
    if picks.rest_bias is not None and len(parts) > 1:
        no_keys = "a row without any key is the mean of the values of all segments"
        return Decline(Reason.PICKS, f"{picks}, others have the bias {picks.rest_bias}: {no_keys}")
    for kv_heads in (x.size(HEADS) for x in parts):
        if not picks.fits(kv_heads) or not (picks.heads == 1 or known_equal(kv_heads, parts[0].size(HEADS))):
            return Decline(Reason.PICKS, f"{picks}: the indices of {picks.heads} heads, for {kv_heads} kv heads")
    return None


def _match_latents(call: SdpaCall, local_call: SdpaCall, run: Run) -> LatentMatch | Decline | None:
    """Match keys and values that are expanded from latents, also if `DTensor.from_local` then made them DTensors."""
    key, value = (None if local_call.sharding is None else local_input(x) for x in (call.key, call.value))
    if key is None or value is None:
        return match_latents(call, run.batch_invariant)
    local_call = dataclasses.replace(local_call, key=key, value=value)
    return match_latents(local_call, run.batch_invariant, (call.key, call.value))


def _check_movers(call: SdpaCall, run: Run) -> Decline | None:
    """Return the reason if fake tensors may not show the memory that this call reads, or None."""
    mover = mover_of(call.source_node, run.movers)
    if mover is None:
        return None
    return Decline(Reason.WRITTEN, f"`{mover}` gives a tensor other memory or another shape, in place")


def _match_stored(
    call: SdpaCall, drafts: Drafts, may_guard: bool
) -> tuple[DecodeMatch | BifurcatedMatch, str] | Decline:
    """Match keys and values as they are stored: as one tensor each, or in segments, which sequences may share.

    Returns:
        The match and a note for the report, or the reason why there is no match.
    """
    copied = ""
    if call.shares is None:
        keys, values = (find_segments(x, vanishing=call.vanishing) for x in (call.key, call.value))
    else:
        keys, values = (tuple(x.part for x in shares) for shares in call.shares)
    bifurcated = _match_segments(call, keys, values, may_guard)
    if isinstance(bifurcated, Decline) and any(x.rows for x in (*keys, *values)) and call.shares is None:
        copied = f"selected rows are copied [{bifurcated.reason.value}]: {bifurcated.detail}"
        keys, values = (find_segments(x, rows=False, vanishing=call.vanishing) for x in (call.key, call.value))
        bifurcated = _match_segments(call, keys, values, may_guard)
    if isinstance(bifurcated, BifurcatedMatch):
        return bifurcated, copied
    if bifurcated is not None and call.shares is not None:
        return bifurcated
    decode = match_decode(call, in_one(call.key, keys), in_one(call.value, values), drafts, may_guard)
    if isinstance(decode, DecodeMatch) and decode.must_pay:
        decode = decode.too_costly or decode
    if isinstance(decode, Decline):
        return bifurcated or decode
    if bifurcated is not None:
        copied = f"not bifurcated [{bifurcated.reason.value}]: {bifurcated.detail}"
    return decode, "; ".join(filter(None, (decode.note, copied)))


def _match_segments(
    call: SdpaCall, keys: tuple[Stored, ...], values: tuple[Stored, ...], may_guard: bool
) -> BifurcatedMatch | Decline | None:
    """Match segments that the op reads where they are stored, unless the rewrite must pay and doesn't.

    Returns:
        The match, the reason why there is none, or None for one segment that is not shared.
    """
    match = match_bifurcated(call, keys, values, may_guard)
    return (match.too_costly or match) if isinstance(match, BifurcatedMatch) and match.must_pay else match
