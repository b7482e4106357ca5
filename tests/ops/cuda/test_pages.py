"""The decode kernel over pages, in Triton's interpreter: within a derived bound of float64."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from fuzz import settings
from hypothesis import given
from hypothesis import strategies as st
from op_bounds import assert_within_bound
from paged_calls import PagedCall, draw_paged_call
from pages_kernel import assert_same_in_16_bits
from poison import fresh_memory_is_poison
from slow import slow_but

from tatten.ops.call import AttentionCall
from tatten.ops.cuda.providers import unsupported_reason
from tatten.ops.cuda.workload import Workload, needs_of
from tatten.ops.kernel_signatures import decode_call
from tatten.ops.reference import decode_attention_reference

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs where no GPU is")


@st.composite
def calls(draw: st.DrawFn) -> PagedCall:
    return draw_paged_call(lambda options: draw(st.sampled_from(options)), tiny=True)


@interpreted
@pytest.mark.parametrize("n", slow_but([12], [12, 200]))
def test_random_calls(n: int) -> None:
    @settings(n)
    @given(calls(), st.integers(1, 9), st.sampled_from([None, 16, 64]), st.sampled_from([1, 1, 8]))
    def test(drawn: PagedCall, programs: int, block_n: int | None, lanes: int) -> None:
        """`block_n`: the keys of a tile, if no mask decides it."""
        from tatten.ops.cuda import decode_grid
        from tatten.ops.cuda.decode import plan_attention
        from tatten.ops.cuda.heuristics import Tiles

        inputs, dense = drawn.inputs()
        call = decode_call(**inputs)
        tiles = None if block_n is None else Tiles(16, block_n, 4, 2)
        with fresh_memory_is_poison(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(decode_grid, "_most_lanes", lambda *_: lanes)
            out, lse = plan_attention(call, programs=programs, tiles=tiles)(call)
        assert_within_bound(out, lse, dense, parts=programs + 1)

    test()


@interpreted
@pytest.mark.parametrize("lanes, programs", [(2, 6), (4, 4), (8, 16), (8, 64)])
@pytest.mark.parametrize("lengths", [[430, 50, 60, 240], [130, 1, 0, 64], [128] * 4, [500]], ids=str)
def test_programs_that_go_in_step(
    lanes: int, programs: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tatten.ops.cuda import decode_grid
    from tatten.ops.cuda.decode import plan_attention
    from tatten.ops.cuda.heuristics import Tiles

    monkeypatch.setattr(decode_grid, "_most_lanes", lambda *_: lanes)
    torch.manual_seed(0)
    batch, page = len(lengths), 16
    query, (key, value) = torch.randn(batch, 16, 1, 16).bfloat16(), torch.randn(2, 140, page, 8, 16).bfloat16()
    table = torch.randperm(140)[: 32 * batch].view(batch, 32).int()
    inputs = {"query": query, "key": key, "value": value, "block_table": table, "kv_lens": torch.tensor(lengths)}
    mask = torch.rand(batch, 1, 1, 512) < 0.5
    for variant in ({}, {"window": 100, "softcap": 5.0}, {"attn_mask": mask}):
        call = decode_call(**inputs, **variant)
        plan = plan_attention(call, programs=programs, tiles=Tiles(16, 16, 4, 2))
        space = plan.segment.tile_space
        assert (space.lanes, space.margin > 0) == (lanes, batch > 1)
        with fresh_memory_is_poison():
            state = plan(call)
        assert_same_in_16_bits(state, decode_attention_reference(**inputs, **variant))


@interpreted
def test_neighbouring_programs_take_shares_of_different_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    from tatten.ops.cuda import decode_grid
    from tatten.ops.cuda.decode import plan_attention
    from tatten.ops.cuda.heuristics import Tiles
    from tatten.ops.cuda.kernels import decode

    shares, first_tile = [], decode.first_tile

    def noted(share: Any, *args: Any) -> Any:
        shares.append(int(share.handle.data.item()))
        return first_tile(share, *args)

    monkeypatch.setattr(decode_grid, "_most_lanes", lambda *_: 2)
    monkeypatch.setitem(decode._decode_kernel.fn.__globals__, "first_tile", noted)
    query, (key, value) = torch.randn(1, 2, 1, 16).bfloat16(), torch.randn(2, 16, 16, 2, 16).bfloat16()
    inputs = {"query": query, "key": key, "value": value, "kv_lens": torch.tensor([256])}
    call = decode_call(**inputs, block_table=torch.arange(16, dtype=torch.int32)[None])
    plan_attention(call, programs=4, tiles=Tiles(16, 64, 4, 2))(call)
    assert shares == [0, 1, 2, 3, 1, 2, 3, 4]  # the first tile of each share, and of the next one


@interpreted
def test_margins_do_not_depend_on_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    import triton.language as tl

    from tatten.ops.cuda.kernels.tile_scheduler import tile_space

    @triton.jit
    def margin_of(lens, out, lanes, SPACE: tl.constexpr):  # type: ignore[no-untyped-def]
        _, _, _, _, margin = tile_space(lens, None, None, 0, 4, 8, 640, 0, 1, 16, 4, lanes, SPACE, False)
        tl.store(out, margin)

    monkeypatch.setitem(margin_of.fn.__globals__, "tile_space", tile_space)  # the interpreter knows globals alone
    margins = []
    for lanes in (1, 8):
        out = torch.zeros(1, dtype=torch.int32)
        margin_of[(1,)](torch.tensor([240, 80, 20, 0]), out, lanes, SPACE=(16, 16, 4, 0, False, 8, lanes > 1))
        margins.append(int(out))
    assert margins == [5, 5]


def test_shared_pages_that_a_call_can_not_use_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from tatten.ops.cuda import decode, dispatch

    monkeypatch.setattr(dispatch, "check_provider", lambda *_: None)
    monkeypatch.setattr(dispatch, "choose_provider", lambda *_: "triton")
    monkeypatch.setattr(dispatch, "unsupported_reason", lambda *_: None)
    monkeypatch.setattr(decode, "plan_attention", lambda call: call)
    pool, table = torch.randn(3, 64, 2, 8), torch.tensor([[0, 1], [0, 2]], dtype=torch.int32)
    shared = torch.ops.tatten.shared_pages(table, torch.tensor([100, 120]), 3, 64)
    inputs = {"query": torch.randn(2, 4, 1, 8), "key": pool, "value": pool, "kv_lens": torch.tensor([100, 120])}
    call = decode_call(**inputs, block_table=table, shared_pages=shared, window=50)
    assert dispatch._plan_decode(call).segments[0].shared_pages is None


@pytest.mark.drawn(3)
@interpreted
@pytest.mark.parametrize("page", [4, 64])
@pytest.mark.parametrize("kind", ["one row", "ragged", "bias", "queries"])
def test_a_block_mask_in_place_of_lengths(kind: str, page: int) -> None:
    from tatten.ops.cuda.decode import plan_attention
    from tatten.ops.masks import block_list
    from tatten.ops.reference import decode_attention_reference

    keys = torch.arange(192)
    mask = {
        "one row": keys[None, None, None] < 130,
        "ragged": (keys < torch.tensor([70, 192])[:, None, None, None]) & (keys % 90 > 2),
        "bias": torch.where(keys < 100, torch.randn(2, 1, 1, 192), -torch.inf),
        "queries": keys <= torch.tensor([[90], [150]]),
    }[kind]
    pool = torch.randn(2, 2 * 192 // page + 1, page, 2, 8)
    table = torch.randperm(pool.shape[1])[:-1].view(2, -1).int()
    query = torch.randn(2, 4, 2, 8)
    want = decode_attention_reference(query, *(x[table].flatten(1, 2).transpose(1, 2) for x in pool), attn_mask=mask)
    allowed = mask if mask.dtype == torch.bool else mask > -torch.inf
    unread = ~allowed.expand(2, 1, -1, 192).any(dim=2).view(2, -1, page).any(dim=2)
    pool[:, table[unread]] = torch.nan
    call = decode_call(query, *pool, mask, block_table=table, block_mask=block_list(mask, 2))
    with fresh_memory_is_poison():
        got = plan_attention(call, programs=3)(call)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


@pytest.mark.drawn(3)
@interpreted
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("page", [4, 64])
def test_scales_in_pages(dtype: torch.dtype, page: int, masked: bool) -> None:
    from tatten.ops.cuda.decode import plan_attention
    from tatten.ops.reference import decode_attention_reference

    key, value = (torch.randn(2, 5, page, 2, 8) * 20).to(dtype)
    given = {
        "query": torch.randn(2, 4, 1, 8),
        "key": key,
        "value": value,
        "block_table": torch.tensor([[3, 1, 4], [0, -1, 3]], dtype=torch.int32),
        "kv_lens": torch.tensor([3 * page, 2 * page + 1]),
        "key_scale": torch.rand(5, 2, page).mT / 20,  # so that scores are small, and float32 rounds them little
        "value_scale": torch.rand(5, page, 2) / 20,
    }
    if masked:
        given["attn_mask"] = torch.rand(2, 1, 1, 3 * page) > 0.3
    call = decode_call(**given)
    for got, want in zip(plan_attention(call)(call), decode_attention_reference(**given), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@interpreted
def test_scales_of_heads_may_have_any_strides() -> None:
    from tatten.ops.cuda.decode import plan_attention

    pool = torch.randint(-99, 99, (4, 16, 2, 8), dtype=torch.int8)
    given: dict[str, Any] = {"block_table": torch.tensor([[3, 1]]).int(), "kv_lens": torch.tensor([30])}
    given |= {"key_scale": torch.tensor([0.02, 50.0, 0.05])[::2], "value_scale": torch.tensor(0.7).expand(2)}
    call = decode_call(torch.randn(1, 4, 1, 8), pool, pool, **given)
    for x, want in zip(
        plan_attention(call)(call), decode_attention_reference(call.query, pool, pool, **given), strict=True
    ):
        torch.testing.assert_close(x.double(), want, rtol=1e-5, atol=1e-4)


@interpreted
@pytest.mark.parametrize("page", [64, 128, 256])
def test_a_run_of_full_blocks_begins_within_a_page(page: int) -> None:
    from tatten.ops.cuda.decode import plan_attention
    from tatten.ops.cuda.heuristics import Tiles
    from tatten.ops.reference import decode_attention_reference

    key, value = torch.randn(2, 9, page, 2, 8)
    given = {
        "query": torch.randn(1, 4, 1, 8),
        "key": key,
        "value": value,
        "block_table": torch.arange(1024 // page - 1, -1, -1, dtype=torch.int32)[None] % 9,
        "kv_lens": torch.tensor([1000]),
        "attn_mask": torch.arange(1024) >= 60,  # full from key 64 on
    }
    call = decode_call(**given)
    got = plan_attention(call, tiles=Tiles(16, 128, 4, 2), programs=2)(call)
    for x, want in zip(got, decode_attention_reference(**given), strict=True):
        torch.testing.assert_close(x.double(), want, rtol=1e-5, atol=1e-5)


def paged(batch: int, page: int = 16, columns: int = 300, device: str = "meta", **options: Any) -> AttentionCall:
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    pool = empty(1000, page, 8, 128)
    table, lens = empty(batch, columns, dtype=torch.int32), empty(batch, dtype=torch.int32)
    return decode_call(empty(batch, 32, 1, 128), pool, pool, kv_lens=lens, block_table=table, **options)


def test_tiles_do_not_depend_on_the_batch_where_bits_must_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from tatten.ops.cuda import decode, decode_grid

    monkeypatch.setattr(decode_grid, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(decode_grid, "has_large_shared_memory", lambda device: True)

    def chosen(batch: int) -> tuple[object, ...]:
        call = paged(batch, batch_invariant=True)
        return decode.plan_segment(call, call.segments[0]).tile_space.constants[:2]

    assert chosen(1) == chosen(2) == chosen(64)


@pytest.mark.parametrize("provider", ["cudnn", "flash", "fa3"])
def test_other_providers_say_that_they_take_no_block_table(provider: str) -> None:
    call = paged(2)
    (stored,) = call.segments
    work = Workload.of(call.query, stored.key, stored.value, needs_of(call))
    assert "block table" in (unsupported_reason(provider, work) or "")


@interpreted
def test_a_bias_of_keys_without_pages_does_not_count() -> None:
    """All that is left of a query has the lowest bias, which excludes keys only beside others."""
    low = torch.finfo(torch.float32).min
    mask = torch.full((1, 1, 2, 20), low)
    mask[0, 0, 0, :4], mask[0, 0, 1, 5] = 0.0, 1.0  # the first page has no entry
    key, value = torch.randn(2, 6, 4, 1, 16)
    tensors = torch.randn(1, 2, 2, 16), key, value, mask, torch.tensor([14])
    table = torch.tensor([[-1, 1, 2, 9, 3]], dtype=torch.int32)
    from tatten.ops.cuda.decode import plan_attention

    call = decode_call(*tensors, None, None, block_table=table)
    out, lse = plan_attention(call)(call)
    want, want_lse = decode_attention_reference(*tensors, block_table=table)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)
