"""`batch_invariant=True` in the Triton interpreter: chunks that a sequence's own length and mask decide."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import Case, assert_state
from interpreted import multiply_in_float64
from poison import fresh_memory_is_poison
from provider_calls import provider_of_op
from random_batches import Sequences, SharedSequences, with_latents
from slow import slow_after
from torch import Tensor

import tatten
from tatten.ops.cpu.rows import row_groups
from tatten.ops.kernel_signatures import bifurcated_call, decode_call, latent_call
from tatten.ops.masks import block_list, mask_of_rows

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs where no GPU is")

SMALL = {"head_dim": 16, "longest": 700, "q_heads": 2, "kv_heads": 1}
CALLS = [
    Sequences(**SMALL),
    Sequences(**SMALL, q_len=3, mask="keys"),
    Sequences(**SMALL, mask="holes", dtype=torch.bfloat16),
    Sequences(**SMALL, q_len=3, dtype=torch.float16, extras={"window": 400, "sinks": torch.tensor([0.5, -1.0])}),
    Sequences(**SMALL, mask="bias"),
]


def attend(inputs: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    from tatten.ops.cuda.decode import plan_attention

    call = decode_call(**inputs, batch_invariant=True)
    plan = plan_attention(call, **options)
    with fresh_memory_is_poison():
        return plan(call)


def assert_same_bits(
    attend: Callable[..., tuple[Tensor, Tensor]], call: Sequences | SharedSequences, batches: int
) -> None:
    want = None
    for alone, together, at in call.batches(batches, most=5):
        want = want or attend(alone)
        for got, x in zip(attend(together), want, strict=True):
            assert torch.equal(got[at], x[0])


@pytest.mark.drawn(1, "bits in every batch")
@pytest.mark.parametrize("call", slow_after(1, CALLS), ids=str)
def test_a_sequence_has_the_same_bits_in_every_batch(call: Sequences) -> None:
    assert_same_bits(attend, call, 20)


def attend_latents(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    from tatten.ops.cuda.latent import plan_latents

    given = with_latents(call, 16)
    tensors = {name: given.get(name) for name in ("query", "query_rope", "latent", "key_rope", "attn_mask", "kv_lens")}
    variant = {"window": call.get("window"), "sinks": call.get("sinks")}
    described = latent_call(**tensors, scale=0.3, **variant, out_dtype=torch.float32, batch_invariant=True)
    plan = plan_latents(described)
    with fresh_memory_is_poison():
        return plan(described)


LATENTS = [
    Sequences(q_heads=2, kv_heads=1, q_len=3, head_dim=24, longest=700, mask="holes", dtype=torch.bfloat16),
    Sequences(q_heads=20, kv_heads=1, head_dim=24, longest=700),
    Sequences(q_heads=3, kv_heads=1, head_dim=24, longest=700, mask="bias", extras={"sinks": torch.ones(3)}),
]


@pytest.mark.drawn(1, "bits in every batch")
@pytest.mark.parametrize("call", slow_after(1, LATENTS), ids=str)
def test_so_has_one_that_attends_to_latents(call: Sequences) -> None:
    assert_same_bits(attend_latents, call, 8)


def attend_segments(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """As the op on CUDA does."""
    from tatten.ops.cuda.segments import plan_segments

    call = {"rows": None, "sinks": None, "softcap": None} | call
    query, keys, values, masks = (call[name] for name in ("query", "keys", "values", "attn_masks"))
    lists, groups = [None, None], [None, None]
    rows, shared, mask = call["rows"] and call["rows"][0], keys[0], masks[0]
    if rows is not None:
        queries = query.shape[1] // shared.shape[1] * query.shape[2]
        groups[0] = row_groups(rows, shared.shape[0], queries)
    if mask is not None:
        of_rows = mask if rows is None else mask_of_rows(mask, shared.shape[0], rows)
        lists[0] = block_list(of_rows, shared.shape[0], every_block=True)
    variant = {"softcap": call["softcap"], "sinks": call["sinks"], "batch_invariant": True}
    described = bifurcated_call(query, keys, values, masks, lists, row_groups=groups, **variant)
    plan = plan_segments(described)
    with fresh_memory_is_poison():
        return plan(described)


@pytest.fixture(autouse=True)
def _products_of_any_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_in_float64(monkeypatch)


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short sequences have several."""
    from tatten.ops.cuda import decode_grid

    monkeypatch.setattr(decode_grid, "LEAST_CHUNK", 512)


TINY = {"q_heads": 2, "kv_heads": 1, "longest": 200}
SHARED = [
    SharedSequences(Sequences(**TINY, mask="keys"), shared=1100),
    SharedSequences(Sequences(**TINY, mask="holes", q_len=2, dtype=torch.bfloat16), shared=1100, rows=True, holes=True),
    SharedSequences(Sequences(**TINY, mask="causal", q_len=3), shared=1100, holes=True),
    SharedSequences(Sequences(**TINY, mask="bias", extras={"softcap": 3.0}), shared=700, rows=True),
    SharedSequences(Sequences(**TINY, mask="keys", extras={"sinks": torch.tensor([0.5, -1.0])}), shared=60, rows=True),
    SharedSequences(Sequences(**TINY, mask="keys"), shared=17000, rows=True),  # more than 32 times 512
]


