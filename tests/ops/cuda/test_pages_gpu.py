"""On a GPU: random calls with a block table, a pool beyond 2^31 numbers, bits that other sequences leave alone, and
shared pages."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from fuzz import settings
from hypothesis import given
from hypothesis import strategies as st
from op_bounds import assert_within_bound
from paged_calls import PagedCall, draw_paged_call
from paged_latents import PagedLatentCall, draw_paged_latents
from poison import fresh_memory_is_poison
from shared_tables import drawn, inputs_of, tree
from torch import Tensor

import tatten
from tatten.ops.page_runs import OWN, shared_pages_reference
from tatten.ops.reference import decode_attention_reference, latent_attention_reference

pytestmark = pytest.mark.gpu


def on_gpu(inputs: dict[str, Any]) -> dict[str, Any]:
    """Copies with the same strides."""

    def moved(x: Tensor) -> Tensor:
        reach = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        flat = x.as_strided((reach,), (1,), x.storage_offset()).cuda()
        return flat.as_strided(x.shape, x.stride())

    return {name: moved(x) if isinstance(x, Tensor) else x for name, x in inputs.items()}


@settings(60)
@given(st.composite(lambda draw: draw_paged_call(lambda options: draw(st.sampled_from(options))))())
def test_random_calls(drawn: PagedCall) -> None:
    inputs, dense = drawn.inputs()
    with fresh_memory_is_poison():
        out, lse = tatten.decode_attention(**on_gpu(inputs), return_lse=True)
    assert_within_bound(out, lse, dense | {"query": dense["query"].cuda()}, drawn.call.most_parts)


@settings(60)
@given(st.composite(lambda draw: draw_paged_latents(lambda options: draw(st.sampled_from(options))))())
def test_random_calls_over_latents(drawn: PagedLatentCall) -> None:
    inputs, expanded = drawn.inputs()
    with fresh_memory_is_poison():
        out, lse = drawn.run(on_gpu(inputs))
    expanded |= {"query": expanded["query"].cuda()}
    parts = drawn.paged.call.most_parts
    assert_within_bound(out, lse, expanded, parts, out_dtype=drawn.out_dtype)


def random_latents(batch: int, heads: int, page: int, columns: int, n_pages: int) -> dict[str, Any]:
    """Latents and rope are columns of one pool, as FlashMLA has them."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    latent, key_rope = randn(n_pages, page, 1, 576).split((512, 64), dim=3)
    return {
        "query": randn(batch, heads, 1, 512),
        "query_rope": randn(batch, heads, 1, 64),
        "latent": latent,
        "key_rope": key_rope,
        "block_table": torch.randperm(n_pages, device="cuda")[: batch * columns].view(batch, columns).int(),
        "kv_lens": torch.randint(0, columns * page + 1, (batch,), device="cuda"),
        "scale": 0.05,
    }


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("page", [1, 16, 64, 256])
def test_one_graph_over_latents_serves_any_table(page: int, heads: int) -> None:
    columns, n_pages = 2048 // page, 5 * 2048 // page
    inputs = random_latents(4, heads, page, columns, n_pages)
    tatten.latent_attention(**inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = tatten.latent_attention(**inputs, out_dtype=torch.float32, return_lse=True)
    for _ in range(5):
        inputs["block_table"].copy_(torch.randperm(n_pages, device="cuda")[: 4 * columns].view(4, columns))
        inputs["kv_lens"].random_(0, columns * page + 1)
        graph.replay()
        want, want_lse = latent_attention_reference(**inputs)
        torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("page", [1, 64])
def test_bits_of_latents_do_not_depend_on_the_others(page: int) -> None:
    inputs = random_latents(8, 16, page, 4096 // page, 10 * 4096 // page)
    together = tatten.latent_attention(**inputs, batch_invariant=True, return_lse=True)
    for b in range(8):
        own = {name: inputs[name][b : b + 1] for name in ("query", "query_rope", "block_table", "kv_lens")}
        alone = tatten.latent_attention(**inputs | own, batch_invariant=True, return_lse=True)
        assert all(torch.equal(x[b : b + 1], y) for x, y in zip(together, alone, strict=True))


def random_pages(batch: int, page: int, columns: int, n_pages: int) -> dict[str, Any]:
    pool = torch.randn(n_pages, 2, page, 8, 128, device="cuda", dtype=torch.bfloat16)
    return {
        "query": torch.randn(batch, 32, 1, 128, device="cuda", dtype=torch.bfloat16),
        "key": pool[:, 0],
        "value": pool[:, 1],
        "block_table": torch.randperm(n_pages, device="cuda")[: batch * columns].view(batch, columns).int(),
        "kv_lens": torch.randint(0, columns * page + 1, (batch,), device="cuda"),
    }


def test_offsets_beyond_32_bits() -> None:
    inputs = random_pages(4, 16, 64, 256)
    pool = torch.empty(150_000, 2, 16, 8, 128, device="cuda", dtype=torch.bfloat16)  # 4.9e9 numbers
    assert pool.numel() > 1 << 32
    table = 149_999 - torch.arange(4 * 64, device="cuda", dtype=torch.int32).view(4, 64)
    pool[-256:] = torch.randn(256, 2, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
    inputs |= {"key": pool[:, 0], "value": pool[:, 1], "block_table": table}
    inputs["kv_lens"] = torch.tensor([1024, 1000, 1, 0], device="cuda")
    out, lse = tatten.decode_attention(**inputs, return_lse=True)
    small = {name: inputs[name][-256:] for name in ("key", "value")} | {"block_table": table - (150_000 - 256)}
    want, want_lse = decode_attention_reference(**inputs | small)
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", [{}, {"window": 3000, "softcap": 20.0}, {"masked": True}], ids=str)
@pytest.mark.parametrize("page", [1, 16, 64, 256])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_programs_that_go_in_step(
    batch: int, page: int, variant: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over large pools on an H200, whatever the GPU."""
    from tatten.ops.cuda import decode_grid, page_tiles
    from tatten.ops.cuda.decode import plan_attention
    from tatten.ops.kernel_signatures import decode_call

    monkeypatch.setattr(decode_grid, "LEAST_BYTES_IN_STEP", 0)
    monkeypatch.setattr(decode_grid, "page_table", lambda device: page_tiles.ON_H200)
    columns = 4096 // page
    inputs = random_pages(batch, page, columns, batch * columns) | variant
    if inputs.pop("masked", False):
        inputs["attn_mask"] = torch.rand(batch, 1, 1, 4096, device="cuda") < 0.5
    call = decode_call(**inputs)
    plan = plan_attention(call)
    assert plan.segment.tile_space.lanes in (4, 8)
    with fresh_memory_is_poison():
        out, lse = plan(call)
    want, want_lse = decode_attention_reference(**inputs)
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("page", [1, 16, 256])
def test_bits_of_a_sequence_do_not_depend_on_the_others(page: int) -> None:
    inputs = random_pages(16, page, 4096 // page, 20 * 4096 // page)
    together = tatten.decode_attention(**inputs, batch_invariant=True, return_lse=True)
    for b in range(16):
        own = inputs | {name: inputs[name][b : b + 1] for name in ("query", "block_table", "kv_lens")}
        alone = tatten.decode_attention(**own, batch_invariant=True, return_lse=True)
        assert all(torch.equal(x[b : b + 1], y) for x, y in zip(together, alone, strict=True))


def test_shared_pages_are_those_that_plain_pytorch_finds() -> None:
    rng = random.Random(0)
    for _ in range(200):
        tables, q_length = drawn(rng, most=100), rng.choice((1, 2))
        given = tables.table.cuda(), tables.lens.cuda(), tables.n_pages, tables.page, q_length
        assert torch.equal(torch.ops.tatten.shared_pages(*given), shared_pages_reference(*given))


@pytest.mark.parametrize("batch, heads", [(4, {}), (1000, {}), (1030, {}), (200, {"heads": 8, "kv_heads": 8})])
def test_attention_to_shared_pages(batch: int, heads: dict[str, int]) -> None:
    """The last one has more work tiles of own parts than programs fit into the SMs, and large row groups."""
    tables = tree(random.Random(batch), batch)
    inputs = on_gpu(inputs_of(tables, dtype=torch.bfloat16, dim=64, **heads))
    given = {name: inputs[name] for name in ("block_table", "kv_lens")}
    shared = tatten.shared_pages(**given, n_pages=tables.n_pages, page_size=tables.page)
    assert shared.data[OWN].any()
    with fresh_memory_is_poison():
        out, lse = tatten.decode_attention(**inputs, shared_pages=shared, return_lse=True)
    want, want_lse = decode_attention_reference(**inputs)
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_random_tables_with_shared_pages(seed: int) -> None:
    rng, heads = random.Random(seed), ((8, 2), (4, 4), (16, 2), (5, 1))
    for _ in range(30):
        tables, q_len, dim, (q_heads, kv_heads) = (
            drawn(rng, most=40), rng.choice((1, 1, 2)), rng.choice((64, 128)), rng.choice(heads)
        )  # fmt: skip
        shape = {"dim": dim, "q_len": q_len, "heads": q_heads, "kv_heads": kv_heads}
        inputs = on_gpu(inputs_of(tables, dtype=torch.bfloat16, **shape))
        given = {"n_pages": tables.n_pages, "page_size": tables.page, "q_length": q_len}
        shared = tatten.shared_pages(inputs["block_table"], inputs["kv_lens"], **given)
        with fresh_memory_is_poison():
            out, lse = tatten.decode_attention(**inputs, shared_pages=shared, return_lse=True)
        want, want_lse = decode_attention_reference(**inputs)
        torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-3)


def test_compiled_with_inductor() -> None:
    inputs = random_pages(4, 16, 64, 300)
    compiled = torch.compile(tatten.decode_attention, backend="tatten", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(**inputs), tatten.decode_attention(**inputs))
