"""The edit of a graph for one match: an op takes the place of attention, and all that only this used is erased."""

from __future__ import annotations

from tatten.passes.absorb import apply_latents
from tatten.passes.bifurcated import BifurcatedMatch, apply_bifurcated
from tatten.passes.decode import DecodeMatch, apply_decode
from tatten.passes.describe import bases, provider_of, shapes_of, show, weighed
from tatten.passes.findings import Rewritten
from tatten.passes.latents import LatentMatch
from tatten.passes.masks import Masks
from tatten.passes.match_call import Found
from tatten.passes.plain import PlainCall
from tatten.passes.query import find_concatenated_query, restore_query
from tatten.passes.replace import replace_call
from tatten.passes.source_location import source_location


def apply_match(found: Found, masks: Masks) -> Rewritten:
    """Edit the graph for a match, and return the finding for the report."""
    if isinstance(found.match, LatentMatch):
        return _apply_latents(found.given, found.match, masks)
    return _apply_stored(found.given, found.match, found.note, masks)


def _apply_stored(given: PlainCall, match: DecodeMatch | BifurcatedMatch, note: str, masks: Masks) -> Rewritten:
    # The report is read off first: nodes may be erased.
    call = given.call
    location, shapes = source_location(call.shown), shapes_of(call, *(bases(x) for x in (match.keys, match.values)))
    cost, doubt = (match.cost, match.doubt or weighed(match.cost)) if given.weighs(match) else (None, "")
    match = given.insert(match)
    state = apply_decode(match, masks) if isinstance(match, DecodeMatch) else apply_bifurcated(match, masks)
    replace_call(call, state, given.output(state), match.path, masks.drafts)
    restored = restore_query(state)
    notes = call.form, given.note, note, restored, doubt, *call.remarks
    return Rewritten(location, str(state.target), shapes, cost, "; ".join(filter(None, notes)), provider_of(state))


def _apply_latents(given: PlainCall, match: LatentMatch, masks: Masks) -> Rewritten:
    # The report is read off first: nodes may be erased.
    call, segments = given.call, match.parts
    ropes = [x.rope for x in segments if x.rope is not None]
    latents = [x.latent for x in segments]
    named = [("q", match.call.query), *(("c", x) for x in bases(latents)), *(("rope", x) for x in bases(ropes))]
    location, shapes = source_location(call.shown), show([*named, ("w", match.keys.weight), ("mask", call.attn_mask)])
    match = given.insert(match)
    concatenated = find_concatenated_query(match.call.query, match.call.node)
    state, out = apply_latents(match, masks, concatenated)
    replace_call(call, state, given.output(state, out), match.path.union(concatenated.path), masks.drafts)
    made = "one projection" if match.keys.product is match.values.product else "two projections"
    made += " with LoRA" if match.keys.adapters or match.values.adapters else ""
    made_of = f"keys and values were made of latents by {made} for {match.keys.heads} heads"
    notes = call.form, given.note, made_of, weighed(match.cost), *call.remarks
    return Rewritten(location, "tatten.latent_attention.default", shapes, match.cost, "; ".join(filter(None, notes)))
