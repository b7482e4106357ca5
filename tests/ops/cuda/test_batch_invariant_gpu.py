"""`batch_invariant=True` on a GPU: one CUDA graph, replayed over random batches, and calls of other sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import Case, assert_state
from random_batches import Sequences, SharedSequences, with_latents
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import tatten

pytestmark = pytest.mark.gpu

BATCH = 16
SHAPE = {"q_heads": 8, "kv_heads": 2, "head_dim": 128, "longest": 5000}
CALLS = [
    Sequences(**{**SHAPE, "longest": 36000}, dtype=torch.bfloat16),  # more than 32 times 1024
    Sequences(**SHAPE, dtype=torch.float16, q_len=3, mask="causal"),
    Sequences(**SHAPE, dtype=torch.float32, mask="bias"),
    Sequences(**SHAPE, dtype=torch.bfloat16, q_len=3, mask="keys"),
]
LATENTS = {"kv_heads": 1, "head_dim": 576, "longest": 1500, "dtype": torch.bfloat16}
CALLS += [Sequences(q_heads=16, **LATENTS, mask="holes"), Sequences(q_heads=128, **LATENTS)]


SHARE = {"shared": 9000, "rows": True}
SHARED = [
    SharedSequences(Sequences(**SHAPE, dtype=torch.bfloat16, mask="keys"), shared=40000),  # more than 32 times 1024
    SharedSequences(Sequences(**SHAPE, dtype=torch.bfloat16, mask="keys"), **SHARE, holes=True),
    SharedSequences(Sequences(**SHAPE, dtype=torch.float16, q_len=3, mask="causal"), **SHARE, holes=True),
    SharedSequences(Sequences(**SHAPE, dtype=torch.float32, mask="bias"), **SHARE),
]


def on_gpu(call: dict[str, Any]) -> dict[str, Any]:
    """The call on a GPU; keys of 576 numbers are latents with their rope."""
    if "key" in call and call["key"].shape[3] == 576:
        call = with_latents(call, 512)
    return {name: tree_map_only(Tensor, Tensor.cuda, x) for name, x in call.items()}


def attend(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    op = tatten.latent_attention if "latent" in call else tatten.decode_attention
    op = tatten.bifurcated_attention if "keys" in call else op
    return op(**call, batch_invariant=True, return_lse=True)


@pytest.mark.parametrize("call", [*CALLS, *SHARED], ids=str)
def test_one_graph_over_20_batches(call: Sequences | SharedSequences) -> None:
    torch.manual_seed(0)
    own = call.own if isinstance(call, SharedSequences) else call
    shared = call.draw() if isinstance(call, SharedSequences) else None
    alone = own.draw(1, own.longest, own.longest // 2)

    def draw(at: int) -> dict[str, Any]:
        batch = own.draw(BATCH, own.longest, own.longest // 2)
        for name, x in batch.items():
            x[at] = alone[name][0]
        return on_gpu(batch if shared is None else call.share(batch, at, *shared, 4))

    want = attend(on_gpu(alone if shared is None else call.share(alone, 0, *shared, 1)))
    static = draw(0)
    attend(static)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend(static)
    for at in torch.randint(BATCH, (20,)).tolist():
        for x, y in zip(tree_leaves(static), tree_leaves(draw(at)), strict=True):
            if isinstance(x, Tensor):
                x.copy_(y)
        graph.replay()
        for x, y in zip(got, want, strict=True):
            assert torch.equal(x[at], y[0])


@pytest.mark.parametrize("call", [*CALLS, *SHARED], ids=str)
def test_any_batch_size(call: Sequences | SharedSequences) -> None:
    for alone, together, at in call.batches(20):
        for x, y in zip(attend(on_gpu(together)), attend(on_gpu(alone)), strict=True):
            assert torch.equal(x[at], y[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{"lens": True}, {"mask": "holes", "q_len": 3}, {"window": 900}], ids=str)
def test_against_float64(dtype: torch.dtype, options: dict) -> None:
    inputs = Case(q_heads=8, kv_len=5000, head_dim=128, dtype=dtype, **options).inputs("cuda")
    assert_state(*attend(inputs), inputs)
