"""`indices`: each query attends to the keys that it picks, and no other key is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import Case
from fuzz import settings
from hypothesis import given
from hypothesis import strategies as st
from op_bounds import assert_within_bound
from picked_calls import PickedCall, draw_picked_call
from slow import slow_but
from torch import Tensor
from torch.library import opcheck

import tatten
from tatten.ops.cpu import thresholds
from tatten.ops.picks import without_duplicates
from tatten.ops.reference import decode_attention_reference, latent_attention_reference

INT32 = torch.iinfo(torch.int32)
MIN = torch.finfo(torch.float32).min


@pytest.mark.drawn(1)
@pytest.mark.parametrize("latents", [False, True])
@pytest.mark.parametrize("n", slow_but([40], [40, 400]))
def test_random_calls(n: int, latents: bool) -> None:
    @settings(n)
    @given(st.composite(lambda draw: draw_picked_call(lambda options: draw(st.sampled_from(options)), latents))())
    def test(call: PickedCall) -> None:
        inputs, dense = call.inputs()
        with call.small_tiles():
            out, lse = call.run(inputs)
        assert_within_bound(out, lse, dense, call.parts, summed_wide=True)

    test()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("latents", [False, True])
def test_the_reference_of_random_calls(latents: bool) -> None:
    @settings(20)
    @given(st.composite(lambda draw: draw_picked_call(lambda options: draw(st.sampled_from(options)), latents))())
    def test(call: PickedCall) -> None:
        inputs, dense = call.inputs()
        inputs.pop("distinct_indices")
        if "keys" in inputs:
            return
        reference = latent_attention_reference if latents else decode_attention_reference
        want = decode_attention_reference(**dense)
        for got, x in zip(reference(**inputs), want, strict=True):
            torch.testing.assert_close(got, x, rtol=1e-9, atol=1e-12, equal_nan=True)

    test()


def distinct(*shape: int, n: int, k: int) -> Tensor:
    return torch.argsort(torch.rand(*shape, n), dim=-1)[..., :k].to(torch.int32)


def state_of_picks(query: Tensor, key: Tensor, value: Tensor, keys: list[int]) -> tuple[Tensor, Tensor]:
    return tatten.decode_attention(query, key[:, :, keys], value[:, :, keys], return_lse=True)


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def pair(batch: int, kv_heads: int, length: int) -> tuple[Tensor, Tensor]:
    key, value = torch.randn(2, batch, kv_heads, length, 8, dtype=torch.float64)
    return key, value


@pytest.mark.parametrize(
    ("entries", "keys"),
    [
        ([5], [5]),
        ([9, 2, 7], [9, 2, 7]),
        ([4, 4, 0, 4], [4, 0]),
        ([-1, 3, 10, INT32.max, INT32.min], [3]),
        (list(range(10)), list(range(10))),
        ([*range(10), *range(10, 40)], list(range(10))),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_entries(entries: list[int], keys: list[int], dtype: torch.dtype) -> None:
    query, (key, value) = torch.randn(1, 4, 1, 8, dtype=torch.float64), pair(1, 2, 10)
    unread = [i for i in range(10) if i not in keys]
    want = state_of_picks(query, key, value, keys)
    key[:, :, unread], value[:, :, unread] = torch.nan, torch.nan
    indices = torch.tensor(entries, dtype=dtype)[None, None, None]
    assert_same(tatten.decode_attention(query, key, value, indices=indices, return_lse=True), want)


def test_a_key_that_one_head_masks_may_be_nan_there() -> None:
    query, (key, value) = torch.randn(1, 4, 1, 8, dtype=torch.float64), pair(1, 2, 10)
    mask = torch.ones(1, 4, 1, 10, dtype=torch.bool)
    mask[:, 2:, :, 5], key[:, 1, 5], value[:, 1, 5] = False, torch.nan, torch.nan
    out = tatten.decode_attention(query, key, value, attn_mask=mask, indices=torch.tensor([[[[5, 2]]]]))
    torch.testing.assert_close(out[:, 2:], value[:, 1:, 2:3].expand(1, 2, 1, 8))
    assert not out.isnan().any()


@pytest.mark.parametrize("entries", [[], [-1, -1], [10, INT32.max], [2, 3]])
def test_a_query_without_keys_is_empty(entries: list[int]) -> None:
    query, (key, value) = torch.randn(1, 4, 1, 8, dtype=torch.float64), pair(1, 2, 10)
    mask = torch.ones(10, dtype=torch.bool).index_fill(0, torch.tensor([2, 3]), False)
    indices = torch.tensor(entries, dtype=torch.int32).view(1, 1, 1, -1)
    out, lse = tatten.decode_attention(query, key * torch.nan, value, attn_mask=mask, indices=indices, return_lse=True)
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_int64_entries_far_out_of_range_do_not_wrap_around() -> None:
    query, (key, value) = torch.randn(1, 4, 1, 8, dtype=torch.float64), pair(1, 2, 10)
    indices = torch.tensor([2**62, -(2**62), 2**60, 1, 2**63 - 1, -(2**63)])[None, None, None]
    got = tatten.decode_attention(query, key, value, indices=indices, index_block=4, return_lse=True)
    assert_same(got, state_of_picks(query, key, value, [4, 5, 6, 7]))


def test_blocks_end_with_the_keys() -> None:
    query, (key, value) = torch.randn(1, 4, 1, 8, dtype=torch.float64), pair(1, 2, 10)
    indices = torch.tensor([2, 0, 3, -1], dtype=torch.int32)[None, None, None]
    got = tatten.decode_attention(query, key, value, indices=indices, index_block=4, return_lse=True)
    assert_same(got, state_of_picks(query, key, value, [8, 9, 0, 1, 2, 3]))


def test_each_query_and_kv_head_picks_for_itself() -> None:
    query, (key, value) = torch.randn(2, 6, 4, 8, dtype=torch.float64), pair(2, 3, 50)
    indices = distinct(2, 3, 4, n=50, k=7)
    out, lse = tatten.decode_attention(query, key, value, indices=indices, return_lse=True)
    for b, head, i in torch.cartesian_prod(*map(torch.arange, (2, 3, 4))).tolist():
        heads, one = slice(2 * head, 2 * head + 2), slice(head, head + 1)
        args = query[b : b + 1, heads, i : i + 1], key[b : b + 1, one], value[b : b + 1, one]
        want = state_of_picks(*args, indices[b, head, i].tolist())
        assert_same((out[b : b + 1, heads, i : i + 1], lse[b : b + 1, heads, i : i + 1]), want)


def test_sequences_that_share_latents_pick_for_themselves() -> None:
    query, latent = torch.randn(4, 3, 2, 8, dtype=torch.float64), torch.randn(2, 1, 40, 8, dtype=torch.float64)
    indices = distinct(4, 1, 2, n=40, k=6)
    got = tatten.latent_attention(query, None, latent, None, scale=0.3, indices=indices, return_lse=True)
    own = latent.repeat_interleave(2, dim=0)
    assert_same(got, tatten.decode_attention(query, own, own, scale=0.3, indices=indices, return_lse=True))


def test_a_tile_may_hold_any_number_of_picks(monkeypatch: pytest.MonkeyPatch) -> None:
    query, (key, value) = torch.randn(2, 4, 1, 8, dtype=torch.float64), pair(2, 2, 300)
    indices = distinct(2, 1, 1, n=300, k=101)
    want = tatten.decode_attention(query, key, value, indices=indices, return_lse=True)
    for block_bytes in (1, 10_000, 77_777):
        monkeypatch.setattr(thresholds.CPU, "block_bytes", block_bytes)
        assert_same(tatten.decode_attention(query, key, value, indices=indices, return_lse=True), want)


def test_states_over_disjoint_picks_merge() -> None:
    query, (key, value) = torch.randn(2, 4, 3, 8, dtype=torch.float64), pair(2, 2, 60)
    indices = distinct(2, 2, 3, n=60, k=20)
    parts = [
        tatten.decode_attention(query, key, value, indices=x, return_lse=True) for x in indices.split([3, 0, 17], 3)
    ]
    out, lse = (torch.stack(x) for x in zip(*parts, strict=True))
    want = tatten.decode_attention(query, key, value, indices=indices, return_lse=True)
    assert_same(tatten.merge_states(out, lse), want)


def test_parts_of_the_keys_take_their_own_picks() -> None:
    query, (key, value) = torch.randn(2, 4, 3, 8, dtype=torch.float64), pair(2, 2, 60)
    indices = distinct(2, 2, 3, n=60, k=20)
    want = tatten.decode_attention(query, key, value, indices=indices, return_lse=True)
    bounds = [(0, 25), (25, 26), (26, 60)]
    keys, values = ([x[:, :, lo:hi] for lo, hi in bounds] for x in (key, value))
    own = [indices - lo for lo, _ in bounds]
    ranks = [
        tatten.decode_attention(query, *x, return_lse=True, indices=i) for *x, i in zip(keys, values, own, strict=True)
    ]
    assert_same(tatten.merge_states(*(torch.stack(x) for x in zip(*ranks, strict=True))), want)
    assert_same(tatten.bifurcated_attention(query, keys, values, indices=own, return_lse=True), want)


def test_a_large_bias_does_not_hide_the_number_of_keys() -> None:
    """The lse of 3 keys and of 1000 keys at -1e9 is one number in float32."""
    query, value = torch.zeros(1, 1, 1, 8), [torch.ones(1, 1, 10, 8), torch.zeros(1, 1, 1000, 8)]
    masks = [torch.full((x.shape[2],), -1e9) for x in value]
    indices = [torch.arange(3, dtype=torch.int32)[None, None, None], torch.arange(1000)[None, None, None]]
    out = tatten.bifurcated_attention(query, value, value, attn_masks=masks, indices=indices)
    torch.testing.assert_close(out, torch.full_like(out, 3 / 1003))


@pytest.mark.parametrize("latents", [False, True])
def test_a_query_without_live_picks_attends_to_all_keys_under_rest_bias(latents: bool) -> None:
    """A mask of `finfo.min` excludes a key only beside others: a row of nothing else is the mean of all values."""
    query, (key, value) = torch.randn(2, 4, 2, 8), (x.float() for x in pair(2, 1, 50))
    value = key if latents else value
    indices = distinct(2, 1, 2, n=50, k=6)
    mask = torch.zeros(2, 1, 2, 50)
    mask[0, 0, 1], mask[1, 0, 0, :40] = MIN, MIN
    dense = torch.full((2, 1, 2, 50), MIN).scatter(3, indices.long(), mask.gather(3, indices.long()))
    want = torch.nn.functional.scaled_dot_product_attention(query, key, value, dense, enable_gqa=True)
    options: dict[str, Any] = {"attn_mask": mask, "indices": indices, "rest_bias": MIN}
    if latents:
        out = tatten.latent_attention(query, None, key, None, scale=8**-0.5, **options)
    else:
        out = tatten.decode_attention(query, key, value, **options)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[0, 0, 1], value[0, 0].mean(dim=0))


def test_each_sequence_has_the_same_bits_in_every_batch() -> None:
    query, key, value = torch.randn(5, 4, 2, 24), torch.randn(5, 2, 900, 24), torch.randn(5, 2, 900, 23)
    indices, threads = distinct(5, 1, 2, n=900, k=700), torch.get_num_threads()
    sinks, mask = torch.randn(4), torch.rand(5, 1, 1, 900) < 0.8
    prefix = torch.randn(1, 2, 40, 24), torch.randn(1, 2, 40, 23)
    among = distinct(5, 2, 2, n=40, k=9)

    def states(at: slice) -> list[Tensor]:
        options = {"sinks": sinks, "batch_invariant": True, "return_lse": True}
        own = tatten.decode_attention(query[at], key[at], value[at], attn_mask=mask[at], indices=indices[at], **options)
        keys, values = [prefix[0], key[at]], [prefix[1], value[at]]
        both = tatten.bifurcated_attention(query[at], keys, values, indices=[among[at], indices[at]], **options)
        latents = tatten.latent_attention(query[at], None, key[at, :1], None, scale=0.2, indices=indices[at], **options)
        return [*own, *both, *latents]

    try:
        torch.set_num_threads(1)
        want = states(slice(0, 5))
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            for b in range(5):
                for got, x in zip(states(slice(b, b + 1)), want, strict=True):
                    assert torch.equal(got[0], x[b])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_without_duplicates_keeps_the_first(dtype: torch.dtype) -> None:
    indices = torch.tensor([[3, 1, 3, -1, 7, 8, 1], [0, 0, 0, 0, 9, -5, 7]], dtype=dtype)
    want = torch.tensor([[3, 1, -1, -1, 7, -1, -1], [0, -1, -1, -1, -1, -1, 7]], dtype=dtype)
    assert torch.equal(without_duplicates(indices, 8), want)
    assert torch.equal(torch.compile(without_duplicates, backend="aot_eager", fullgraph=True)(indices, 8), want)


def test_opcheck() -> None:
    inputs = Case(q_len=2, kv_len=30).inputs(poison=False)
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    picks = {"indices": distinct(2, 1, 2, n=15, k=5), "index_block": 2}
    ops = torch.ops.tatten
    opcheck(ops.decode_attention.default, (query, key, value), picks | {"rest_bias": MIN})
    latent = key[:, :1]
    opcheck(ops.latent_attention.default, (query, None, latent, None), picks | {"scale": 0.3, "rest_bias": MIN})
    segments = [key, key], [value, value], [None, None], [None, None]
    own = picks | {"indices": [None, picks["indices"]]}
    opcheck(ops.bifurcated_attention.default, (query, *segments), own)


def test_functions_compile_in_one_graph() -> None:
    query = torch.randn(2, 4, 2, 8)

    def attend(key: Tensor, value: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
        return (
            tatten.decode_attention(query, key, value, indices=indices),
            tatten.latent_attention(query, None, key[:, :1], None, scale=0.3, indices=indices[:, :1]),
            tatten.bifurcated_attention(query, [key, key], [value, value], indices=[indices, None]),
        )

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for length, picks in ((30, 12), (57, 9)):
        inputs = *torch.randn(2, 2, 2, length, 8).unbind(), torch.randint(-2, length + 5, (2, 2, 2, picks))
        assert all(map(torch.equal, compiled(*inputs), attend(*inputs)))


class Attend(torch.nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
        return (
            *tatten.decode_attention(query, key, value, attn_mask=mask, indices=indices, return_lse=True),
            *tatten.latent_attention(
                query, None, key[:, :1], None, scale=0.3, attn_mask=mask, indices=indices[:, :1], return_lse=True
            ),
        )


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_exported_program_needs_no_tatten(compiled: bool) -> None:
    query, key, value = torch.randn(2, 4, 2, 8), torch.randn(2, 2, 40, 8), torch.randn(2, 2, 40, 8)
    mask, indices = torch.rand(2, 1, 1, 40) < 0.5, torch.randint(-3, 50, (2, 2, 2, 9))
    args = query, key, value, mask, indices
    with torch.no_grad():
        program = torch.export.export(Attend(), args).run_decompositions(tatten.decompositions())
    assert not [node.target for node in program.graph.nodes if "tatten" in str(node.target)]
    run = torch.compile(program.module()) if compiled else program.module()
    other = torch.rand(2, 1, 1, 40) < 0.5, torch.randint(-3, 50, (2, 2, 2, 9))
    with torch.no_grad():
        for got, want in zip(run(*args[:3], *other), Attend()(*args[:3], *other), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
