"""The decode kernel over latents in pages, in Triton's interpreter: within a derived bound of float64."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from fuzz import settings
from hypothesis import given
from hypothesis import strategies as st
from op_bounds import assert_within_bound
from paged_latents import PagedLatentCall, draw_paged_latents
from poison import fresh_memory_is_poison
from slow import slow_but

from tatten.ops.cuda import latent as on_cuda
from tatten.ops.cuda import mask_plan
from tatten.ops.kernel_signatures import latent_call
from tatten.ops.reference import latent_attention_reference

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs where no GPU is")


@st.composite
def calls(draw: st.DrawFn) -> PagedLatentCall:
    return draw_paged_latents(lambda options: draw(st.sampled_from(options)), tiny=True)


@interpreted
@pytest.mark.parametrize("n", slow_but([12], [12, 200]))
def test_random_calls(n: int) -> None:
    @settings(n)
    @given(calls(), st.integers(1, 9), st.sampled_from([None, 16, 64]))
    def test(drawn: PagedLatentCall, programs: int, block_n: int | None) -> None:
        """`block_n`: the keys of a tile, if no mask decides it."""
        from tatten.ops.cuda.decode import plan_attention
        from tatten.ops.cuda.heuristics import Tiles

        inputs, expanded = drawn.inputs()
        call = latent_call(**inputs, out_dtype=drawn.out_dtype)
        tiles = None if block_n is None else Tiles(16, block_n, 4, 2)
        with fresh_memory_is_poison():
            out, lse = plan_attention(call, programs=programs, tiles=tiles)(call)
        assert_within_bound(out, lse, expanded, parts=programs + 1, out_dtype=drawn.out_dtype)

    test()


@interpreted
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("page", [4, 64, 256])
def test_latents_and_rope_in_pools_of_their_own(page: int, masked: bool) -> None:
    given: dict[str, Any] = {
        "query": torch.randn(2, 3, 2, 24),
        "query_rope": torch.randn(2, 3, 2, 8),
        "latent": torch.randn(page, 5, 1, 24).transpose(0, 1),
        "key_rope": torch.randn(5, 1, page, 8).transpose(1, 2),
        "block_table": torch.tensor([[3, 1, 4], [0, -1, 3]], dtype=torch.int32),
        "kv_lens": torch.tensor([3 * page, 2 * page + 1]),
        "scale": 0.2,
    }
    if masked:
        given["attn_mask"] = torch.rand(2, 1, 1, 3 * page) > 0.3
    call = latent_call(**given)
    for got, want in zip(on_cuda.plan_latents(call)(call), latent_attention_reference(**given), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def paged(heads: int, dtype: torch.dtype = torch.bfloat16, batch: int = 2, columns: int = 40, **options: Any) -> Any:
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    latent, key_rope = empty(1000, 16, 1, 576).split((512, 64), dim=3)
    table, lens = empty(batch, columns, dtype=torch.int32), empty(batch, dtype=torch.int32)
    query, query_rope = empty(batch, heads, 1, 512, dtype=dtype), empty(batch, heads, 1, 64)
    return latent_call(query, query_rope, latent, key_rope, None, lens, scale=0.1, block_table=table, **options)


@pytest.mark.parametrize(("heads", "dtype"), [(16, torch.float32), (128, torch.bfloat16)], ids=str)
def test_the_kernels_for_hopper_take_no_pages(heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from tatten.ops.cuda import combine

    monkeypatch.setattr(combine, "INTERPRETED", False)
    monkeypatch.setattr(on_cuda, "takes_tma", lambda x: True)
    call = paged(heads, dtype)
    assert not on_cuda._takes_sm90(call, mask_plan.plan_mask(call.query, call.segments[0]))


def test_tiles_do_not_depend_on_the_batch_where_bits_must_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from tatten.ops.cuda import decode, decode_grid

    monkeypatch.setattr(decode_grid, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(decode_grid, "has_large_shared_memory", lambda device: True)

    def chosen(batch: int) -> tuple[object, ...]:
        call = paged(16, batch=batch, columns=300, batch_invariant=True)
        return decode.plan_segment(call, call.segments[0]).tile_space.constants[:2]

    assert chosen(1) == chosen(2) == chosen(64)
