"""`batch_invariant=True` on a CPU: a sequence has the same bits in every batch, whatever the threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_cases import Case, assert_state
from random_batches import Sequences, SharedSequences, with_latents
from slow import slow_after

import tatten

CALLS = [
    Sequences(),
    Sequences(q_heads=8, kv_heads=1, q_len=3, head_dim=24),
    Sequences(q_heads=3, kv_heads=3, mask="keys", dtype=torch.bfloat16, head_dim=64),
    Sequences(mask="causal", q_len=3, dtype=torch.float16),
    Sequences(mask="holes", head_dim=23, extras={"sinks": torch.tensor([0.5, -1.0, 2.0, float("-inf")])}),
    Sequences(mask="bias", q_len=3, q_heads=8),
    Sequences(dtype=torch.float64, q_heads=1, kv_heads=1, extras={"window": 600}),
]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def attend(**call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return tatten.decode_attention(**call, batch_invariant=True, return_lse=True)


def latents(**call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return tatten.latent_attention(**call, batch_invariant=True, return_lse=True)


@pytest.mark.drawn(1, "bits in every batch")
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_a_sequence_has_the_same_bits_in_every_batch(call: Sequences) -> None:
    want = None
    for alone, together, at in call.batches(20):
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            want = want or attend(**alone)
            for got, x in zip(attend(**together), want, strict=True):
                assert torch.equal(got[at], x[0])


LATENTS = [
    (Sequences(q_heads=6, kv_heads=1, q_len=2, head_dim=40, mask="holes", dtype=torch.bfloat16), 32),
    (Sequences(q_heads=70, kv_heads=1, q_len=3, head_dim=23, extras={"window": 600}), 23),
    (Sequences(q_heads=1, kv_heads=1, head_dim=40, mask="bias", dtype=torch.float64), 24),
    (Sequences(q_heads=3, kv_heads=1, head_dim=30, mask="bias", extras={"sinks": torch.tensor([0.5, -1.0, 2.0])}), 24),
]


@pytest.mark.drawn(1, "bits in every batch")
@pytest.mark.parametrize("call, rank", slow_after(1, LATENTS), ids=str)
def test_so_has_one_that_attends_to_latents(call: Sequences, rank: int) -> None:
    want = None
    for alone, together, at in call.batches(20):
        together = with_latents(together, rank)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            want = want or latents(**with_latents(alone, rank))
            for got, x in zip(latents(**together), want, strict=True):
                assert torch.equal(got[at], x[0])
    exact = {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in together.items()
    }
    eps = 4 * torch.finfo(call.dtype).eps
    for x, y in zip(latents(**together), tatten.latent_attention(**exact, return_lse=True), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=eps, atol=max(eps, 1e-5))


def bifurcated(**call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return tatten.bifurcated_attention(**call, batch_invariant=True, return_lse=True)


SHARED = [
    SharedSequences(Sequences(mask="keys", longest=300)),
    SharedSequences(Sequences(mask="holes", q_len=2, longest=300, dtype=torch.bfloat16), rows=True, holes=True),
    SharedSequences(Sequences(mask="causal", q_len=3, longest=300, extras={"window": 500}), holes=True),
    SharedSequences(Sequences(mask="bias", longest=300, q_heads=1, kv_heads=1, dtype=torch.float64), rows=True),
    SharedSequences(Sequences(mask="bias", longest=300, extras={"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])})),
]


@pytest.mark.drawn(1, "bits in every batch")
@pytest.mark.parametrize("call", slow_after(2, SHARED), ids=str)
def test_so_has_one_that_shares_keys(call: SharedSequences) -> None:
    want = None
    for alone, together, at in call.batches(20, most=8):
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            want = want or bifurcated(**alone)
            for got, x in zip(bifurcated(**together), want, strict=True):
                assert torch.equal(got[at], x[0])


@pytest.mark.parametrize("q_heads, q_len", [(3, 16), (8, 5)])
def test_states_of_segments_are_combined_alike_however_their_sequences_were_computed(q_heads: int, q_len: int) -> None:
    """PyTorch's kernel leaves the queries of a head apart in memory; where spans differ there is a call for each."""
    torch.manual_seed(0)
    mask = torch.arange(40) < torch.tensor([40, 20])[:, None, None, None]
    for _ in range(10):
        query, shared, own = (torch.randn(b, q_heads, n, 64) for b, n in ((2, q_len), (1, 60), (2, 40)))
        together = bifurcated(query=query, keys=[shared, own], values=[shared, own], attn_masks=[None, mask])
        keys = [shared, own[1:]]
        alone = bifurcated(query=query[1:], keys=keys, values=keys, attn_masks=[None, mask[1:]])
        for got, x in zip(together, alone, strict=True):
            assert torch.equal(got[1], x[0])


def test_it_is_not_so_by_default() -> None:
    """The batches drawn here would show it if nothing were done."""
    torch.set_num_threads(2)
    drawn = list(Sequences(q_heads=1, kv_heads=1).batches(20))
    equal = [
        torch.equal(tatten.decode_attention(**together)[at], tatten.decode_attention(**alone)[0])
        for alone, together, at in drawn
    ]
    assert not all(equal)


@pytest.mark.parametrize(
    "case",
    [
        Case(batch=3, kv_len=700, lens=True, sinks=True),
        Case(kv_len=700, head_dim=23, value_dim=40, q_len=3, mask="holes"),
        Case(kv_len=600, dtype=torch.bfloat16, mask="additive", window=300),
        Case(kv_len=100, narrow="per_key", mask="nearly_full", dtype=torch.float16),
        Case(batch=1, kv_heads=1, dtype=torch.float64),
        Case(kv_len=700, mask="finfo_min"),
        Case(kv_len=0, lens=True),
        Case(mask="empty_rows", q_len=2),
    ],
    ids=str,
)
def test_against_float64(case: Case) -> None:
    inputs = case.inputs(poison=case.mask != "finfo_min")
    assert_state(*attend(**inputs), inputs)


def test_what_cannot_be_invariant_is_an_error() -> None:
    query, key, value = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 30, 16), torch.randn(2, 2, 30, 16)
    with pytest.raises(NotImplementedError, match=r"`softcap` must be None with `batch_invariant` on a CPU, got 2.0"):
        attend(query=query, key=key, value=value, softcap=2.0)
    with pytest.raises(
        ValueError, match="`latent` must have `query`'s batch, 2, with `batch_invariant`, got 1; expand"
    ):
        latents(query=query, query_rope=None, latent=key[:1, :1], key_rope=None, scale=1.0)


@pytest.mark.parametrize(
    "shape, rows, came", [(1, None, "a batch of 1"), (2, [None, torch.tensor([1, 0])], "a batch of 2 and `rows`")]
)
def test_the_last_segment_must_be_each_sequences_own(shape: int, rows: list | None, came: str) -> None:
    query, (prefix, own) = torch.randn(2, 4, 1, 16), (torch.randn(n, 2, 30, 16) for n in (1, shape))
    with pytest.raises(
        ValueError, match=rf"`keys\[1\]`, the last segment, must be each .*: a batch of 2 without `rows`, got {came}"
    ):
        bifurcated(query=query, keys=[prefix, own], values=[prefix, own], rows=rows)


def test_it_has_no_decomposition() -> None:
    class Step(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return tatten.decode_attention(*tensors, batch_invariant=True)

    given = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 30, 16), torch.randn(2, 2, 30, 16)
    with torch.no_grad():
        program = torch.export.export(Step(), given)
    with pytest.raises(NotImplementedError, match="`batch_invariant` must be False where"):
        program.run_decompositions(tatten.decompositions())
