"""Plans of segments: each pair is planned by itself, with SMs left to what runs beside the prefix kernel."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tatten.ops.call import AttentionCall, KeyValue
from tatten.ops.cuda import decode, decode_grid, segment_launches
from tatten.ops.cuda.decode import SegmentLaunch
from tatten.ops.cuda.prefix_sm90 import PrefixAttention
from tatten.ops.cuda.segment_launches import PrefixSegment, plan_prefix_segment
from tatten.ops.cuda.segments import Segments, plan_segments
from tatten.ops.cuda.tile_space import TileSpace
from tatten.ops.kernel_signatures import bifurcated_call, decode_call

SMS = 132


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose prefix kernel takes all plain keys that sequences share."""

    def plan_prefix(call: AttentionCall, stored: KeyValue, programs: int | None) -> PrefixSegment:
        query = call.query
        space = TileSpace(1, 8, stored.key.shape[2], 8, query.shape[0], 1, programs or SMS, 128, 128)
        return PrefixSegment(space, lambda *_: (query,) * 4)

    for module in (segment_launches, decode_grid):
        monkeypatch.setattr(module, "multiprocessors", lambda device: SMS)
    monkeypatch.setattr(segment_launches, "choose_levels", lambda query, keys: None)
    monkeypatch.setattr(segment_launches, "plan_prefix_segment", plan_prefix)
    monkeypatch.setattr(
        segment_launches, "_takes_prefix_kernel", lambda call, x: x.key.shape[0] == 1 and x.attn_mask is None
    )


def plan(
    *shapes: tuple[int, int],
    masks: dict[int, torch.dtype] | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> Segments:
    """The plan for segments of so many rows and keys, of 256 sequences."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    keys = [empty(rows, 8, length, 128) for rows, length in shapes]
    masks = masks or {}
    attn_masks = [
        empty(key.shape[0], 1, 1, key.shape[2], dtype=masks[i]) if i in masks else None for i, key in enumerate(keys)
    ]
    variant = {"softcap": softcap, "sinks": empty(32) if sinks else None}
    return plan_segments(bifurcated_call(empty(256, 32, 1, 128), keys, keys, attn_masks, scale=0.1, **variant))


def programs(plan: Segments) -> list[int]:
    return [launch.tile_space.programs for launch in plan.launches]


def test_a_short_segment_has_sms_beside_the_prefix_kernel() -> None:
    prefix, beside = programs(plan((1, 8192), (256, 256)))
    assert 0 < SMS - prefix < SMS
    assert beside == (SMS - prefix) * segment_launches.SHORT_ROWS.per_sm
    assert programs(plan((256, 256), (1, 8192))) == [prefix, beside]


@pytest.mark.parametrize("kv_len, described", [(1000, False), (31249, False), (31250, True)])
def test_large_keys_and_values_alone_are_described_to_tma(
    kv_len: int, described: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "INTERPRETED", False)
    query, key = (
        torch.empty(1, heads, n, 128, dtype=torch.float16, device="meta") for heads, n in ((32, 1), (8, kv_len))
    )
    segment = decode.plan_attention(decode_call(query, key, key, scale=0.1)).segment
    assert (segment.key_tiles is not None) == (segment.value_tiles is not None) == described
    assert segment.launch.arguments["TMA"] == described


def test_more_segments_have_all_sms_each() -> None:
    planned = plan((1, 8192), (256, 256), (256, 300))
    assert programs(planned)[0] == SMS
    assert all(n > SMS for n in programs(planned)[1:])


def test_prefix_kernels_come_first_and_others_run_beside_what_came_before() -> None:
    planned = plan((256, 300), (1, 8192), (256, 256), (1, 100))
    assert [isinstance(launch, PrefixSegment) for launch in planned.launches] == [True, True, False, False]
    assert planned.segments_by_launch == ((1,), (3,), (0,), (2,))
    assert all(launch.launch.arguments["WAIT_LAST"] for launch in planned.launches[2:])


@pytest.mark.parametrize("rows, split", [(64, False), (4, True)])
def test_the_prefix_kernel_has_memory_for_partial_states_only_where_there_are_some(rows: int, split: bool) -> None:
    """512 short work tiles get a program each: two slots for each would be several times the result."""
    query = torch.empty(16 * rows, 32, 1, 64, dtype=torch.bfloat16)
    key = torch.empty(rows, 8, 300, 64, dtype=torch.bfloat16)
    call = bifurcated_call(query, [key], [key], scale=0.1)
    planned = plan_prefix_segment(call, call.segments[0])
    assert isinstance(planned.attend, PrefixAttention)
    assert planned.tile_space.split == split
    without_launch = dataclasses.replace(planned.attend, launch=lambda *_: None)
    left = dataclasses.replace(planned, attend=without_launch)(call, call.segments[0])
    slots = 2 * planned.tile_space.programs if split else 0
    assert left.partial_out.shape == (slots, 128, 64)
    assert left.partial_lse.shape == (slots, 128)


def test_one_segment_is_never_the_prefix_kernels() -> None:
    (launch,) = plan((1, 8192)).launches
    assert not isinstance(launch, PrefixSegment)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_states_have_maximum_and_sum_only_where_they_are_merged_beside_a_bias(number: int, dtype: torch.dtype) -> None:
    """All are split here: masks have lists of their own lengths, and one alone has too many keys to stay whole."""
    planned = plan(*[(256, 600)] * number, masks=dict.fromkeys(range(number), dtype))
    additive = dtype == torch.float32
    assert planned.split == tuple(tuple(range(number))[i : i + 2] for i in range(0, number, 2))
    assert planned.unsplit == ()
    assert all(x.tile_space.max_and_sum == additive for x in planned.launches)
    *before, last = planned.combines
    assert all(combine.launch.arguments["MAX_AND_SUM_OUT"] == additive for combine in before)
    assert not last.launch.arguments["MAX_AND_SUM_OUT"]
    if before:
        assert last.launch.arguments["WHOLES"] == (additive,) * len(before)


def test_a_segment_of_few_masked_keys_is_not_combined() -> None:
    planned = plan((256, 100), masks={0: torch.bool})
    assert [combine.launch for combine in planned.combines] == [None]


def test_kernels_without_a_soft_cap_get_none() -> None:
    planned = plan((1, 8192), (16, 300), (256, 256), softcap=30.0)
    assert all(isinstance(launch, SegmentLaunch) and launch.launch.arguments["SOFTCAP"] for launch in planned.launches)


@pytest.mark.parametrize("shapes", [((1, 8192), (256, 256)), ((256, 256), (1, 8192)), ((1, 8192), (1, 300))])
def test_one_segment_has_the_sinks(shapes: tuple[tuple[int, int], ...]) -> None:
    """One that the fewest sequences share: the prefix kernel, which takes none, keeps the others."""
    planned = plan(*shapes, sinks=True)
    prefix, own = planned.launches
    assert isinstance(prefix, PrefixSegment)
    assert isinstance(own, SegmentLaunch)
    assert own.sinks
    assert shapes[planned.segments_by_launch[1][0]][0] == max(rows for rows, _ in shapes)


def test_whole_states_are_not_searched_for() -> None:
    planned = plan((256, 64), (256, 100), (256, 40))  # a program does 16 whole work tiles of 2048
    assert planned.split == ((),)
    assert planned.unsplit == (0, 1, 2)
    assert planned.combines[-1].launch.arguments["SPACES"] == ()
