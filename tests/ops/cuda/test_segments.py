"""Plans of segments: each pair is planned by itself, with SMs left to what runs beside the prefix kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tatten.ops.cuda import segments
from tatten.ops.cuda.combine import TileSpace
from tatten.ops.cuda.segments import PrefixSegment, Segments, plan_segments

SMS = 132


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose prefix kernel takes all plain keys that sequences share."""

    def plan_prefix(
        query: Tensor, key: Tensor, value: Tensor, scale: float, programs: int | None, *_: object
    ) -> PrefixSegment:
        space = TileSpace(1, 8, key.shape[2], 8, query.shape[0], 1, programs or SMS, 128, 128)
        return PrefixSegment(space, lambda *_: (query,) * 4)

    monkeypatch.setattr(segments, "multiprocessors", lambda device: SMS)
    monkeypatch.setattr(segments, "plan_prefix_segment", plan_prefix)
    monkeypatch.setattr(
        segments, "_takes_prefix_kernel", lambda query, x, scale: x.key.shape[0] == 1 and x.attn_mask is None
    )


def plan(*shapes: tuple[int, int], masks: dict[int, torch.dtype] | None = None) -> Segments:
    """The plan for segments of so many rows and keys, of 256 sequences."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    keys = [empty(rows, 8, length, 128) for rows, length in shapes]
    masks = masks or {}
    attn_masks = [empty(1, 1, 1, key.shape[2], dtype=masks[i]) if i in masks else None for i, key in enumerate(keys)]
    return plan_segments(empty(256, 32, 1, 128), keys, keys, attn_masks, [None] * len(keys), 0.1)


def programs(plan: Segments) -> list[list[int]]:
    return [[launch.tile_space.programs for launch in pair.launches] for pair in plan.pairs]


def test_a_short_segment_has_sms_beside_the_prefix_kernel() -> None:
    ((prefix, beside),) = programs(plan((1, 8192), (256, 256)))
    assert 0 < SMS - prefix < SMS
    assert beside == (SMS - prefix) * segments.SHORT_ROWS.per_sm


def test_each_pair_is_planned_as_if_alone() -> None:
    alone = programs(plan((1, 8192), (256, 256)))
    assert programs(plan((1, 8192), (256, 256), (1, 8192), (256, 256))) == alone * 2
    assert programs(plan((1, 8192), (256, 256), (256, 300)))[:1] == alone
    assert programs(plan((256, 300), (256, 256), (1, 8192), (256, 256)))[1:] == alone


def test_a_last_segment_alone_and_a_second_one_are_never_the_prefix_kernels() -> None:
    planned = plan((256, 300), (1, 8192), (1, 8192))
    assert not any(isinstance(launch, PrefixSegment) for pair in planned.pairs for launch in pair.launches)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_states_have_maximum_and_sum_only_where_they_are_merged_beside_a_bias(number: int, dtype: torch.dtype) -> None:
    planned = plan(*[(256, 100)] * number, masks={0: dtype})
    additive = dtype == torch.float32
    assert len(planned.pairs) == len(planned.merges) + 1 == (number + 1) // 2
    assert all(x.tile_space.max_and_sum == additive for pair in planned.pairs for x in pair.launches)
    assert all(pair.combine.max_and_sum == (additive and number > 2) for pair in planned.pairs)
    assert all(merge.max_and_sum == additive for merge in planned.merges)
    assert [merge.final for merge in planned.merges] == [i == len(planned.merges) for i in range(1, len(planned.pairs))]
