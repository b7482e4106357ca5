"""Picks among keys that are sharded over ranks: each rank attends to those that it holds, and the states merge."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import tatten
from tatten.ops.picks import counted_from, picked_mask
from tatten.ops.reference import decode_attention_reference, latent_attention_reference

B, H, KV, L, S, D, RANK, K = 3, 4, 2, 2, 37, 16, 24, 9


def tensors() -> tuple[Tensor, ...]:
    """Query, key, value, latents, a mask, and picks, of which some name no key, and one query names none."""
    rng = torch.Generator().manual_seed(5)
    shapes = (B, H, L, D), (B, KV, S, D), (B, KV, S, D), (B, 1, S, RANK), (B, H, L, RANK)
    query, key, value, latent, query_of_latents = (torch.randn(x, generator=rng, dtype=torch.float64) for x in shapes)
    mask = torch.rand(B, 1, L, S, generator=rng) < 0.8
    indices = torch.rand(B, 1, L, S + 4, generator=rng).argsort(-1)[..., :K] - 2
    indices[0, :, 0] = -1
    return query, key, value, latent, query_of_latents, mask, indices


def test_counted_from() -> None:
    indices = torch.arange(-3, S + 3)
    for first, step in [(0, 1), (5, 1), (1, 2), (7, 3)]:
        keys = torch.arange(S)[first::step]
        named = counted_from(indices, first, step)
        inside = (named >= 0) & (named < len(keys))
        assert torch.equal(keys[named[inside]], indices[inside])
        assert inside.sum() == len(keys)


def merged(layout: str, op: str) -> float:
    query, key, value, latent, query_of_latents, mask, indices = tensors()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    each = -(-S // ranks)
    own = slice(rank, None, ranks) if layout == "striped" else slice(rank * each, (rank + 1) * each)
    own_indices = counted_from(indices, own.start, own.step or 1)
    columns = mask[..., own]
    if op == "decode_attention":
        state = tatten.decode_attention(
            query, key[:, :, own], value[:, :, own], attn_mask=columns, indices=own_indices, return_lse=True
        )
        picked = picked_mask(indices, S, 1, H) & mask
        want = decode_attention_reference(query, key, value, picked)
    else:
        state = tatten.latent_attention(
            query_of_latents, None, latent[:, :, own], None, scale=0.2,
            attn_mask=columns, indices=own_indices, return_lse=True,
        )  # fmt: skip
        picked = picked_mask(indices, S, 1, H) & mask
        want = latent_attention_reference(query_of_latents, None, latent, None, picked, scale=0.2)
    out, lse = tatten.tree_merge(*state, dist.group.WORLD)
    assert torch.equal(lse == -torch.inf, want[1] == -torch.inf)
    assert (lse[0, :, 0] == -torch.inf).all()
    assert not out[0, :, 0].any()
    return (out - want[0]).abs().max().item()


@pytest.mark.parametrize("op", ["decode_attention", "latent_attention"])
@pytest.mark.parametrize("layout", ["striped", "chunked"])
def test_each_rank_attends_to_the_picks_that_it_holds(layout: str, op: str) -> None:
    assert max(run_ranks(2, merged, layout, op)) < 1e-12


def refused() -> list[str]:
    """Ops take local parts: the message for a DTensor names its argument."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("kv",))
    query, key, value, latent, query_of_latents, _, indices = tensors()
    sharded = [distribute_tensor(x, mesh, [Shard(2)]) for x in (key, value, latent)]
    picks = distribute_tensor(indices, mesh, [Replicate()])
    table = distribute_tensor(torch.zeros(len(query), 1, dtype=torch.int32), mesh, [Replicate()])
    messages = []
    for call in (
        lambda: tatten.decode_attention(query, sharded[0], sharded[1], indices=indices),
        lambda: tatten.decode_attention(query, key, sharded[1], indices=indices, distinct_indices=True),
        lambda: tatten.decode_attention(query, key, value, indices=picks, distinct_indices=True),
        lambda: tatten.latent_attention(query_of_latents, None, sharded[2], None, scale=0.2, indices=indices),
        lambda: tatten.latent_attention(query_of_latents, None, latent, None, scale=0.2, indices=picks),
        lambda: tatten.bifurcated_attention(query, [sharded[0]], [value], indices=[indices]),
        lambda: tatten.bifurcated_attention(query, [key], [value], indices=[picks], distinct_indices=True),
        lambda: tatten.decode_attention(query, key, value, block_table=table),
    ):
        with pytest.raises(TypeError) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_dtensors_are_refused_by_name() -> None:
    names = ["key", "value", "indices", "latent", "indices", "keys[0]", "indices[0]", "block_table"]
    for messages in run_ranks(2, refused):
        assert [x.split("` must be a plain Tensor, got a DTensor")[0] for x in messages] == [f"`{x}" for x in names]
