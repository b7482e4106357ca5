"""Mixed batches on a GPU: random calls, one captured graph for any lengths, and offsets beyond 32 bits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from fuzz import settings
from hypothesis import given
from hypothesis import strategies as st
from mixed_calls import MixedBatch, batch_for_hopper, draw_mixed_batch
from poison import fresh_memory_is_poison
from torch import Tensor

import tatten
from tatten.ops.cuda.ragged import _takes_pages_kernel, plan_ragged
from tatten.ops.mixed_batch import MixedCall
from tatten.ops.page_runs import OWN
from tatten.ops.reference import paged_attention_reference

pytestmark = pytest.mark.gpu


def on_gpu(inputs: dict[str, Any]) -> dict[str, Any]:
    """Copies with the same strides."""

    def moved(x: Tensor) -> Tensor:
        reach = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        flat = x.as_strided((reach,), (1,), x.storage_offset()).cuda()
        return flat.as_strided(x.shape, x.stride())

    return {name: moved(x) if isinstance(x, Tensor) else x for name, x in inputs.items()}


@settings(80)
@given(st.composite(lambda draw: draw_mixed_batch(lambda options: draw(st.sampled_from(options))))(), st.booleans())
def test_random_calls(drawn: MixedBatch, invariant: bool) -> None:
    inputs, dense = drawn.inputs()
    invariant = invariant and drawn.dtype != torch.float64
    with fresh_memory_is_poison():
        out, lse = tatten.paged_attention(**on_gpu(inputs), batch_invariant=invariant, return_lse=True)
    drawn.check(out, lse, dense | {"query": dense["query"].cuda()}, parts=300)


@pytest.mark.parametrize("seed", range(4))
def test_random_calls_of_the_pages_kernel(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        drawn, programs = batch_for_hopper(rng, (64, 128)), rng.choice((None, 1, 7, 300))
        inputs, dense = drawn.inputs()
        call = MixedCall(**on_gpu(inputs))
        assert _takes_pages_kernel(call) == (torch.cuda.get_device_capability()[0] == 9)
        with fresh_memory_is_poison():
            out, lse = plan_ragged(call, programs=programs)(call)
        drawn.check(out, lse, dense | {"query": dense["query"].cuda()}, parts=300)


def reference(inputs: dict[str, Any], **variant: Any) -> tuple[Tensor, Tensor]:
    """`paged_attention_reference` of a few tokens at a time: it copies the keys of each."""
    starts, table, lens = (inputs[x] for x in ("cu_seqlens_q", "block_table", "kv_lens"))
    outs, lses, n_tokens, step = [], [], len(inputs["query"]), 32
    for first in range(0, n_tokens, step):
        stop = min(first + step, n_tokens)
        # The last of these queries sees as many keys less as there are queries behind it.
        cut = starts.clamp(first, stop)
        behind = starts[1:] - torch.maximum(cut[1:], starts[:-1])
        own = {"cu_seqlens_q": cut - first, "kv_lens": (lens - behind).clamp(min=0), "block_table": table}
        out, lse = paged_attention_reference(**inputs | own | {"query": inputs["query"][first:stop]}, **variant)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def pages(n_tokens: int, batch: int, page: int, columns: int, n_pages: int, dim: int = 128) -> dict[str, Any]:
    pool = torch.randn(n_pages, 2, page, 8, dim, device="cuda", dtype=torch.bfloat16)
    return {
        "query": torch.randn(n_tokens, 32, dim, device="cuda", dtype=torch.bfloat16),
        "key": pool[:, 0],
        "value": pool[:, 1],
        "block_table": torch.zeros(batch, columns, device="cuda", dtype=torch.int32),
        "cu_seqlens_q": torch.zeros(batch + 1, device="cuda", dtype=torch.int32),
        "kv_lens": torch.zeros(batch, device="cuda", dtype=torch.int32),
    }


def refill(inputs: dict[str, Any], generator: torch.Generator) -> None:
    """Other lengths and tables, in place: decode steps, chunks, sequences without queries, padding."""
    n_tokens, (batch, columns) = len(inputs["query"]), inputs["block_table"].shape
    page, n_pages = inputs["key"].shape[1], inputs["key"].shape[0]
    choices = torch.tensor([0, 1, 1, 1, 1, 5, 40, 300])
    q_lens = choices[torch.randint(len(choices), (batch,), generator=generator)]
    starts = torch.cat((torch.zeros(1), q_lens.cumsum(0))).clamp(max=n_tokens).int()
    lens = torch.randint(0, columns * page + 1, (batch,), generator=generator)
    table = torch.randint(n_pages, (batch, columns), generator=generator)
    table[torch.arange(columns) * page >= lens[:, None]] = -1
    for name, x in (("cu_seqlens_q", starts), ("kv_lens", lens), ("block_table", table)):
        inputs[name].copy_(x)


@pytest.mark.parametrize("variant", [{}, {"window": 200}, {"batch_invariant": True}])
@pytest.mark.parametrize("page", [1, 16, 128])
def test_one_captured_graph_serves_any_lengths(page: int, variant: dict[str, Any]) -> None:
    inputs, generator = pages(700, 12, page, 1024 // page, 3000 // page), torch.Generator().manual_seed(page)
    refill(inputs, generator)
    tatten.paged_attention(**inputs, **variant)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = tatten.paged_attention(**inputs, **variant, return_lse=True)
    for _ in range(40):
        refill(inputs, generator)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        want, want_lse = reference(inputs, **variant)
        torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)


def share(inputs: dict[str, Any], generator: torch.Generator) -> None:
    """Let sequences have the first pages of others, in place. Some of these are -1, or beyond a length."""
    table, lens = inputs["block_table"].cpu(), inputs["kv_lens"].cpu()
    batch, columns = table.shape
    for b in range(1, batch):
        other = int(torch.randint(b, (), generator=generator))
        stop = int(torch.randint(columns + 1, (), generator=generator))
        if torch.rand((), generator=generator) < 0.7:
            table[b, :stop] = table[other, :stop]
            lens[b] = max(lens[b], min(lens[other], stop * inputs["key"].shape[1]))
    inputs["block_table"].copy_(table)
    inputs["kv_lens"].copy_(lens)


def attend_sharing(inputs: dict[str, Any], **variant: Any) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The state with the pages that sequences share, and the first key of each sequence's own part."""
    n_pages, page = inputs["key"].shape[:2]
    shared = tatten.shared_pages(inputs["block_table"], inputs["kv_lens"], n_pages=n_pages, page_size=page)
    return tatten.paged_attention(**inputs, **variant, shared_pages=shared, return_lse=True), shared.data[OWN]


