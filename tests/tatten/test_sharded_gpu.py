"""DTensor SDPA, the tree pass and the sharded cache on two GPUs: exact, without a gather, and in CUDA graphs."""

from __future__ import annotations

import re
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
from tatten.integrations.transformers import ShardedKVCache

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


def error_of(out: DTensor | Tensor, given: list[Tensor]) -> float:
    """Against float64, in units of what the dtype can tell apart."""
    q, k, v, *mask = given
    got = out.full_tensor() if isinstance(out, DTensor) else out
    want = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), *mask, enable_gqa=True)
    return (got.double() - want).abs().max().item() / torch.finfo(q.dtype).eps


def attend(kernel: str, dtype: torch.dtype, masked: bool, inference: bool, length: int) -> tuple[float, int]:
    on = mesh()
    tatten.enable_dtensor_sdpa()
    given = tensors(dtype, HQ, length)[: 4 if masked else 3]
    with torch.inference_mode(inference), sdpa_kernel(KERNELS[kernel]), CommDebugMode() as comm:
        out = F.scaled_dot_product_attention(*place(on, *given))
        assert out.placements == (R,)
        gathered = sum(n for op, n in comm.get_comm_counts().items() if "gather" in str(op))
    return error_of(out, given), gathered


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
        # SDPA pads a mask of odd length for its kernel before that comes to DTensor: the mask then is gathered.
        masks = int(kernel == "efficient" and masked and length == 1002 and not inference)
        for error, gathered in run_ranks(2, attend, kernel, dtype, masked, inference, length):
            assert error < (8 if dtype == torch.bfloat16 else 64)
            assert gathered == masks


def step(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    first = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return F.scaled_dot_product_attention(first * 3, k, v, attn_mask=mask, enable_gqa=True)


def compile_steps(mode: str | None) -> tuple[list[float], int, str]:
    """Steps with other values each, over tensors at the same place, as a decode loop has them."""
    on = mesh()
    tatten.enable_dtensor_sdpa()
    counters.clear()
    q, k, v, mask = tensors(torch.bfloat16)
    placed = place(on, q, k, v, mask)
    with tatten.recording() as report:
        run = torch.compile(step, backend="tatten", fullgraph=True, mode=mode)
    errors = []
    for i in range(6):
        for x in (q, k, v):
            x.normal_(generator=torch.Generator(device="cuda").manual_seed(i))
        for x, new in zip(placed, place(on, q, k, v), strict=False):
            x.to_local().copy_(new.to_local())
        torch.compiler.cudagraph_mark_step_begin()
        out = run(*placed).full_tensor()
        first = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), mask, enable_gqa=True)
        errors.append(error_of(out, [first.bfloat16() * 3, k, v, mask]))
    return errors, counters["inductor"]["cudagraph_skips"], str(report)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_the_compiled_step(mode: str | None) -> None:
    for errors, skipped, _ in run_ranks(2, compile_steps, mode):
        assert max(errors) < 16
        assert skipped == 0


def generate(name: str, padded: bool, mode: str | None) -> tuple[bool, int, str]:
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
    same = True
    with tatten.recording() as report:
        for _ in range(2):
            cache = ShardedKVCache(model.config, on, PROMPT + NEW)
            got = model.generate(ids, past_key_values=cache, compile_config=config, **options)
            same &= torch.equal(got, want)
    return same, counters["inductor"]["cudagraph_skips"], str(report)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("name, padded", [("llama", True), ("llama", False), ("gemma3", True)])
def test_generate(name: str, padded: bool, mode: str | None) -> None:
    """In float32: the tokens of one process."""
    for same, skipped, report in run_ranks(2, generate, name, padded, mode):
        assert same
        assert skipped == 0
        assert re.search(r"\b(\d+) of \1 SDPA calls rewritten", report)


def merge_all(strategy: str, scatter: bool) -> list[float]:
    on = mesh()
    rank, n = dist.get_rank(), dist.get_world_size()
    errors = []
    for dtype in (torch.float32, torch.bfloat16):
        rng = torch.Generator().manual_seed(7)
        out = torch.randn(n, B, HQ, 3, D, generator=rng).to("cuda", dtype)
        lse = torch.randn(n, B, HQ, 3, generator=rng).cuda()
        lse[0, 0] = float("-inf")
        lse[:, 1, 1] = float("-inf")
        out[~lse.isfinite()] = float("nan")
        want = tatten.merge_states(out.double(), lse.double())[0]
        want = want.chunk(n, dim=1)[rank] if scatter else want
        merge = lambda a, b: tatten.tree_merge(a, b, on, strategy=strategy, scatter_heads=scatter)
        for fn in (merge, torch.compile(merge, fullgraph=True)):
            got = fn(out[rank], lse[rank])[0]
            errors.append((got.double() - want).abs().max().item() / torch.finfo(dtype).eps)
    return errors


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("strategy", ["auto", "all_reduce", "all_gather", "push"])
def test_strategies(strategy: str, scatter: bool) -> None:
    for errors in run_ranks(2, merge_all, strategy, scatter):
        assert max(errors) < 8
