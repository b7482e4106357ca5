"""`benchmarks/tree_vs_ring.py` is right: ring attention, and a model with a sharded cache."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from slow import slow_but
from torch import Tensor

from tatten.ops.reference import decode_attention_reference

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from project_cluster import fit, merge_points
from support.ring import ring_decode, ring_prefill, shard_zigzag
from support.sharded_attention import decoders
from support.sharded_llama import Decoder, Sizes
from support.together import Ranks

pytestmark = pytest.mark.drawn(2, "whole programs")

LENGTHS = {  # of each rank and sequence, of 16
    "uneven": [[5, 16], [1, 0], [16, 7], [0, 3]],
    "some empty": [[5, 16], [0, 0], [16, 7], [0, 0]],
    "full": None,
}
CASES = list(itertools.product(LENGTHS, [(4, 4), (8, 2), (4, 1)], [torch.float32, torch.bfloat16], [False, True]))


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cache(ranks: int, heads: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """A query, and K and V of each rank."""
    q = randn(2, heads[0], 1, 32, seed=9, dtype=dtype)
    return [q, *(randn(ranks, 2, heads[1], 16, 32, seed=i, dtype=dtype) for i in range(2))]


def lens(name: str, ranks: int) -> Tensor | None:
    return None if LENGTHS[name] is None else torch.tensor(LENGTHS[name][:ranks], dtype=torch.int32)


def decode() -> list[tuple[Tensor, ...]]:
    """For each case what the ring gives on this rank, and the shard it is left with."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results = []
    for name, heads, dtype, home in CASES:
        q, keys, values = cache(ranks, heads, dtype)
        k, v = keys[rank].clone(), values[rank].clone()
        results.append((*ring_decode(q, k, v, lengths=lens(name, ranks), home=home), k, v))
    return results


def prefill(length: int, heads: tuple[int, int]) -> tuple[Tensor, Tensor]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    q, k, v = (shard_zigzag(x, rank, ranks) for x in prompt(length, heads))
    return ring_prefill(q, k, v)


def prompt(length: int, heads: tuple[int, int]) -> list[Tensor]:
    return [randn(2, h, length, 32, seed=i) for i, h in enumerate((heads[0], heads[1], heads[1]))]


@pytest.mark.parametrize("n", slow_but([2], [1, 2, 3, 4]))
def test_decode(n: int) -> None:
    for rank, results in enumerate(run_ranks(n, decode)):
        for (name, heads, dtype, _), (out, lse, own_k, own_v) in zip(CASES, results, strict=True):
            q, k, v = cache(n, heads, dtype)
            whole = [x.permute(1, 2, 0, 3, 4).flatten(2, 3) for x in (k, v)]
            mask = None
            if (lengths := lens(name, n)) is not None:
                mask = (torch.arange(16) < lengths[..., None]).transpose(0, 1).flatten(1)[:, None, None]
            want_out, want_lse = decode_attention_reference(q, *whole, attn_mask=mask)
            eps = torch.finfo(dtype).eps
            assert out.dtype == dtype
            torch.testing.assert_close(out.double(), want_out, atol=8 * eps, rtol=8 * eps)
            torch.testing.assert_close(lse.double(), want_lse, atol=8 * eps, rtol=8 * eps)
            assert torch.equal(own_k, k[rank])
            assert torch.equal(own_v, v[rank])


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("n", slow_but([2], [1, 2, 3, 4]))
def test_prefill(n: int, heads: tuple[int, int]) -> None:
    length = 2 * n * 5
    results = run_ranks(n, prefill, length, heads)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    want_out, want_lse = decode_attention_reference(*prompt(length, heads), attn_mask=mask)
    for rank, (out, lse) in enumerate(results):
        torch.testing.assert_close(out.double(), shard_zigzag(want_out, rank, n), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse.double(), shard_zigzag(want_lse, rank, n), atol=1e-5, rtol=1e-5)


SIZES = Sizes(layers=2, hidden=64, intermediate=96, q_heads=4, kv_heads=2, head_dim=16, vocabulary=97)


def generate(prompt: Tensor, new: int) -> list[dict[str, list[int]]]:
    """The tokens of each arm, from the cache that each prefill leaves."""
    from support.striped_llama import StripedPrefill  # imports transformers

    ranks = Ranks(dist.get_world_size(), "cpu")
    model = Decoder(SIZES, ranks, torch.float32)
    found = []
    for prefill in (model.prefill, StripedPrefill(model)):
        model.allocate(prompt.shape[1], new)
        prefill(prompt)
        tokens = {}
        for name, merged in decoders(ranks, ["all_reduce", "all_gather"]).items():
            model.restart()
            tokens[name] = [model.first.item(), *(model.step(merged).item() for _ in range(new - 1))]
        found.append(tokens)
    return found


def generate_whole(prompt: Tensor, new: int) -> list[int]:
    """Without a cache or ranks: each token from all that come before it."""

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        return decode_attention_reference(q, k, v, attn_mask=mask)[0].float()

    model = Decoder(SIZES, Ranks(1, "cpu"), torch.float32)
    for _ in range(new):
        prompt = torch.cat((prompt, model.run(prompt, torch.arange(prompt.shape[1]), attention)), dim=1)
    return prompt[0, -new:].tolist()


@pytest.mark.parametrize("n", slow_but([2], [1, 2, 4]))
def test_decoder(n: int) -> None:
    prompt = torch.randint(97, (1, 16), generator=torch.Generator().manual_seed(0))
    (expected,) = run_ranks(1, generate_whole, prompt, 7)
    assert len(set(expected)) > 2
    for found in run_ranks(n, generate, prompt, 7):
        assert found == [dict.fromkeys(("tree:all_reduce", "tree:all_gather", "ring"), expected)] * 2


@pytest.mark.slow
def test_what_one_benchmark_writes_the_other_reads(tmp_path: Path) -> None:
    path = tmp_path / "merge.json"
    script = str(Path(__file__).parents[2] / "benchmarks/tree_merge.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    options = ["--rows", "32", "64", "--rounds", "1", "--repeats", "1", "--json", str(path)]
    subprocess.run([*command, *options], check=True, timeout=120, capture_output=True)
    points = merge_points(path, "all_gather", 128)
    assert [(rounds, size) for rounds, size, _ in points] == [(1, 32 * 260), (1, 64 * 260)]
    assert all(seconds > 0 for *_, seconds in points)


def test_fit() -> None:
    """Exact points give back their line; noise moves it little; what can't be fitted is refused."""
    alpha, beta = 5e-6, 1 / 200e9
    sizes = [(rounds, rounds * size) for rounds in (1, 3, 7) for size in (8e3, 1e6, 134e6)]
    points = [(r, b, alpha * r + beta * b) for r, b in sizes]
    assert fit(points) == pytest.approx((alpha, beta), rel=1e-9)
    noisy = [(r, b, s * (1 + 0.05 * (-1) ** i)) for i, (r, b, s) in enumerate(points)]
    assert fit(noisy) == pytest.approx((alpha, beta), rel=0.1)
    for bad in (
        [],
        points[:1],
        [(1, 10, 1.0), (2, 20, 2.0)],
        [(1, 10, 2.0), (1, 20, 1.0)],
        [(1, 10, 0.0), (1, 20, 1.0)],
    ):
        with pytest.raises(ValueError):
            fit(bad)
