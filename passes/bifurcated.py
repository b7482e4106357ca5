"""The bifurcation pass: attention to keys that sequences share, or that were concatenated only for attention.

Such a call becomes `tatten::bifurcated_attention`, which reads each segment once, where it is stored.
`match_bifurcated` returns a match or a reason, and `apply_bifurcated` changes the graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from tatten.ops.layout import BATCH, HEADS, LENGTH
from tatten.passes.indices import insert_indices
from tatten.passes.masks import Masks
from tatten.passes.match import Match
from tatten.passes.reasons import Decline, Reason
from tatten.passes.replace import insert_op, scale_of
from tatten.passes.rows import SelectedRows
from tatten.passes.sdpa import SdpaCall
from tatten.passes.stored import Stored
from tatten.passes.symbolic import constant, guard_equal, known_different, known_equal, known_tensor


@dataclass(frozen=True)
class BifurcatedMatch(Match):
    """An SDPA call that `tatten::bifurcated_attention` can compute. Its segments of keys and of values correspond."""

    @property
    def too_costly(self) -> Decline | None:
        return None if self.cost is None or self.cost.pays else Decline(Reason.SMALL, str(self.cost))


def match_bifurcated(
    call: SdpaCall, keys: tuple[Stored, ...], values: tuple[Stored, ...], may_guard: bool = True
) -> BifurcatedMatch | Decline | None:
    """Match a call that `check_call` found eligible, given its segments.

    A guard is added only if keys and values have two or more lengths, or numbers of rows that an index selects from,
    that can't be proven equal. Without `may_guard` these calls don't match.

    Returns:
        A match, the reason why there is none, or None if key and value are one segment each that is not shared.
    """
    query, key, value = (known_tensor(x) for x in (call.query, call.key, call.value))
    # SDPA broadcasts a key and value with a batch of one.
    broadcasts = not known_equal(query.shape[0], 1) and all(known_equal(x.shape[0], 1) for x in (key, value))
    if not broadcasts and len(keys) == len(values) == 1 and not keys[0].shared and not values[0].shared:
        return None
    if not broadcasts and not all(known_equal(x.shape[0], query.shape[0]) for x in (key, value)):
        return Decline(Reason.BATCH, f"query, key, value have batch {query.shape[0]}, {key.shape[0]}, {value.shape[0]}")
    if not correspond(keys, values, may_guard):
        shown = " and ".join(f"{name} in {_describe(x)}" for name, x in (("key", keys), ("value", values)))
        return Decline(Reason.SEGMENTS, f"{shown} (batch x heads x length)")
    if any(x.rows and constant(query.shape[1] // x.size(HEADS)) is None for x in keys):
        return Decline(Reason.HEADS, f"rows are selected, and {query.shape[1]} query heads are no constant")
    for name, segments in (("key", keys), ("value", values)):
        for segment in segments:
            writer = segment.written_before(call.node)
            if writer is not None:
                return Decline(
                    Reason.WRITTEN, f"{name} is written by `{writer}` after it was expanded, selected or concatenated"
                )
    return BifurcatedMatch(call, keys, values)


def correspond(keys: tuple[Stored, ...], values: tuple[Stored, ...], may_guard: bool) -> bool:
    """Return True if keys and values have the same segments. With dynamic shapes, one size may have two symbols."""
    equal = guard_equal if may_guard else known_equal
    if len(keys) != len(values):
        return False
    pairs = list(zip(keys, values, strict=True))
    if not all(
        k.repeats == v.repeats
        and known_equal(k.size(HEADS), v.size(HEADS))
        and (known_equal(k.size(BATCH), v.size(BATCH)) or k.rows is not None)
        and _key_of(k.rows) == _key_of(v.rows)
        for k, v in pairs
    ):
        return False
    unproven = [(k.size(LENGTH), v.size(LENGTH)) for k, v in pairs if not known_equal(k.size(LENGTH), v.size(LENGTH))]
    if any(known_different(k, v) for k, v in unproven):
        return False
    # SDPA requires equal sums, so one length follows from the others.
    unproven = unproven[1:] + [(k.size(BATCH), v.size(BATCH)) for k, v in pairs]
    return all(equal(k, v) for k, v in unproven)


def _key_of(rows: SelectedRows | None) -> object:
    return None if rows is None else rows.key


def _describe(segments: tuple[Stored, ...]) -> str:
    return " + ".join("x".join(str(segment.size(role)) for role in (BATCH, HEADS, LENGTH)) for segment in segments)


def apply_bifurcated(match: BifurcatedMatch, masks: Masks) -> Node:
    """Insert the op before SDPA and return its node, a state."""
    call = masks.cast(match.call)
    keys, values = ([masks.as_operand(x, call) for x in stored] for stored in (match.keys, match.values))
    columns = masks.columns(call, match.keys)
    rows = [masks.rows(call, segment) for segment in match.keys]
    groups = [masks.row_groups(call, segment, indices) for segment, indices in zip(match.keys, rows, strict=True)]
    # With every block listed, the place of a shared block does not depend on the keys of other sequences.
    shared = len(columns) - 1 if match.batch_invariant else 0
    segments = enumerate(zip(columns, match.keys, rows, strict=True))
    block_masks = [masks.block_mask(call, *segment, every_block=i < shared) for i, segment in segments]
    args = (call.query, keys, values, columns, block_masks, scale_of(call), *([groups] if any(groups) else []))
    picks = insert_indices(call, match.keys, masks.drafts)
    options = match.options | picks[0]
    if "indices" in options:
        options["indices"] = [x["indices"] for x in picks]
    return insert_op(call, torch.ops.tatten.bifurcated_attention.default, args, options)
