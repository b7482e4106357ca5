"""Striped attention on several gloo ranks is causal attention of one process, and sends what was computed."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks, try_ranks
from slow import slow_but
from torch import Tensor

from tatten.ops.distributed.striped import Ring, striped_attention
from tatten.ops.reference import decode_attention_reference

B, Q_HEADS, KV_HEADS, D = 2, 4, 2, 16


def ring() -> Ring:
    return Ring(tuple(range(dist.get_world_size())), dist.get_rank())


def prompt(length: int, dtype: torch.dtype) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(B, h, length, D, generator=rng, dtype=torch.float64).to(dtype) for h in (4, 2, 2)]


def attend(length: int, chunk: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    """This rank's queries, a chunk of the prompt at a time, and the bytes that it sent."""
    around, sent = ring(), 0
    send = dist.batch_isend_irecv

    def counting(ops: list[dist.P2POp]) -> list[dist.Work]:
        nonlocal sent
        sent += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return send(ops)

    dist.batch_isend_irecv = counting
    q, k, v = (x[:, :, around.rank :: len(around.ranks)] for x in prompt(length, dtype))
    each = chunk // len(around.ranks)
    parts = [slice(start, min(start + each, q.shape[2])) for start in range(0, q.shape[2], each)]
    outs = [striped_attention(q[:, :, x], k[:, :, : x.stop], v[:, :, : x.stop], around, 0.3) for x in parts]
    return torch.cat(outs, dim=2), sent


@pytest.mark.parametrize(
    "n, each, chunk, dtype",
    slow_but(
        [(2, 7, 6, torch.float64), (3, 40, 120, torch.bfloat16)],
        [
            *((n, each, chunk, torch.float64) for n in (1, 2, 3, 4) for each in (1, 7) for chunk in (n, 3 * n, 7 * n)),
            (3, 40, 120, torch.bfloat16),
            (4, 40, 64, torch.bfloat16),
        ],
    ),
)
def test_attention(n: int, each: int, chunk: int, dtype: torch.dtype) -> None:
    length = n * each
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    want = decode_attention_reference(*prompt(length, dtype), attn_mask=mask, scale=0.3)[0]
    so_far = [min(end, each) for end in range(chunk // n, each + chunk // n, chunk // n)]
    for rank, (out, sent) in enumerate(run_ranks(n, attend, length, chunk, dtype)):
        assert out.dtype == dtype
        torch.testing.assert_close(
            out.double(), want[:, :, rank::n], rtol=0, atol=1e-12 if dtype == torch.float64 else 0.02
        )
        assert sent == (n - 1) * 2 * B * KV_HEADS * D * dtype.itemsize * sum(so_far)


def leave_early() -> None:
    x = torch.zeros(1, 1, 4, 8)
    if dist.get_rank() == 1:
        time.sleep(5)
        return
    striped_attention(x, x, x, ring(), None)


@pytest.mark.drawn(1, "ranks that fail")
def test_a_neighbour_that_does_not_come_is_named() -> None:
    start = time.monotonic()
    results = try_ranks(3, leave_early, timeout=2, seconds=60)
    assert time.monotonic() - start < 30
    for rank, neighbours in ((0, (2, 1)), (2, (1, 0))):
        assert isinstance(results[rank], RankError)
        assert (
            f"rank {rank} waited in vain for keys and values from rank {neighbours[0]}, or for rank {neighbours[1]} to "
            "take some, of the ring of ranks [0, 1, 2]" in str(results[rank])
        )
