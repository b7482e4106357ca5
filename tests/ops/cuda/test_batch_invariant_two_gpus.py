"""`batch_invariant=True` for keys that are sharded over two GPUs: one CUDA graph over random batches, any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from random_batches import Sequences, part_of
from ranks import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import tatten

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

BATCH = 16
SHAPE = {"q_heads": 8, "kv_heads": 2, "head_dim": 128, "longest": 5000}
CALLS = [
    Sequences(**SHAPE, dtype=torch.bfloat16),
    Sequences(**SHAPE, dtype=torch.float16, q_len=3, mask="causal"),
    Sequences(**SHAPE, dtype=torch.float32, mask="bias"),
]


def on_mesh() -> DeviceMesh:
    torch.cuda.set_device(dist.get_rank())
    return DeviceMesh.from_group(dist.new_group(backend="nccl"), "cuda", mesh_dim_names=("kv",))


def own(call: dict[str, Any]) -> dict[str, Any]:
    part = part_of(call, dist.get_rank(), dist.get_world_size())
    return {name: x.cuda() if isinstance(x, Tensor) else x for name, x in part.items()}


def replay(call: Sequences, strategy: str) -> int:
    """In how many of 20 batches, each of one CUDA graph, a sequence has other bits than alone."""
    mesh = on_mesh()

    def attend(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        state = tatten.decode_attention(**given, batch_invariant=True, return_lse=True)
        return tatten.tree_merge(*state, mesh, strategy=strategy, batch_invariant=True)

    torch.manual_seed(0)
    alone = call.draw(1, call.longest, call.longest // 2)
    want = attend(own(alone))
    static = own(call.draw(BATCH, call.longest, 1))
    attend(static)  # compiles, and agrees on the shape
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        got = attend(static)
    found = 0
    for _ in range(20):
        at = int(torch.randint(BATCH, ()))
        batch = call.draw(BATCH, call.longest, call.longest // 2)
        for name, x in batch.items():
            x[at] = alone[name][0]
        for name, x in own(batch).items():
            static[name].copy_(x)
        graph.replay()
        found += not all(torch.equal(x[at], y[0]) for x, y in zip(got, want, strict=True))
    return found


@pytest.mark.parametrize("strategy", ["push", "all_gather"])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_one_graph_over_20_batches(call: Sequences, strategy: str) -> None:
    assert run_ranks(2, replay, call, strategy) == [0, 0]


def merge_sizes(strategy: str, dtype: torch.dtype, scatter: bool) -> int:
    """In how many of 6 batches a sequence is merged to other bits than alone; the largest takes several launches."""
    mesh = on_mesh()
    rng = torch.Generator("cuda").manual_seed(dist.get_rank())
    out = torch.randn(5000, 8, 1, 128, generator=rng, device="cuda").to(dtype)
    lse = torch.randn(5000, 8, 1, generator=rng, device="cuda") * 5

    def merge(batch: int) -> tuple[Tensor, Tensor]:
        given = {"strategy": strategy, "scatter_heads": scatter, "batch_invariant": True}
        return tatten.tree_merge(out[:batch], lse[:batch], mesh, **given)

    want = merge(1)
    sizes = (2, 17, 40, 200, 900, 5000)
    return sum(not all(torch.equal(x[:1], y) for x, y in zip(merge(batch), want, strict=True)) for batch in sizes)


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("strategy", ["auto", "push", "all_gather"])
def test_a_merge_of_any_size(strategy: str, dtype: torch.dtype, scatter: bool) -> None:
    assert run_ranks(2, merge_sizes, strategy, dtype, scatter) == [0, 0]


def compiled(call: Sequences) -> tuple[int, int]:
    """In how many of 20 batches of a compiled step a sequence has other bits than alone, and calls that were left."""
    tatten.enable_dtensor_sdpa()
    mesh, keys = on_mesh(), (Shard(2),)

    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor) -> Tensor:
        given = (query, (Replicate(),)), (key, keys), (value, keys), (attn_mask, (Shard(3),))
        tensors = (DTensor.from_local(x, mesh, how, run_check=False) for x, how in given)
        return F.scaled_dot_product_attention(*tensors, enable_gqa=True).to_local()

    step = torch.compile(attend, backend="tatten", options={"batch_invariant": True, "triton.cudagraphs": True})
    torch.manual_seed(0)
    alone = call.draw(1, call.longest, call.longest // 2)
    with tatten.recording() as report:
        want, found = step(**own(alone)).clone(), 0
        static = own(call.draw(BATCH, call.longest, 1))
        for _ in range(20):
            at = int(torch.randint(BATCH, ()))
            batch = call.draw(BATCH, call.longest, call.longest // 2)
            for name, x in batch.items():
                x[at] = alone[name][0]
            for name, x in own(batch).items():
                static[name].copy_(x)
            torch.compiler.cudagraph_mark_step_begin()
            found += not torch.equal(step(**static)[at], want[0])
    assert report.rewritten
    return found, len(report.declined)


def test_a_compiled_step() -> None:
    call = Sequences(**SHAPE, dtype=torch.bfloat16, q_len=3, mask="causal")
    assert run_ranks(2, compiled, call) == [(0, 0)] * 2
