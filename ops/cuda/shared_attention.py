"""Plan attention over shared pages: a launch for row groups, one for each sequence's own part, and a combine.

The first launch ends at once if nothing is shared. The second one runs beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tatten.ops.call import AttentionCall, KeyValue
from tatten.ops.cuda.combine import Combine, plan_combine
from tatten.ops.cuda.decode import OWN_PART, SHARED_PART, SegmentLaunch, plan_segment
from tatten.ops.cuda.decode_grid import Place
from tatten.ops.cuda.gpu import has_large_shared_memory, multiprocessors
from tatten.ops.cuda.heuristics import Tiles
from tatten.ops.page_runs import UNIT_KEYS, first_row
from tatten.ops.states import State

if TYPE_CHECKING:
    from tatten.ops.cuda.pages_sm90 import SharedSegment


MOST_SEQUENCES = 256  # of a batch whose own parts get more programs than fit into the SMs
# Own parts get at most this multiple of the programs that fit into the SMs. Each program has room for two partial
# states, which take 35 MB for 2112 programs with 16 queries of 128 columns.
MOST_WAVES = 4


@dataclass(frozen=True)
class SharedAttention:
    """Computes attention with shared pages, for calls of the layout that it was planned for."""

    shared_part: SegmentLaunch | SharedSegment
    own_part: SegmentLaunch
    combine: Combine

    def __call__(self, call: AttentionCall) -> State:
        (stored,) = call.segments
        shared = self.shared_part(call, stored._replace(kv_lens=None, row_groups=stored.shared_pages))
        state = self.combine(self.own_part(call, stored), shared)
        return state.out, state.lse


def plan_shared_attention(call: AttentionCall, *, programs: int | None = None) -> SharedAttention:
    """Plan the launches for a checked call of two sequences or more."""
    query, (stored,) = call.query, call.segments
    row_groups = stored._replace(kv_lens=None, row_groups=stored.shared_pages)
    shared_part = plan_shared_part(call, row_groups, programs)
    place = Place(final=False, beside_previous=True)
    tiles = _own_part_tiles(call)
    own_part = plan_segment(
        call, stored, place, tiles=tiles, programs=programs or _own_part_programs(call, tiles), part=OWN_PART
    )
    spaces = own_part.tile_space, shared_part.tile_space
    shared_row = first_row(query.shape[0], shared_part.tile_space.seqs_per_kv)
    combine = plan_combine(query, stored.value.shape[3], *spaces, dtype=query.dtype, shared_row=shared_row)
    return SharedAttention(shared_part, own_part, combine)


def _own_part_tiles(call: AttentionCall) -> Tiles | None:
    """Choose tiles for own parts, which often have few keys: many short programs overlap their loads.

    On an H100 they were faster than the tiles of `tiles_for` with own parts of 256 keys, and as fast with 8192 keys of
    which none is shared (heads of 128, pages of 16).
    """
    query, (stored,) = call.query, call.segments
    rows = query.shape[1] // stored.key.shape[1] * query.shape[2]
    narrow = stored.key.element_size() != 2 or query.shape[3] > 128 or stored.value.shape[3] > 128
    if rows > 16 or narrow or query.element_size() != 2:
        return None
    # Programs of 2 warps leave registers to the combine: 32 x 512 own keys after 131072 shared ones take 180 us instead
    # of 193 with 4 warps (H200). With fewer work tiles than SMs, their latency counts: 4 x 256 after 4096 take 19 us
    # with 2 warps, and 17 with 4.
    many = query.shape[0] * stored.key.shape[1] > multiprocessors(query.device)
    return Tiles(16, 32, 2, 3, 4) if many and has_large_shared_memory(query.device) else Tiles(16, 32, 4, 3, 6)


def _own_part_programs(call: AttentionCall, tiles: Tiles | None) -> int | None:
    """Choose the number of programs for own parts: up to one for each work tile, if the SMs don't have room for all.

    Own parts get the SMs that the runs of row groups leave, at different times. Short programs divide them evenly, even
    if lengths differ. Microseconds with a program for each place in the SMs, and with this choice (H200): 256 x 256 own
    keys after 8192 shared ones 174, 167; 256 of 16 to 512 keys 195, 167; 128 of 16 to 4096 keys after 2048 160, 141;
    20/20 heads, 128 of 16 to 512 keys after 10240 174, 140, with 2112 programs for 2560 work tiles. Programs of more
    sequences take longer to find their share: 512 x 256 keys and 64 query heads take 470 us, and 514.
    """
    if tiles is None or call.query.shape[0] > MOST_SEQUENCES:
        return None
    places = tiles.per_sm * multiprocessors(call.query.device)
    work_tiles = call.query.shape[0] * call.segments[0].key.shape[1]
    return min(work_tiles, MOST_WAVES * places) if work_tiles > places else None


def plan_shared_part(call: AttentionCall, groups: KeyValue, programs: int | None) -> SegmentLaunch | SharedSegment:
    """Plan the launch over the runs of row groups, `groups.row_groups`."""
    part = _plan_shared(call, groups, programs)
    # Sequences of a row group stop between units, so no tile may cross from one unit to the next.
    assert UNIT_KEYS % part.tile_space.block_n == 0
    return part


def _plan_shared(call: AttentionCall, groups: KeyValue, programs: int | None) -> SegmentLaunch | SharedSegment:
    if call.softcap is None and groups.key_scale is None and groups.value_scale is None:
        from tatten.ops.cuda.pages_sm90 import plan_shared_segment, takes_pages_kernel

        pools = groups.key.transpose(1, 2), groups.value.transpose(1, 2)
        if takes_pages_kernel(call.query, *pools, call.score_scale):
            return plan_shared_segment(call, groups, programs)
    return plan_segment(call, groups, Place(final=False, sinks=False), programs=programs, part=SHARED_PART)