@pytest.mark.parametrize("variant", [{}, {"softcap": 20.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("page, dim", [(1, 128), (16, 128), (16, 64), (128, 128)])
def test_one_captured_graph_serves_any_shared_pages(page: int, dim: int, variant: dict[str, Any]) -> None:
    inputs, generator = pages(700, 12, page, 1024 // page, 12_000 // page, dim), torch.Generator().manual_seed(page)
    if "sinks" in variant:
        variant = {"sinks": torch.randn(32, device="cuda", dtype=torch.bfloat16)}
    refill(inputs, generator)
    attend_sharing(inputs, **variant)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (out, lse), own = attend_sharing(inputs, **variant)
    sharing = 0
    for i in range(40):
        refill(inputs, generator)
        if i % 5:
            share(inputs, generator)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        want, want_lse = reference(inputs, **variant)
        torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)
        sharing += int((own[:12][inputs["cu_seqlens_q"].diff() == 1] > 0).any())
    assert sharing > 10


@pytest.mark.parametrize("kind", ["head", "key"])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_shared_pages_of_keys_in_8_bits(dtype: str, kind: str) -> None:
    inputs, generator = pages(700, 12, 16, 64, 750), torch.Generator().manual_seed(0)
    for name in ("key", "value"):
        inputs[name] = (20 * inputs[name]).clamp(-99, 99).round().to(getattr(torch, dtype))
        shape = inputs[name].shape[:3] if kind == "key" else (8,)
        inputs[f"{name}_scale"] = torch.rand(shape, device="cuda") / 20
    for _ in range(5):
        refill(inputs, generator)
        share(inputs, generator)
        (out, lse), own = attend_sharing(inputs)
        assert own.any()
        want, want_lse = reference(inputs)
        torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("heads", [8, 32])
@pytest.mark.parametrize("programs", [None, 1, 7, 300])
def test_shared_pages_in_any_number_of_programs(programs: int | None, heads: int) -> None:
    inputs, generator = pages(300, 40, 16, 64, 900), torch.Generator().manual_seed(1)
    inputs["query"] = inputs["query"][:, :heads].contiguous()
    for _ in range(10):
        refill(inputs, generator)
        share(inputs, generator)
        given = {name: inputs[name] for name in ("block_table", "kv_lens")}
        shared = tatten.shared_pages(**given, n_pages=900, page_size=16)
        call = MixedCall(**inputs, shared_pages=shared.data)
        with fresh_memory_is_poison():
            out, lse = plan_ragged(call, programs=programs)(call)
        want, want_lse = reference(inputs)
        torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)


def test_offsets_beyond_32_bits() -> None:
    inputs = pages(301, 2, 16, 64, 1)
    pool = torch.empty(150_000, 2, 16, 8, 128, device="cuda", dtype=torch.bfloat16)  # 4.9e9 numbers
    pool[-128:] = torch.randn(128, 2, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
    inputs |= {"key": pool[:, 0], "value": pool[:, 1]}
    inputs["block_table"] = 149_999 - torch.arange(2 * 64, device="cuda", dtype=torch.int32).view(2, 64)
    inputs["cu_seqlens_q"].copy_(torch.tensor([0, 1, 301]))
    inputs["kv_lens"].copy_(torch.tensor([1024, 1000]))
    out, lse = tatten.paged_attention(**inputs, return_lse=True)
    small = {name: inputs[name][-128:] for name in ("key", "value")}
    small["block_table"] = inputs["block_table"] - (150_000 - 128)
    want, want_lse = reference(inputs | small)
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)


def test_compiled_with_inductor() -> None:
    inputs = pages(700, 12, 16, 64, 300)
    refill(inputs, torch.Generator().manual_seed(0))
    compiled = torch.compile(tatten.paged_attention, backend="tatten", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(**inputs), tatten.paged_attention(**inputs))


def test_shared_pages_compiled_with_inductor() -> None:
    inputs, generator = pages(700, 12, 16, 64, 750), torch.Generator().manual_seed(0)
    refill(inputs, generator)
    share(inputs, generator)
    compiled = torch.compile(attend_sharing, backend="tatten", fullgraph=True)
    with torch.no_grad():
        (got, _), (want, own) = compiled(inputs), attend_sharing(inputs)
    assert own.any()
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
