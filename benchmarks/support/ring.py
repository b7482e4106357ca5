"""Ring attention, the baseline of the Tree Attention paper (arXiv 2408.04093, section 6), on gloo or NCCL.

Each rank holds a shard of K and V. The shards travel from neighbour to neighbour, while each rank attends to the one
that it holds, and merges the states as they come. A shard is sent and the next one received while the current one is
computed on, into two buffers in turn.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

import tatten

State = tuple[Tensor, Tensor]


def ring_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
    lengths: Tensor | None = None,
    home: bool = False,
) -> State:
    """Return attention of a replicated query over K and V sharded over the sequence, complete on every rank.

    Args:
        q: `[batch, q_heads, q_length, head_dim]`, the same on all ranks.
        k, v: `[batch, kv_heads, capacity, head_dim]`, this rank's shard; one capacity for all ranks.
        lengths: int32 `[ranks, batch]`, on the device of q, the same on all ranks: the keys in use of each shard.
        home: let the shards travel the full circle, in place of the rank's own: p hops, and two shards in memory at a
            time, `k`'s and `v`'s storage being one of them. This is what equations 8 and 10 count. Else a rank keeps
            its own shard and leaves out the last hop, as implementations do: p - 1 hops, three shards if p > 2.

    Returns:
        `out` as q and `lse` `[batch, q_heads, q_length]`. Each rank sums in an order of its own.
    """
    state = None
    for source, keys, values in travel(k, v, group, home):
        state = add(state, attend(q, keys, values, None if lengths is None else lengths[source]))
    return state[0].to(q.dtype), state[1]


def ring_prefill(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup | None = None) -> State:
    """Return causal attention of queries, keys and values all sharded over the sequence, by `shard_zigzag`.

    q: `[batch, q_heads, t, head_dim]`; k, v: `[batch, kv_heads, t, head_dim]`; t even. Returns the state of q's shard.
    Rank r has the chunks r and 2p - 1 - r of 2p, so that every rank computes as much in every hop.
    """
    rank, half = dist.get_rank(group), q.shape[2] // 2
    for source, keys, values in travel(k, v, group):
        if source == rank:
            state = add(None, attend(q, keys, values, causal=True))
        elif source < rank:  # the second chunk of the keys is behind all queries
            state = add(state, attend(q, keys[:, :, :half], values[:, :, :half]))
        else:  # the first chunk of the queries is before all keys
            late = add((state[0][:, :, half:], state[1][:, :, half:]), attend(q[:, :, half:], keys, values))
            for all_queries, second_half in zip(state, late, strict=True):
                all_queries[:, :, half:] = second_half
    return state[0].to(q.dtype), state[1]


def shard_zigzag(x: Tensor, rank: int, ranks: int, dim: int = 2) -> Tensor:
    """Return the chunks `rank` and `2 * ranks - 1 - rank` of `2 * ranks`."""
    if x.shape[dim] % (2 * ranks):
        raise ValueError(f"dim {dim} of `x` must be a multiple of {2 * ranks}, for {ranks} ranks, got {x.shape[dim]}")
    chunks = x.chunk(2 * ranks, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


def travel(
    k: Tensor, v: Tensor, group: dist.ProcessGroup | None = None, home: bool = False
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield `(source rank, k, v)` of each shard, this rank's first, while passing it on."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    hops = ranks if home and ranks > 1 else ranks - 1
    shard = current = (k, v) if home else (k.contiguous(), v.contiguous())
    spare = [tuple(map(torch.empty_like, shard)) for _ in range(min(hops, 1 if home else 2))]
    for hop in range(ranks):
        works: list[dist.Work] = []
        if hop < hops:
            incoming = spare.pop()
            ops = [dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % ranks) for x in current]
            ops += [dist.P2POp(dist.irecv, x, group=group, group_peer=(rank - 1) % ranks) for x in incoming]
            works = dist.batch_isend_irecv(ops)
        yield (rank - hop) % ranks, *current
        for work in works:
            work.wait()
        if hop < hops:
            if home or current is not shard:
                spare.append(current)
            current = incoming
    if home and current is not shard:
        for tensor, arrived in zip(shard, current, strict=True):
            tensor.copy_(arrived)


def add(state: State | None, part: State) -> State:
    """Merge in float32, or float64."""
    out, lse = part
    out = out.to(lse.dtype)
    return (out, lse) if state is None else tatten.merge_state(*state, out, lse)


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None, causal: bool = False) -> State:
    """Attend locally, with the lse: by a decode kernel for few queries, by cuDNN on a GPU for many."""
    if q.is_cuda and q.shape[2] > 16:
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        out, lse = cudnn(q, k, v, None, True, 0.0, causal, False)[:2]
        return out, lse.reshape(q.shape[:3])
    window = k.shape[2] if causal else None
    return tatten.decode_attention(q, k, v, kv_lens=lengths, window=window, return_lse=True)
