"""Run all passes over one graph, and return their report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from torch.fx import GraphModule, Node

from tatten.passes.apply_match import apply_match
from tatten.passes.attention import Attention, find_attention, find_nested, read_attention
from tatten.passes.calls import calls_ops
from tatten.passes.counters import apply_counters, find_counters
from tatten.passes.describe import declined
from tatten.passes.eligible import DEFAULT_MAX_Q_LEN
from tatten.passes.find_index_scores import IndexerScores, find_index_scores
from tatten.passes.findings import Declined, GraphReport, Rewritten, counted, source_location
from tatten.passes.fused_linears import FusedGroup, apply_fused_group, find_fused_groups
from tatten.passes.index_steps import is_relu
from tatten.passes.internal import CallError, Snapshot, decline_internal, declined_graph, or_nothing
from tatten.passes.mask_lengths import find_mask_lengths
from tatten.passes.masks import Masks
from tatten.passes.match_call import match_call
from tatten.passes.mutation import movers
from tatten.passes.other_attention import find_other_attention
from tatten.passes.reasons import Decline
from tatten.passes.replace import erase_unused_of
from tatten.passes.run import Run
from tatten.passes.score_keys import apply_index_scores
from tatten.passes.skinny_linears import LinearGroup, apply_linear_group, find_skinny_linears
from tatten.passes.sliding import apply_slide, find_slides
from tatten.passes.top_k import apply_top_k, find_top_k
from tatten.passes.unsupported import check_graph

T = TypeVar("T")
MOST_FAILED = 8  # calls whose edit may fail; each of them costs another run of all passes


def rewrite(
    gm: GraphModule,
    max_q_len: int = DEFAULT_MAX_Q_LEN,
    *,
    may_guard: bool = True,
    fuses: bool = False,
    batch_invariant: bool = False,
    linears: bool = False,
    counters: bool = False,
) -> GraphReport:
    """Rewrite a Dynamo or export graph in place: each call that a pass matches becomes a tatten op.

    An internal error of tatten is not raised: the report names it `internal`. If it happens while a call is matched or
    rewritten, that call stays as it is. A search that fails counts as having found nothing. After any other error, or
    if the edits of more than `MOST_FAILED` calls fail, the graph stays unchanged.

    Args:
        gm: the graph, which is edited.
        max_q_len: the largest number of queries per sequence of a call that is rewritten.
        may_guard: whether guards may be added. Nothing would check a guard on an exported graph; without guards, a
            match relies only on facts that hold in every run of the graph.
        fuses: whether the graph's compiler is Inductor, which fuses attention that is written out and looks into ops.
        batch_invariant: whether each call becomes an op with `batch_invariant=True` if an op can compute it so, even
            if that doesn't pay.
        linears: whether linear layers of few rows become ops of tatten, if the graph calls one.
        counters: whether a graph that calls an op of tatten adds to all counters at once.

    Returns:
        The findings for the calls, the time that the passes took, and a note on all other changes.
    """
    start = time.perf_counter()
    failed: dict[str, Declined] = {}
    before = Snapshot(gm.graph)
    while True:
        try:
            of_graph = movers(gm.graph), check_graph(gm.graph)
            run = Run(max_q_len, may_guard, fuses, batch_invariant, linears, counters, Masks(), *of_graph)
            findings, note = _run_passes(gm, run, failed)
            if note or any(isinstance(finding, Rewritten) for finding in findings):
                gm.recompile()
            break
        except BaseException as error:
            before.restore()
            if not isinstance(error, Exception):
                raise
            failure = error.declined if isinstance(error, CallError) else declined_graph(error)
            if not isinstance(error, CallError) or len(failed) == MOST_FAILED:
                findings, note = [*failed.values(), failure], ""
                break
            failed[error.name] = failure
    return GraphReport(tuple(findings), (time.perf_counter() - start) * 1e3, note)


def _run_passes(gm: GraphModule, run: Run, failed: Mapping[str, Declined]) -> tuple[list[Rewritten | Declined], str]:
    """Run the passes in order. Calls in `failed`, by name, are left as they are.

    Returns:
        The findings, and a note on caches, selections and linear layers that were changed; empty if none were.
    """
    errors = list[Declined]()

    def find(search: Callable[[], list[T]]) -> list[T]:
        return or_nothing(search, errors) if run.unsupported is None else []

    attention = find_attention(gm.graph, errors)
    handled = {*attention.written_out.values(), *attention.flex}
    others = [] if errors else or_nothing(lambda: [*find_other_attention(gm.graph, handled)], errors)
    nested = find_nested(gm, errors)
    # Before calls are rewritten: the values of nodes that an edit inserts are unknown, and might be counters.
    counters = find(lambda: find_counters(gm.graph, run.movers)) if run.counters else []
    masks = find(lambda: [*find_mask_lengths(gm.graph).items()]) if not (run.movers or run.batch_invariant) else []
    run = dataclasses.replace(run, mask_lengths=dict(masks))
    findings = [failed.get(node.name) or _rewrite_call(node, attention, run) for node in attention.nodes]
    if run.masks.reads_lengths:
        erase_unused_of(run.mask_lengths)
    selections = find(lambda: find_top_k(gm.graph))
    unsorted = _edit_each(selections, lambda x: x.node, apply_top_k, failed, errors)
    scores = _score_keys(gm, run, failed)  # after calls: the proof of their picks reads the program's scores
    slides = find(lambda: find_slides(gm.graph, run.movers)) if run.fuses else []
    moved = _edit_each(slides, lambda x: x.copy, apply_slide, failed, errors)
    linears = find(lambda: _find_linears(gm, run, errors))
    launches = _edit_each(linears, lambda x: x.layers[0].node, _apply_linears, failed, errors)
    layers = sum(len(x.layers) for x in linears if x.layers[0].node.name not in failed)
    counters = counters if calls_ops(gm) else []
    counts = _edit_each(counters, lambda x: x.additions[-1], apply_counters, failed, errors)
    notes = [f"{counted(moved, 'full cache')} of sliding windows moved in place"] if moved else []
    notes += [f"{counted(unsorted, 'selection')} of keys without a sort"] if unsorted else []
    notes += [f"{counted(layers, 'linear layer')} in {counted(launches, 'launch', 'es')}"] if launches else []
    notes += [f"{counted(len(counters[0].additions), 'counter')} in one launch"] if counts else []
    return [*findings, *others, *nested, *scores, *errors], "; ".join(notes)


def _find_linears(gm: GraphModule, run: Run, errors: list[Declined]) -> list[LinearGroup | FusedGroup]:
    """Find linear layers of few rows in a decode step: a graph that calls an op of tatten, maybe thanks to a pass."""
    if not (run.linears and calls_ops(gm)):
        return []
    groups = find_skinny_linears(gm.graph, run.movers)
    fused = {x.group: x for x in or_nothing(lambda: find_fused_groups(gm.graph, groups, run.movers), errors)}
    return [fused.get(group, group) for group in groups]


def _apply_linears(group: LinearGroup | FusedGroup) -> None:
    if isinstance(group, FusedGroup):
        apply_fused_group(group)
    else:
        apply_linear_group(group)


def _rewrite_call(node: Node, attention: Attention, run: Run) -> Rewritten | Declined:
    """Read, match and rewrite the attention at one node."""
    try:
        call = read_attention(node, attention, run)
        if isinstance(call, Declined):
            return call
        decision = match_call(call, run)
        if isinstance(decision, Decline):
            return declined(call, decision)
    except Exception as error:  # the graph is not yet changed
        return Declined(source_location(node), "", decline_internal(error))
    try:
        return apply_match(decision, run.masks)
    except Exception as error:
        raise CallError(node) from error


def _score_keys(gm: GraphModule, run: Run, failed: Mapping[str, Declined]) -> list[Rewritten | Declined]:
    """Rewrite the scores of indexers, which are found by their relu."""
    findings = list[Rewritten | Declined]()
    for relu in [node for node in gm.graph.nodes if is_relu(node)]:
        try:
            scores = None if relu.name in failed else find_index_scores(relu, run)
        except Exception as error:  # the graph is not yet changed
            scores = decline_internal(error)
        try:
            findings += [apply_index_scores(scores)] if isinstance(scores, IndexerScores) else []
        except Exception as error:
            raise CallError(relu) from error
        if isinstance(scores, Decline):
            findings.append(Declined(source_location(relu), "", scores, attention=False))
        elif relu.name in failed:
            findings.append(dataclasses.replace(failed[relu.name], attention=False))
    return findings


def _edit_each(
    matches: list[T],
    node_of: Callable[[T], Node],
    edit: Callable[[T], None],
    failed: Mapping[str, Declined],
    errors: list[Declined],
) -> int:
    """Edit the graph for each match unless its node is in `failed`. Return the number of edits."""
    edited = 0
    for match in matches:
        node = node_of(match)
        if node.name in failed:
            errors.append(failed[node.name])
            continue
        try:
            edit(match)
        except Exception as error:
            raise CallError(node) from error
        edited += 1
    return edited
