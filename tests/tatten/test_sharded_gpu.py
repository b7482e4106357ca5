"""DTensor SDPA, the tree pass and the sharded cache on two GPUs: exact, without a gather, and in CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from tiny_models import PROMPT
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import CompileConfig

import tatten
from tatten.integrations.transformers import ShardedKVCache, cache_kwargs

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

B, HQ, HKV, D, NEW = 2, 8, 2, 64, 8
R, S2, S3 = Replicate(), Shard(2), Shard(3)
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def mesh() -> DeviceMesh:
    torch.cuda.set_device(dist.get_rank())
    return DeviceMesh.from_group(dist.new_group(backend="nccl"), "cuda", mesh_dim_names=("kv",))


def tensors(dtype: torch.dtype, kv_heads: int = HKV, length: int = 1002) -> list[Tensor]:
    """query, key, value and a bool mask, the same on all ranks."""
    rng = torch.Generator().manual_seed(3)
    shapes = (B, HQ, 1, D), (B, kv_heads, length, D), (B, kv_heads, length, D)
    mask = torch.rand(B, 1, 1, length, generator=rng) > 0.3
    return [*(torch.randn(x, generator=rng).to("cuda", dtype) for x in shapes), mask.cuda()]


def place(on: DeviceMesh, *tensors: Tensor) -> list[DTensor]:
    return [distribute_tensor(x, on, [how]) for x, how in zip(tensors, (R, S2, S2, S3), strict=False)]


def assert_near(got: Tensor, want: Tensor) -> None:
    """Compare with float64. Weights are rounded to the dtype, and so is the result."""
    budget = 2 * torch.finfo(got.dtype).eps * want.abs().max().item()
    torch.testing.assert_close(got.double(), want, rtol=0, atol=max(budget, 1e-6))


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask, enable_gqa=True)


def attend(kernel: str, dtype: torch.dtype, masked: bool, inference: bool, length: int) -> int:
    on = mesh()
    tatten.enable_dtensor_sdpa()
    given = tensors(dtype, HQ, length)[: 4 if masked else 3]
    with torch.inference_mode(inference), sdpa_kernel(KERNELS[kernel]), CommDebugMode() as comm:
        out = F.scaled_dot_product_attention(*place(on, *given))
        assert out.placements == (R,)
        gathered = sum(n for op, n in comm.get_comm_counts().items() if "gather" in str(op))
    assert_near(out.full_tensor(), exact(*given))
    return gathered


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "kernel, dtype, masked",
    [
        ("flash", torch.bfloat16, False),
        ("cudnn", torch.bfloat16, False),
        ("cudnn", torch.bfloat16, True),
        ("efficient", torch.bfloat16, True),
        ("efficient", torch.float32, True),
        ("efficient", torch.float32, False),
    ],
)
def test_whatever_kernel_sdpa_chose(kernel: str, dtype: torch.dtype, masked: bool, inference: bool) -> None:
    for length in (1002, 1024):
        # SDPA pads a mask of odd length before DTensor sees the call: then the mask is gathered.
        masks = int(kernel == "efficient" and masked and length == 1002 and not inference)
        assert run_ranks(2, attend, kernel, dtype, masked, inference, length) == [masks] * 2


def step(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    first = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return F.scaled_dot_product_attention(first * 3, k, v, attn_mask=mask, enable_gqa=True)


def compile_steps(mode: str | None) -> tuple[int, int]:
    """Steps with new values in the same tensors, as in a decode loop."""
    on = mesh()
    tatten.enable_dtensor_sdpa()
    counters.clear()
    q, k, v, mask = tensors(torch.bfloat16)
    placed = place(on, q, k, v, mask)
    run = torch.compile(step, backend="tatten", fullgraph=True, mode=mode)
    rng = torch.Generator("cuda").manual_seed(0)  # the same on all ranks
    with tatten.recording() as report:
        for _ in range(6):
            for x in (q, k, v):
                x.normal_(generator=rng)
            for x, new in zip(placed, place(on, q, k, v), strict=False):
                x.to_local().copy_(new.to_local())
            torch.compiler.cudagraph_mark_step_begin()
            first = exact(q, k, v, mask).bfloat16()
            assert_near(run(*placed).full_tensor(), exact(first * 3, k, v, mask))
    assert not report.declined
    return len(report.rewritten), counters["inductor"]["cudagraph_skips"]


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_the_compiled_step(mode: str | None) -> None:
    assert run_ranks(2, compile_steps, mode) == [(2, 0)] * 2


def generate(name: str, padded: bool, mode: str | None) -> int:
    on = mesh()
    counters.clear()
    model = tiny_models.build(name, "tatten").cuda()
    ids = torch.arange(1, 3 * PROMPT + 1, device="cuda").view(3, PROMPT)
    seen = torch.ones_like(ids)
    if padded:
        seen[0, :5] = seen[2, :1] = 0
    options: dict[str, Any] = {"attention_mask": seen, "max_new_tokens": NEW, "do_sample": False}
    want = model.generate(ids, **options)
    config = CompileConfig(backend="tatten", mode=mode, fullgraph=True)
    with tatten.recording() as report:
        for _ in range(2):
            cache = ShardedKVCache(model.config, on, PROMPT + NEW)
            got = model.generate(ids, **cache_kwargs(cache), compile_config=config, **options)
            assert torch.equal(got, want)
    assert not report.declined
    assert len(report.rewritten) == model.config.num_hidden_layers
    return counters["inductor"]["cudagraph_skips"]


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("name, padded", [("llama", True), ("llama", False), ("gemma3", True)])
def test_generate(name: str, padded: bool, mode: str | None) -> None:
    """In float32: the tokens of one process, from one graph."""
    assert run_ranks(2, generate, name, padded, mode) == [0, 0]


def merge_all(strategy: str, scatter: bool) -> None:
    on = mesh()
    rank, n = dist.get_rank(), dist.get_world_size()
    merge = lambda a, b: tatten.tree_merge(a, b, on, strategy=strategy, scatter_heads=scatter)
    for dtype in (torch.float32, torch.bfloat16):
        rng = torch.Generator().manual_seed(7)
        out = torch.randn(n, B, HQ, 3, D, generator=rng).to("cuda", dtype)
        lse = torch.randn(n, B, HQ, 3, generator=rng).cuda()
        lse[0, 0] = float("-inf")
        lse[:, 1, 1] = float("-inf")
        out[~lse.isfinite()] = float("nan")
        want = [x.chunk(n, dim=1)[rank] if scatter else x for x in tatten.merge_states(out.double(), lse.double())]
        for fn in (merge, torch.compile(merge, fullgraph=True)):
            got = fn(out[rank], lse[rank])
            assert_near(got[0], want[0])
            torch.testing.assert_close(got[1].double(), want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("strategy", ["auto", "all_reduce", "all_gather", "push"])
def test_strategies(strategy: str, scatter: bool) -> None:
    run_ranks(2, merge_all, strategy, scatter)
