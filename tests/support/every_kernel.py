"""Launch every variant of the kernels once, on small tensors: for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/support/every_kernel.py
    compute-sanitizer --tool racecheck python tests/support/every_kernel.py 0 8    # every eighth one, from the first

The variants are those of tests/ops/cuda/test_compiles.py and test_ragged_compiles.py, latent attention with each kind
of keys, picked keys, shared pages, `top_picks`, `project_heads` in blocks of each size, `index_scores` with each kind
of mask, `skinny_linear`, `fused_linear`, and `slide_`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from index_calls import IndexCall, assert_close_to_float64

import tatten
from tatten.ops.cuda import combine, decode, segment_launches
from tatten.ops.cuda.decode_grid import Place
from tatten.ops.cuda.gpu_rates import GpuRates
from tatten.ops.cuda.write_tokens import write_tokens_on_cuda_
from tatten.ops.kernel_signatures import bifurcated_call, decode_call
from tatten.ops.masks import block_list
from tatten.ops.sizes import ceil_div

KV_LEN, BF16 = 333, torch.bfloat16
LATENT_QUERIES = (16, 1), (128, 1), (128, 3), (128, 16)  # heads, and queries of each: 1 and multiples of 16 are known
PICKING = (5, 1), (16, 1), (128, 1), (20, 3)
FEW_LATENT_QUERIES = (16, 1), (5, 3)  # in float32, as they stay where they are few


def compile_tests(name: str = "test_compiles") -> ModuleType:
    path = Path(__file__).parents[1] / f"ops/cuda/{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_pages(x: torch.Tensor, page: int, table: torch.Tensor) -> torch.Tensor:
    """Return a pool with the keys `[batch, kv_heads, length, ...]` where the table says."""
    room = x.new_zeros((*x.shape[:2], table.shape[1] * page, *x.shape[3:]))
    room[:, :, : x.shape[2]] = x
    pool = torch.empty_like(room.unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1).transpose(1, 2).contiguous())
    pool[table.flatten().long()] = room.unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1).transpose(1, 2)
    return pool


def random_table(page: int) -> torch.Tensor:
    return torch.randperm(2 * ceil_div(KV_LEN, page), device="cuda").view(2, -1).int()


def attend(
    dtype: Any, dim: int, rows: int, mask: Any = None, lens: bool = False, sinks: bool = False, tiles: str = "",
    sm90: bool = False, float8: bool = False, int8: bool = False, per_key: bool = False, indexed: bool = False,
    page: int = 0, **options: Any,
) -> None:  # fmt: skip
    dtype = getattr(torch, dtype)
    query = torch.randn(2, 2 * rows, 1, dim, device="cuda").to(dtype)
    key, value = (torch.randn(2, 2, KV_LEN, dim, device="cuda").to(dtype) for _ in "kv")
    groups = blocks = None
    if indexed:
        groups = torch.ops.tatten.row_groups.default(torch.tensor([1, 0], device="cuda"), 2, rows)
    if sm90:
        call = bifurcated_call(query, [key], [value], scale=0.1, row_groups=[groups])
        segment_launches.plan_prefix_segment(call, call.segments[0])(call, call.segments[0])
        return
    if float8:
        key, value = (x.to(torch.float8_e4m3fn) for x in (key, value))
    if int8:
        key, value = ((40 * x).round().clamp(-127, 127).to(torch.int8) for x in (key, value))
    scaled = (2, 2, KV_LEN) if per_key else (2,)
    if mask is not None:
        shown = torch.rand(*mask[1:], KV_LEN, device="cuda") > 0.5
        mask = shown if mask[0] == "bool" else torch.where(shown, 0.5, float("-inf")).to(getattr(torch, mask[0]))
        want = block_list(mask, 2)
        assert torch.equal(torch.ops.tatten.block_list.default(mask, 2), want)
        if indexed:
            blocks = torch.ops.tatten.block_mask.default(mask, 2, torch.tensor([1, 0], device="cuda"))
    kv_lens = torch.tensor([KV_LEN, 70], device="cuda") if lens else None
    names = "window", "softcap", "batch_invariant"
    variant: dict[str, Any] = {name: options.pop(name) for name in names if name in options}
    if sinks:
        variant["sinks"] = torch.randn(query.shape[1], device="cuda").to(dtype)
    if float8 or int8:
        variant |= {name: torch.rand(scaled, device="cuda") for name in ("key_scale", "value_scale")}
    place = Place(
        **{name: options.pop(name) for name in ("final", "max_and_sum", "beside_previous") if name in options}
    )
    if page:
        kv_lens = torch.tensor([KV_LEN, 70], device="cuda")
        variant["block_table"] = random_table(page)
        key, value = (in_pages(x, page, variant["block_table"]) for x in (key, value))
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, -KV_LEN % page))
        for name in ("key_scale", "value_scale") if per_key else ():
            variant[name] = in_pages(variant[name], page, variant["block_table"])
    if tiles:
        options["tiles"] = getattr(segment_launches, tiles)
    call = decode_call(query, key, value, mask, kv_lens, 0.1, blocks, **variant)
    stored = call.segments[0]._replace(row_groups=groups)
    plan = decode.plan_segment(call, stored, place, **options)
    partials = plan(call, stored)
    twice = 1 if place.final else 2
    combine.plan_combine(query, dim, *[plan.tile_space] * twice, dtype=dtype)(*[partials] * twice)


def attend_latents(heads: int, q_len: int, keys: str, dtype: torch.dtype = torch.bfloat16, page: int = 0) -> None:
    """On Hopper more than 16 packed queries take the latent_sm90 kernel, and fewer in float32 latent_few_sm90.

    With pages, all take the decode kernel.
    """

    def randn(heads: int, length: int, width: int) -> torch.Tensor:
        return torch.randn(2, heads, length, width, device="cuda").bfloat16()

    mask = torch.rand(2, 1, 1, KV_LEN, device="cuda") > 0.5 if keys == "mask" else None
    kv_lens = torch.tensor([KV_LEN, 70], device="cuda") if keys == "lengths" else None
    query, query_rope = randn(heads, q_len, 512).to(dtype), randn(heads, q_len, 64)
    latent, key_rope = randn(1, KV_LEN, 512), randn(1, KV_LEN, 64)
    table = None
    if page:
        kv_lens, table = torch.tensor([KV_LEN, 70], device="cuda"), random_table(page)
        latent, key_rope = (in_pages(x, page, table) for x in (latent, key_rope))
        mask = None if mask is None else torch.nn.functional.pad(mask, (0, -KV_LEN % page))
    given = {"attn_mask": mask, "kv_lens": kv_lens, "block_table": table, "scale": 0.05}
    tatten.latent_attention(query, query_rope, latent, key_rope, **given)


def attend_picks(heads: int, q_len: int, keys: str, latent: bool) -> None:
    """On Hopper picked latents of 8 heads or more take the picked_sm90 kernel. Some picks are out of range."""
    mask = torch.rand(2, 1, 1, KV_LEN, device="cuda") > 0.5 if keys == "mask" else None
    options: dict[str, Any] = {"attn_mask": mask, "scale": 0.05, "distinct_indices": True}
    if keys == "lengths":
        options["kv_lens"] = torch.tensor([KV_LEN, 70], device="cuda")

    def picks(of: int) -> torch.Tensor:
        return (torch.rand(2, 1, q_len, of + 4, device="cuda").argsort(-1) - 2)[..., : of // 2].int()

    def randn(heads: int, length: int, width: int) -> torch.Tensor:
        return torch.randn(2, heads, length, width, device="cuda").bfloat16()

    if latent:
        query, query_rope, stored, key_rope = (
            *(randn(heads, q_len, width) for width in (512, 64)),
            *(randn(1, KV_LEN, width) for width in (512, 64)),
        )
        tatten.latent_attention(query, query_rope, stored, key_rope, indices=picks(KV_LEN), **options)
        return
    query, key, value = randn(heads, q_len, 128), randn(2, KV_LEN, 128), randn(2, KV_LEN, 128)
    indices = picks(-(-KV_LEN // 128))
    tatten.decode_attention(query, key, value, indices=indices, index_block=128, **options)


def share(batch: int, page: int, heads: int) -> None:
    """Sequences that share a prefix of half of the keys, and one that shares nothing."""
    columns = ceil_div(KV_LEN, page)
    table = torch.randperm(batch * columns, device="cuda").view(batch, columns).int()
    table[1:-1, : columns // 2] = table[0, : columns // 2]
    key, value = torch.randn(2, batch * columns, page, 2, 128, device="cuda", dtype=BF16)
    given = {"block_table": table, "kv_lens": torch.full((batch,), KV_LEN, device="cuda")}
    shared = tatten.shared_pages(**given, n_pages=len(key), page_size=page)
    query = torch.randn(batch, heads, 1, 128, device="cuda", dtype=BF16)
    out = tatten.decode_attention(query, key, value, **given, shared_pages=shared)
    torch.testing.assert_close(out, tatten.decode_attention(query, key, value, **given), rtol=2e-2, atol=1e-2)


def mix(
    dtype: Any, dim: int, tokens: int, heads: tuple[int, int] = (32, 8), page: int = 16, narrow: str = "",
    per_key: bool = False, sinks: bool = False, shared: bool = False, **variant: Any,
) -> None:  # fmt: skip
    """Decode steps, and chunks of many queries: sequence 3 has the rest of the tokens but for 5, which are padding.

    With `shared`, sequences 0, 1 and 3 have pages in common.
    """
    dtype, columns = getattr(torch, dtype), ceil_div(KV_LEN, page)
    table = torch.randperm(4 * columns, device="cuda").view(4, columns).int()
    key, value = (torch.randn(4 * columns, page, heads[1], dim, device="cuda").to(dtype) for _ in "kv")
    if narrow:
        key, value = ((4 * x).round().clamp(-99, 99).to(getattr(torch, narrow)) for x in (key, value))
        scaled = key.shape[:3] if per_key else (heads[1],)
        variant |= {name: torch.rand(scaled, device="cuda") for name in ("key_scale", "value_scale")}
    if sinks:
        variant["sinks"] = torch.randn(heads[0], device="cuda").to(dtype)
    starts = torch.tensor([0, 1, 2, 42, min(tokens, 342) - 5], device="cuda").int()
    lens = torch.tensor([KV_LEN, KV_LEN - 5 if shared else 70, 60, KV_LEN], device="cuda")
    query = torch.randn(tokens, heads[0], dim, device="cuda").to(dtype)
    if shared:
        table[:, : columns // 2] = table[0, : columns // 2]
        variant["shared_pages"] = tatten.shared_pages(table, lens, n_pages=len(key), page_size=page)
    tatten.paged_attention(query, key, value, table, starts, lens, **variant)


def select(rows: int, n: int, k: int) -> None:
    scores = torch.randn(rows, n, device="cuda").round(decimals=1)
    want = torch.ops.tatten.top_picks(scores.cpu(), k)
    assert torch.equal(torch.ops.tatten.top_picks(scores, k).cpu(), want)


def project(rows: int, columns: int, rank: int) -> None:
    """More than 32 rows of many heads take the larger blocks."""
    sums, weight = torch.randn(rows, 128, 1, rank, device="cuda"), torch.randn(128, columns, rank, device="cuda")
    torch.ops.tatten.project_heads(sums, weight.bfloat16())


def multiply(rows: int, in_features: int, outs: tuple[int, ...], parts: int) -> None:
    x, *weights = (torch.randn(n, in_features, device="cuda").bfloat16() for n in (rows, *outs))
    for got, weight in zip(torch.ops.tatten.skinny_linear(x, weights, parts, torch.float32), weights, strict=True):
        torch.testing.assert_close(got.sum(0), x.float() @ weight.float().T, rtol=1e-2, atol=1e-2)


def fuse(in_features: int, outs: tuple[int, ...], gate: str | None, prefetch: bool) -> None:
    x = torch.randn(1, in_features, device="cuda").bfloat16()
    norm_weight = torch.ones(in_features, device="cuda").bfloat16()
    weights = [torch.randn(n, in_features, device="cuda").bfloat16() for n in outs]
    residual = x.new_ones(1, outs[0]) if len(outs) == (2 if gate else 1) else None
    around: dict[str, Any] = {"norm_weight": norm_weight, "eps": 1e-5, "gate": gate, "residual": residual}
    op = torch.ops.tatten.fused_linear
    on_cpu = {name: y.cpu() if isinstance(y, torch.Tensor) else y for name, y in around.items()}
    want = op(x.cpu(), [w.cpu() for w in weights], **on_cpu)
    for a, b in zip(op(x, weights, **around, prefetch=prefetch), want, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-2, atol=1e-2)


def slide(slots: int, dim: int) -> None:
    cache, new = (torch.randn(2, 3, n, dim, device="cuda").bfloat16() for n in (slots, 1))
    want = torch.cat((cache[:, :, 1:], new), 2)
    torch.ops.tatten.slide_(cache, new)
    assert torch.equal(cache, want)


def write_tokens(tokens: int, heads: int, dim: int) -> None:
    pools = [torch.zeros(50, heads, dim, device="cuda").bfloat16() for _ in "kv"]
    key, value = torch.randn(2, tokens, heads, dim, device="cuda").bfloat16()
    slots = torch.randperm(50, device="cuda")[:tokens]
    write_tokens_on_cuda_(*pools, key, value, slots)
    assert torch.equal(pools[0][slots], key)
    assert torch.equal(pools[1][slots], value)


def index_scores(q_len: int, heads: int, mask: str | None, key_dtype: torch.dtype, dtype: torch.dtype) -> None:
    call = IndexCall(2, q_len, heads, 128, 1000 + KV_LEN, dtype, key_dtype, mask=mask).make("cuda")
    assert_close_to_float64(tatten.index_scores(**call), call)


def main() -> None:
    decode.gpu_rates = lambda device: GpuRates(tma_least_bytes=0)
    first, step = (int(x) for x in sys.argv[1:3]) if len(sys.argv) > 2 else (0, 1)
    variants: list[Any] = [(attend, *variant) for group in compile_tests().GROUPS.values() for variant in group]
    mixed = compile_tests("test_ragged_compiles").GROUPS
    variants += [(mix, *variant) for group in mixed.values() for variant in group]
    for keys in ("all", "lengths", "mask"):
        variants += [(attend_latents, (*queries, keys), {}) for queries in LATENT_QUERIES]
        variants += [(attend_latents, (*queries, keys, torch.float32), {}) for queries in FEW_LATENT_QUERIES]
        for page in (1, 16, 64, 256):
            variants += [(attend_latents, (*queries, keys, BF16, page), {}) for queries in LATENT_QUERIES[:2]]
        variants += [(attend_latents, (*FEW_LATENT_QUERIES[1], keys, torch.float32, 16), {})]
        variants += [(attend_picks, (*queries, keys, latent), {}) for queries in PICKING for latent in (True, False)]
    variants += [(project, shape, {}) for shape in ((3, 128, 512), (70, 128, 512), (33, 40, 77))]
    kinds = [(1, 64, None), (1, 64, "prefix"), (2, 64, "bool"), (4, 64, "bool"), (3, 5, "bias")]
    for dtypes in ((BF16, BF16), (torch.int8, BF16), (torch.float8_e4m3fn, BF16), (torch.float32, torch.float32)):
        variants += [(index_scores, (*kind, *dtypes), {}) for kind in kinds]
    variants += [(share, shape, {}) for shape in ((3, 16, 8), (40, 1, 2), (5, 128, 32))]
    variants += [(select, shape, {}) for shape in ((3, 5000, 77), (2, 300_000, 2048))]
    multiplied = (3, 333, (70,), 2), (20, 512, (64, 9), 1), (64, 1000, (130, 64, 64), 1), (1, 5000, (7, 100), 1)
    variants += [(multiply, shape, {}) for shape in multiplied]
    fused = (333, (70, 3), None), (1024, (65,), None), (512, (77, 77), "silu"), (896, (64, 64), "gelu_tanh")
    variants += [(fuse, (*shape, prefetch), {}) for shape in fused for prefetch in (False, True)]
    variants += [(slide, shape, {}) for shape in ((KV_LEN, 80), (2000, 128))]
    variants += [(write_tokens, shape, {}) for shape in ((7, 3, 80), (33, 8, 128))]
    variants = variants[first::step]
    for launch, shape, options in variants:
        launch(*shape, **options)
        torch.cuda.synchronize()
    print(f"{len(variants)} variants ran")


if __name__ == "__main__":
    main()
