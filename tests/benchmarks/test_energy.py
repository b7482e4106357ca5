"""Attention is the gradient of an energy, and energies of shards add by log-sum-exp: arXiv 2408.04093, section 4.

    F(zeta) = log sum_a exp(q k_a + zeta v_a)       (equation 6; of one query over N keys it is F_dec, equation 7)
    dF / dzeta at zeta = 0 is attention             (equation 5), and F(0) is the lse

All in float64, with the scale of the scores left in, for each sequence, head and query.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from slow import slow_but
from torch import Tensor

import tatten

HEADS = [(4, 4), (8, 2), (4, 1)]
SHARDS = [0, 7, 8, 8, 37]  # the bounds of four, one of them empty


def inputs(q_heads: int, kv_heads: int, length: int = 37) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    sizes = (q_heads, 3, 16), (kv_heads, length, 16), (kv_heads, length, 24)
    q, k, v = (torch.randn(2, *size, generator=g, dtype=torch.float64) for size in sizes)
    return q, k, v


def energy(q: Tensor, k: Tensor, v: Tensor, zeta: Tensor) -> Tensor:
    """F, `[batch, q_heads, q_length]`; zeta is `[batch, q_heads, q_length, value_dim]`."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1).mT for x in (k, v))
    return (q @ k * q.shape[-1] ** -0.5 + zeta @ v).logsumexp(-1)


def source(q: Tensor, v: Tensor, spread: float = 0.0) -> Tensor:
    g = torch.Generator().manual_seed(1)
    zeta = spread * torch.randn(*q.shape[:3], v.shape[3], generator=g, dtype=torch.float64)
    return zeta.requires_grad_()


def shards(x: Tensor) -> list[Tensor]:
    return [x[:, :, a:b] for a, b in itertools.pairwise(SHARDS)]


def gradient(f: Tensor, zeta: Tensor) -> Tensor:
    """Each entry of f depends on its own row of zeta alone."""
    return torch.autograd.grad(f.sum(), zeta)[0]


@pytest.mark.parametrize("heads", HEADS)
def test_attention_is_the_gradient(heads: tuple[int, int]) -> None:
    q, k, v = inputs(*heads)
    zeta = source(q, v)
    f = energy(q, k, v, zeta)
    out, lse = tatten.decode_attention(q, k, v, return_lse=True)
    assert out.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(out, gradient(f, zeta))
    torch.testing.assert_close(lse, f.detach())


def test_the_gradient_is_a_mean_of_values() -> None:
    q, k, v = inputs(4, 2)
    zeta = source(q, v)
    v = v[:, :, :1].expand_as(v)
    expected = v[:, :, :1].repeat_interleave(2, dim=1).expand(*q.shape[:3], v.shape[3])
    torch.testing.assert_close(gradient(energy(q, k, v, zeta), zeta), expected)


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_energies_of_shards_add_by_logsumexp(spread: float) -> None:
    """For any source, in any order, and so do their gradients."""
    q, k, v = inputs(8, 2)
    zeta = source(q, v, spread)
    whole = energy(q, k, v, zeta)
    parts = [energy(q, *part, zeta) for part in zip(shards(k), shards(v), strict=True)]
    chain = torch.logaddexp(torch.logaddexp(torch.logaddexp(parts[0], parts[1]), parts[2]), parts[3])
    tree = torch.logaddexp(torch.logaddexp(parts[3], parts[1]), torch.logaddexp(parts[2], parts[0]))
    for f in (torch.stack(parts).logsumexp(0), chain, tree):
        torch.testing.assert_close(f, whole)
        torch.testing.assert_close(
            torch.autograd.grad(f.sum(), zeta, retain_graph=True)[0],
            torch.autograd.grad(whole.sum(), zeta, retain_graph=True)[0],
        )


@pytest.mark.parametrize("heads", HEADS)
def test_merged_states_are_the_gradient(heads: tuple[int, int]) -> None:
    q, k, v = inputs(*heads)
    zeta = source(q, v)
    f = torch.stack([energy(q, *part, zeta) for part in zip(shards(k), shards(v), strict=True)]).logsumexp(0)
    states = [tatten.decode_attention(q, *part, return_lse=True) for part in zip(shards(k), shards(v), strict=True)]
    out, lse = tatten.merge_states(*(torch.stack(x) for x in zip(*states, strict=True)))
    torch.testing.assert_close(out, gradient(f, zeta))
    torch.testing.assert_close(lse, f.detach())


def merged_on_ranks(strategy: str) -> tuple[Tensor, Tensor]:
    q, k, v = inputs(8, 2)
    rank = dist.get_rank()
    state = tatten.decode_attention(q, shards(k)[rank], shards(v)[rank], return_lse=True)
    return tatten.tree_merge(*state, dist.group.WORLD, strategy=strategy)


@pytest.mark.drawn(2, "whole programs")
@pytest.mark.parametrize("strategy", slow_but(["all_reduce"], ["all_reduce", "all_gather"]))
def test_tree_merge_is_the_gradient(strategy: str) -> None:
    """Algorithm 3 on four ranks, and the packed form of it."""
    q, k, v = inputs(8, 2)
    zeta = source(q, v)
    f = energy(q, k, v, zeta)
    expected = gradient(f, zeta)
    for out, lse in run_ranks(4, merged_on_ranks, strategy):
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, f.detach())


def test_the_largest_score_may_be_taken_out() -> None:
    """Appendix F: the safe softmax, where scores would overflow, has the same gradient."""
    q, k, v = inputs(4, 4)
    zeta = source(q, v)
    out = tatten.decode_attention(1e3 * q, k, v)
    scores = 1e3 * q @ k.mT * q.shape[-1] ** -0.5
    assert scores.exp().isinf().any()
    shifted = (scores - scores.amax(-1, keepdim=True) + zeta @ v.mT).exp().sum(-1).log()
    torch.testing.assert_close(out, gradient(shifted, zeta))
