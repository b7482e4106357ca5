"""All passes over one graph, and their report."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from torch.fx import Graph, GraphModule, Node

from tatten.passes.absorb import apply_latents
from tatten.passes.batch_invariant import check_invariant, find_invariant
from tatten.passes.bifurcated import BifurcatedMatch, apply_bifurcated, match_bifurcated
from tatten.passes.decode import DecodeMatch, apply_decode, match_decode
from tatten.passes.describe import bases, declined, provider_of, shapes_of, show, weighed
from tatten.passes.eligible import DEFAULT_MAX_Q_LEN, check_call, check_transformed
from tatten.passes.findings import Declined, GraphReport, Rewritten
from tatten.passes.flex import find_flex, is_flex, read_flex
from tatten.passes.flex_mask import flex_call
from tatten.passes.input_numbers import settle_numbers
from tatten.passes.internal import CallError, Snapshot, decline_internal, declined_graph, or_nothing
from tatten.passes.latents import LatentMatch
from tatten.passes.masks import Masks
from tatten.passes.mutation import mover_of, movers
from tatten.passes.other_attention import find_other_attention
from tatten.passes.plain import PlainCall
from tatten.passes.query import find_concatenated_query, restore_query
from tatten.passes.reasons import Decline, Reason
from tatten.passes.replace import replace_call
from tatten.passes.sdpa import SdpaCall, bind_sdpa, find_sdpa, sdpa_nodes
from tatten.passes.sliding import apply_slide, find_slides
from tatten.passes.source_location import source_location
from tatten.passes.stored import Stored
from tatten.passes.symbolic import tensor_of
from tatten.passes.tiled import find_tiled, untiled_call
from tatten.passes.tree import find_sharded
from tatten.passes.written_out import WrittenOut, find_written_out, read_written_out
from tatten.passes.written_out_call import written_out_call

MOST_FAILED = 8  # calls; each costs another run of all passes


def rewrite(
    gm: GraphModule,
    max_q_len: int = DEFAULT_MAX_Q_LEN,
    *,
    may_guard: bool = True,
    fuses: bool = False,
    batch_invariant: bool = False,
) -> GraphReport:
    """Rewrite a Dynamo or export graph in place: every decode attention becomes a tatten op, everything else stays.

    Without `may_guard` all that counts is what holds in every run: nothing would heed a guard on an exported graph.
    With `fuses` the graph's compiler is Inductor, which fuses attention that is written out and looks into ops. With
    `batch_invariant` each call that can be becomes an op with `batch_invariant=True`, whether it pays or not.

    An error of tatten itself raises nothing: the report names it as `internal`. If it comes up while a call is matched
    or rewritten, that call stays; if it concerns all calls, or too many of them, the whole graph stays as it was.
    """
    start = time.perf_counter()
    failed: dict[str, Declined] = {}
    before = Snapshot(gm.graph)
    while True:
        try:
            findings, note = _rewrite(gm, failed, max_q_len, may_guard, fuses, batch_invariant)
            if note or any(isinstance(finding, Rewritten) for finding in findings):
                gm.recompile()
            break
        except BaseException as error:
            before.restore()
            if not isinstance(error, Exception):
                raise
            found = error.declined if isinstance(error, CallError) else declined_graph(error)
            if not isinstance(error, CallError) or len(failed) == MOST_FAILED:
                findings, note = [*failed.values(), found], ""
                break
            failed[error.name] = found
    return GraphReport(tuple(findings), (time.perf_counter() - start) * 1e3, note)


def _rewrite(
    gm: GraphModule, failed: Mapping[str, Declined], max_q_len: int, may_guard: bool, fuses: bool, batch_invariant: bool
) -> tuple[list[Rewritten | Declined], str]:
    """Rewrite all calls but those that `failed` before, by name. Returns the findings, and a note on moved caches."""
    masks, errors = Masks(), list[Declined]()
    written_out = dict(or_nothing(lambda: find_written_out(gm.graph), errors))
    flex = find_flex(gm.graph)
    known = {*written_out.values(), *flex}
    others = [] if errors else or_nothing(lambda: _other_attention(gm.graph, known), errors)
    bodies = {name: x.graph for name, x in gm.named_modules() if isinstance(x, GraphModule) and x.graph is not gm.graph}
    nested = [
        finding
        for name, graph in bodies.items()
        for finding in or_nothing(functools.partial(_find_nested, name, graph), errors)
    ]
    moving = movers(gm.graph)

    def rewrite_call(call: SdpaCall) -> Rewritten | Declined:
        notes: list[str] = []
        while (tiled := find_tiled(call)) is not None:
            call = untiled_call(tiled, masks)
            notes.insert(0, tiled.note)
        finding = _rewrite_call(call, max_q_len, masks, moving, may_guard, batch_invariant)
        if not notes or isinstance(finding, Declined):
            return finding
        return dataclasses.replace(finding, note="; ".join(filter(None, (finding.note, *notes))))

    findings: list[Rewritten | Declined] = []
    for node in sorted([*sdpa_nodes(gm.graph), *written_out, *flex]):
        if node.name in failed:
            findings.append(failed[node.name])
            continue
        try:
            softmax = written_out.get(node)
            if softmax is not None:
                findings.append(_rewrite_written_out(node, softmax, masks, rewrite_call, fuses, may_guard))
            elif is_flex(node):
                findings.append(_rewrite_flex(node, masks, rewrite_call))
            else:
                findings.append(rewrite_call(bind_sdpa(node)))
        except Exception as error:
            raise CallError(node) from error
    slides = or_nothing(lambda: find_slides(gm.graph, moving), errors) if fuses else []
    moved = 0
    for slide in slides:
        if slide.copy.name in failed:
            errors.append(failed[slide.copy.name])
            continue
        try:
            apply_slide(slide)
        except Exception as error:
            raise CallError(slide.copy) from error
        moved += 1
    note = f"{moved} full caches of sliding windows are moved in place" if moved else ""
    return [*findings, *others, *nested, *errors], note


def _find_nested(name: str, graph: Graph) -> list[Declined]:
    """The attention in the body of a higher-order operator: nothing of it is rewritten."""
    nested = Decline(Reason.NESTED, f"inside `{name}`, the body of a higher-order operator")
    findings = [declined(call, nested) for call in find_sdpa(graph)]
    written_out = dict(find_written_out(graph))
    for product, softmax in written_out.items():
        found = read_written_out(softmax)
        findings.append(Declined(source_location(product), "", found if isinstance(found, Decline) else nested))
    return findings + _other_attention(graph, written_out.values())


def _other_attention(graph: Graph, known: Collection[Node]) -> list[Declined]:
    return [Declined(source_location(x.node), "", x.decline) for x in find_other_attention(graph, known)]


def _rewrite_written_out(
    product: Node,
    softmax: Node,
    masks: Masks,
    rewrite_call: Callable[[SdpaCall], Rewritten | Declined],
    fused: bool,
    may_guard: bool,
) -> Rewritten | Declined:
    """Decide about attention that is written out, as about a call of SDPA."""
    found = read_written_out(softmax)
    if isinstance(found, WrittenOut):
        # On a CPU Inductor fuses most of such attention, and each number would capture a graph of its own.
        value = tensor_of(found.value.node)
        may_fix = not fused or (value is not None and value.device.type != "cpu")
        found = settle_numbers(found, may_guard, may_fix)
    sinks = found.sinks() if isinstance(found, WrittenOut) else found
    if isinstance(sinks, Decline) or not isinstance(found, WrittenOut):
        assert isinstance(sinks, Decline)
        return Declined(source_location(product), "", sinks)
    return rewrite_call(written_out_call(found, sinks, masks, fused=fused))


def _rewrite_flex(
    node: Node, masks: Masks, rewrite_call: Callable[[SdpaCall], Rewritten | Declined]
) -> Rewritten | Declined:
    """Decide about a call of `flex_attention`, as about a call of SDPA."""
    found = check_transformed(node.all_input_nodes) or read_flex(node)
    if isinstance(found, Decline):
        return Declined(source_location(node), "", found)
    return rewrite_call(flex_call(found, masks))


def _rewrite_call(
    call: SdpaCall,
    max_q_len: int,
    masks: Masks,
    moving: Sequence[Node],
    may_guard: bool,
    batch_invariant: bool,
) -> Rewritten | Declined:
    """Decide about one call, then change the graph. The report is read off first: nodes may be erased."""
    try:
        found = _match_call(call, max_q_len, masks, moving, may_guard, batch_invariant)
    except Exception as error:  # nothing was changed yet
        found = decline_internal(error)
    if isinstance(found, Decline):
        return declined(call, found)
    given, match, note = found
    if isinstance(match, LatentMatch):
        return _absorb(given, match, masks)
    location, shapes = source_location(call.shown), shapes_of(call, *(bases(x) for x in (match.keys, match.values)))
    cost, doubt = (match.cost, match.doubt or weighed(match.cost)) if given.weighs(match) else (None, "")
    match = given.insert(match)
    state = apply_decode(match, masks) if isinstance(match, DecodeMatch) else apply_bifurcated(match, masks)
    replace_call(call, state, given.output(state), match.path, masks.drafts)
    restored = restore_query(state)
    provider = provider_of(state)
    return Rewritten(
        location,
        str(state.target),
        shapes,
        cost,
        "; ".join(filter(None, (call.form, given.note, note, restored, doubt))),
        provider,
    )


def _match_call(
    call: SdpaCall, max_q_len: int, masks: Masks, moving: Sequence[Node], may_guard: bool, batch_invariant: bool
) -> tuple[PlainCall, BifurcatedMatch | DecodeMatch | LatentMatch, str] | Decline:
    """Match one call without changing the graph. Returns the call as matchers see it, the match and a note."""
    given = (
        check_transformed((call.query, call.key, call.value, call.attn_mask, call.result))
        or find_sharded(call, masks)
        or PlainCall(call, masks)
    )
    if isinstance(given, Decline):
        return given
    decline = given.check() or check_call(call, max_q_len) or _check_movers(call, moving)
    if batch_invariant:
        decline = decline or check_invariant(given)
    if decline is not None:
        return decline
    latents = None if call.log_sums else given.latents(batch_invariant)
    if isinstance(latents, LatentMatch):
        return given, latents, ""
    found = find_invariant(given, may_guard) if batch_invariant else _find(given, may_guard)
    if isinstance(found, Decline):
        return latents or found
    match, note = found
    if latents is not None:
        note = "; ".join(filter(None, (f"not absorbed [{latents.reason.value}]: {latents.detail}", note)))
    return given, match, note


def _check_movers(call: SdpaCall, moving: Sequence[Node]) -> Decline | None:
    """Return the reason why fake tensors may not tell what this call reads, or None."""
    mover = mover_of(call.node, moving)
    if mover is None:
        return None
    return Decline(Reason.WRITTEN, f"`{mover}` gives a tensor other memory or another shape, in place")


def _absorb(given: PlainCall, match: LatentMatch, masks: Masks) -> Rewritten:
    """Change the graph as a match of latents says. The report is read off first: nodes may be erased."""
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
    note = "; ".join(filter(None, (call.form, given.note, made_of, weighed(match.cost))))
    return Rewritten(location, "tatten.latent_attention.default", shapes, match.cost, note)


def _find(given: PlainCall, may_guard: bool) -> tuple[BifurcatedMatch | DecodeMatch, str] | Decline:
    """Match one call without changing the graph. Returns the match and a note for the report, or why there is none."""
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
