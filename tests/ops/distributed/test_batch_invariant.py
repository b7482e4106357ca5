"""Attention to keys of which each rank has some, and its merge: a sequence has the same bits in every batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from random_batches import Sequences, part_of
from ranks import run_ranks
from slow import slow_but
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import tatten
from tatten.ops.distributed import tree_merge

CALLS = [
    Sequences(q_heads=3, kv_heads=3, head_dim=23),
    Sequences(mask="holes", q_len=3, dtype=torch.bfloat16),
    Sequences(mask="bias", q_heads=1, kv_heads=1, dtype=torch.float64),
]


def attend(call: dict[str, Any], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    own = part_of(call, dist.get_rank(), dist.get_world_size())
    state = tatten.decode_attention(**own, batch_invariant=True, return_lse=True)
    return tatten.tree_merge(*state, init_device_mesh("cpu", shape), batch_invariant=True)


def differences(call: Sequences, shape: tuple[int, ...]) -> int:
    """In how many of 20 batches a sequence has other bits than alone."""
    want, found = None, 0
    for alone, together, at in call.batches(20):
        want = want or attend(alone, shape)
        found += not all(torch.equal(x[at], y[0]) for x, y in zip(attend(together, shape), want, strict=True))
    return found


@pytest.mark.drawn(1, "bits in every batch")
@pytest.mark.parametrize("mesh", slow_but(["2"], ["2", "4", "2 x 2"]))
def test_a_sequence_has_the_same_bits_in_every_batch(mesh: str) -> None:
    shape = tuple(map(int, mesh.split(" x ")))
    ranks = math.prod(shape)
    for call in CALLS:
        assert run_ranks(ranks, differences, call, shape) == [0] * ranks


def other_bits(merge: Callable[[Tensor, Tensor], Sequence[Tensor]], states: tuple[Tensor, Tensor], dim: int) -> int:
    """How many of 16 sequences, along `dim`, have other bits when all are merged than when each is merged alone."""
    alone = [merge(*each) for each in zip(*(x.split(1, dim) for x in states), strict=True)]
    return sum(
        not all(torch.equal(x[i], y[0]) for x, y in zip(together, own, strict=True))
        for together in [merge(*states)]
        for i, own in enumerate(alone)
    )


def states(*ranks: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(sum(ranks))
    return torch.randn(*ranks, 16, 6, 1, 23, generator=rng), torch.randn(*ranks, 16, 6, 1, generator=rng) * 5


def merged_otherwise(scatter: bool) -> int:
    merge = functools.partial(tatten.tree_merge, scatter_heads=scatter, batch_invariant=True)
    return other_bits(lambda *state: merge(*state, dist.group.WORLD), states(), 0)


@pytest.mark.parametrize("scatter", [False, True])
def test_each_sequence_is_merged_by_itself(scatter: bool) -> None:
    assert run_ranks(2, merged_otherwise, scatter) == [0, 0]
    merge = torch.ops.tatten.merge_states.default
    assert other_bits(functools.partial(merge, batch_invariant=True), states(8), 1) == 0
    assert other_bits(merge, states(8), 1), "these states would not show it if nothing were done"


def test_one_strategy_serves_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (torch.empty(batch, 32, 1, 128, device="meta") for batch in (1, 10_000))
    for reason, strategy in (None, "push"), ("another node", "all_gather"):
        monkeypatch.setattr(tree_merge, "push_unsupported_reason", lambda *_, reason=reason: reason)
        for scatter in (False, True):
            found = [tree_merge.fastest(x, x[..., 0], "0", 8, scatter, batch_invariant=True) for x in (small, large)]
            assert found == [strategy, strategy]


def test_what_cannot_be_invariant_is_an_error() -> None:
    state = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1)
    with pytest.raises(ValueError, match=r"`strategy` must be 'auto', 'push' or 'all_gather' with .* got 'all_reduce'"):
        tree_merge.tree_merge_op(*state, "0", 2, 0, "all_reduce", batch_invariant=True)