@pytest.mark.drawn(1, "bits in every batch")
@pytest.mark.parametrize("call", slow_after(2, SHARED), ids=str)
def test_so_has_one_that_shares_keys(call: SharedSequences) -> None:
    assert_same_bits(attend_segments, call, 8 if call.shared < 2000 else 2)
    for _, together, _ in call.batches(1, most=5):
        out, lse = attend_segments(together)
        want = tatten.bifurcated_attention(**together, return_lse=True)
        tolerance = 0.02 if call.own.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close((out, lse), want, atol=tolerance, rtol=tolerance)


def test_latents_have_tiles_for_their_widths_alone() -> None:
    """And never the kernel for Hopper, which cuts by the batch."""
    from tatten.ops.cuda.decode import plan_attention
    from tatten.ops.cuda.latent import plan_latents

    found = set()
    for batch, kv_len in (1, 300), (1, 100_000), (64, 300), (64, 100_000):
        query, latent = torch.empty(batch, 16, 1, 512, device="meta"), torch.empty(batch, 1, kv_len, 512, device="meta")
        query, latent = query.bfloat16(), latent.bfloat16()
        call = latent_call(query, None, latent, None, scale=0.1, batch_invariant=True)
        space = plan_attention(call).segment.tile_space
        found.add((space.block_m, space.block_n, space.chunk))
    assert found == {(16, 64, 8)}
    query, latent = (torch.empty(2, n, 1, 16, dtype=torch.float64) for n in (4, 1))
    with pytest.raises(NotImplementedError, match="`query` must not be float64 with `batch_invariant` on CUDA"):
        plan_latents(latent_call(query, None, latent, None, scale=0.1, batch_invariant=True))


@pytest.mark.drawn(1, "bits in every batch")
@pytest.mark.parametrize("programs", [1, 3, 50])
def test_the_bits_do_not_depend_on_the_programs(programs: int) -> None:
    inputs = Case(batch=3, kv_len=700, head_dim=16, lens=True).inputs()
    for got, want in zip(attend(inputs, programs=programs), attend(inputs), strict=True):
        assert torch.equal(got, want)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "case",
    slow_after(
        3,
        [
            Case(batch=3, kv_len=600, head_dim=16, lens=True, sinks=True),
            Case(kv_len=600, head_dim=16, q_len=3, mask="holes"),
            Case(kv_len=600, head_dim=24, value_dim=40, dtype=torch.float16, window=300, lens=True, softcap=2.0),
            Case(kv_len=600, head_dim=16, mask="additive", dtype=torch.bfloat16),
            Case(kv_len=600, head_dim=16, mask="nearly_full", q_len=2, lens=True),
            Case(kv_len=600, head_dim=16, narrow="per_key", dtype=torch.float16),
            Case(kv_len=0, head_dim=16, lens=True, sinks=True),
            Case(kv_len=1, head_dim=16),
        ],
    ),
    ids=str,
)
def test_against_float64(case: Case) -> None:
    inputs = case.inputs()
    assert_state(*attend(inputs), inputs)


@pytest.mark.drawn(1, "bits in every batch")
def test_a_long_sequence_has_larger_chunks_but_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """5,000 keys are 40 times 128, more than 32 chunks: they make 20 chunks of 256. 300 keys make 3 of 128."""
    from tatten.ops.cuda import decode_grid
    from tatten.ops.cuda.decode import plan_attention

    monkeypatch.setattr(decode_grid, "LEAST_CHUNK", 128)
    inputs = Case(batch=2, q_heads=1, kv_heads=1, kv_len=5000, head_dim=16).inputs(poison=False)
    inputs["kv_lens"] = torch.tensor([5000, 300])
    call = decode_call(**inputs, batch_invariant=True)
    plan = plan_attention(call)
    with fresh_memory_is_poison():
        partials = plan.segment(call, call.segments[0])
        state = plan.combine(partials)
    assert (~partials.partial_lse[:, 0].isnan()).sum() == 20 + 3
    assert_state(state.out, state.lse, inputs)


@pytest.mark.parametrize("mask", [False, True])
def test_no_option_of_a_launch_depends_on_the_batch(mask: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few sequences leave each program an SM to itself, which by default has it load a tile more ahead."""
    from tatten.ops.cuda import decode_grid
    from tatten.ops.cuda.decode import plan_attention

    monkeypatch.setattr(decode_grid, "multiprocessors", lambda device: 132)

    def options(batch: int, **invariant: bool) -> dict[str, object]:
        query, key = (torch.empty(batch, 8, n, 128, dtype=torch.bfloat16, device="meta") for n in (1, 256))
        attn_mask = torch.empty(batch, 1, 1, 256, dtype=torch.bool, device="meta") if mask else None
        return plan_attention(decode_call(query, key, key, attn_mask, **invariant)).segment.launch.options

    assert options(1, batch_invariant=True) == options(64, batch_invariant=True)
    assert not mask or options(8)["num_stages"] > options(64)["num_stages"]


def test_takes_its_own_kernel() -> None:
    tensors = [torch.empty(2, n, length, 64, dtype=torch.bfloat16, device="meta") for n, length in [(8, 1), (8, 512)]]
    query, key = tensors
    assert provider_of_op(query, key, key, batch_invariant=True) == "triton"
    assert provider_of_op(query, key, key, batch_invariant=True, provider="triton") == "triton"
    with pytest.raises(ValueError, match="`provider` must be 'auto' or 'triton' with `batch_invariant`, got 'cudnn'"):
        provider_of_op(query, key, key, batch_invariant=True, provider="cudnn")
    with pytest.raises(NotImplementedError, match="it takes no float64"):
        provider_of_op(*(x.double() for x in (query, key, key)), batch_invariant=True)
