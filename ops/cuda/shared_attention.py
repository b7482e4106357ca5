"""Plan attention over pages that sequences share: a launch for row groups, one for what each has alone, and a combine.

The first launch ends at once if nothing is shared. The second one runs beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tatten.ops.call import AttentionCall
from tatten.ops.cuda.combine import Combine, plan_combine
from tatten.ops.cuda.decode import OWN_PART, SHARED_PART, SegmentLaunch, plan_segment
from tatten.ops.cuda.decode_grid import Place
from tatten.ops.cuda.heuristics import Tiles
from tatten.ops.page_runs import UNIT_KEYS
from tatten.ops.states import State


@dataclass(frozen=True)
class SharedAttention:
    """Computes attention with shared pages, for calls of the layout that it was planned for."""

    shared: SegmentLaunch
    own: SegmentLaunch
    combine: Combine

    def __call__(self, call: AttentionCall) -> State:
        (stored,) = call.segments
        shared = self.shared(call, stored._replace(kv_lens=None, row_groups=stored.shared_pages))
        state = self.combine(self.own(call, stored), shared)
        return state.out, state.lse


def plan_shared_attention(
    call: AttentionCall, *, tiles: Tiles | None = None, programs: int | None = None
) -> SharedAttention:
    """Plan the launches for a checked call of two sequences or more. `tiles` are those of keys that are not shared."""
    query, (stored,) = call.query, call.segments
    groups = stored._replace(kv_lens=None, row_groups=stored.shared_pages)
    shared = plan_segment(call, groups, Place(final=False, sinks=False), programs=programs, part=SHARED_PART)
    # Sequences of a row group stop between units, and a tile must not go on beyond.
    assert UNIT_KEYS % shared.tile_space.block_n == 0
    place = Place(final=False, beside_previous=True)
    own = plan_segment(call, stored, place, tiles=tiles, programs=programs, part=OWN_PART)
    spaces = own.tile_space, shared.tile_space
    return SharedAttention(
        shared, own, plan_combine(query, stored.value.shape[3], *spaces, dtype=query.dtype, shared=True)
    )
