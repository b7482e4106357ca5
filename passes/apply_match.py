"""Edit a graph for one match: an op replaces attention, and nodes that only attention used are erased."""

from __future__ import annotations

import dataclasses

from torch.fx import Node

from tatten.passes.absorb import apply_latents
from tatten.passes.bifurcated import BifurcatedMatch, apply_bifurcated
from tatten.passes.decode import DecodeMatch, apply_decode
from tatten.passes.describe import assumptions_of, bases, provider_of, shapes_of, show
from tatten.passes.findings import Rewritten, source_location
from tatten.passes.latents import LatentMatch
from tatten.passes.masks import Masks
from tatten.passes.match_call import MatchedCall
from tatten.passes.query import find_query_parts, restore_query
from tatten.passes.replace import erase_selection, output_of, replace_call
from tatten.passes.sdpa import SdpaCall
from tatten.passes.stored import Stored
from tatten.passes.tree import merge_note, merged_output


def apply_match(matched: MatchedCall, masks: Masks) -> Rewritten:
    """Edit the graph for a match, and return the finding for the report."""
    if isinstance(matched.match, LatentMatch):
        return _apply_latents(matched.call, matched.match, masks)
    return _apply_stored(matched.call, matched.match, matched.note, masks)


def _apply_stored(call: SdpaCall, match: DecodeMatch | BifurcatedMatch, note: str, masks: Masks) -> Rewritten:
    # The report comes first: the edit may erase the nodes that it describes.
    location, shapes = (
        source_location(call.source_node),
        shapes_of(call, *(bases(x) for x in (match.keys, match.values))),
    )
    shapes = " ".join([shapes, *(f"table {x.table}" for x in match.keys if x.table is not None)])
    cost, cost_remark = (match.cost, match.cost_remark or assumptions_of(match.cost)) if match.must_pay else (None, "")
    merged, path, inserted_call = merge_note(match.call), match.path, _operands(match.call, masks)
    keys, values = (tuple(_with_inserted_base(x, call, masks) for x in stored) for stored in (match.keys, match.values))
    match = dataclasses.replace(match, call=inserted_call, keys=keys, values=values)
    state = apply_decode(match, masks) if isinstance(match, DecodeMatch) else apply_bifurcated(match, masks)
    replace_call(call, state, _output(match.call, state), path, masks.drafts)
    erase_selection(match.call.picks)
    notes = call.form, merged, _picks_note(match.call), note, restore_query(state), cost_remark, *call.remarks
    return Rewritten(location, str(state.target), shapes, cost, "; ".join(filter(None, notes)), provider_of(state))


def _operands(call: SdpaCall, masks: Masks) -> SdpaCall:
    """Insert the mask, query and sinks of a call if they are drafts. Keys and values are read where they are stored."""
    operands = call.attn_mask if call.picks is None else call.picks.mask, call.query, call.sinks
    mask, query, sinks = (masks.drafts.insert(x, call.node) if isinstance(x, Node) else x for x in operands)
    return dataclasses.replace(call, query=query, attn_mask=mask, sinks=sinks)


def _picks_note(call: SdpaCall) -> str:
    """Return the report's remark on the keys that are read; empty for all keys."""
    return "" if call.picks is None else f"{call.picks}" + ", which are all" * call.picks.names_all


def _with_inserted_base(stored: Stored, call: SdpaCall, masks: Masks) -> Stored:
    """Insert the tensor that is stored if it is a draft."""
    return dataclasses.replace(stored, base=masks.drafts.insert(stored.base, call.node))


def _output(call: SdpaCall, state: Node, out: Node | None = None) -> Node:
    """Insert the nodes that compute SDPA's result from a state. `out` replaces the output in the state."""
    return output_of(call, state, out) if call.sharding is None else merged_output(call, state, out)


def _apply_latents(call: SdpaCall, match: LatentMatch, masks: Masks) -> Rewritten:
    # The report comes first: the edit may erase the nodes that it describes.
    segments = match.parts
    ropes = [x.rope for x in segments if x.rope is not None]
    latents = [x.latent for x in segments]
    operands = [("q", call.query), *(("c", x) for x in bases(latents)), *(("rope", x) for x in bases(ropes))]
    operands += [("w", match.keys.weight), ("mask", call.attn_mask)]
    location, shapes = source_location(call.source_node), show(operands)
    inserted_call, latent = _operands(match.call, masks), _with_inserted_base(match.latent, call, masks)
    rope = None if match.rope is None else (_with_inserted_base(match.rope[0], call, masks), match.rope[1])
    match = dataclasses.replace(match, call=inserted_call, latent=latent, rope=rope)
    parts = find_query_parts(match.call.query, match.call.node)
    state, out = apply_latents(match, masks, parts)
    orphans = match.path | {match.call.query} if parts else match.path
    replace_call(call, state, _output(match.call, state, out), orphans, masks.drafts)
    erase_selection(match.call.picks)
    products = "one projection" if match.keys.product is match.values.product else "two projections"
    projected = f"keys and values were made of latents by {products} for {match.keys.heads} heads"
    remarks = assumptions_of(match.cost), *call.remarks
    notes = call.form, merge_note(match.call), _picks_note(match.call), projected, *remarks
    op = "tatten.latent_attention.default"
    return Rewritten(location, op, shapes, match.cost, "; ".join(filter(None, notes)))
