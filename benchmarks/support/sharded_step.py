"""A decode step of samples that share a prefix, in the shape of Llama: on one GPU, or with its KV sharded over ranks.

The step of a compiled model with a shared-prefix cache, written out: Inductor compiles the parts between attention, and
attention is the ops of tatten. Keys and values are random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import tatten
from support.sharded_llama import Decoder
from support.together import Ranks

ARMS = "one", "sequence", "heads"
KV = list[tuple[Tensor, Tensor]]  # keys and values of each layer


@dataclass(frozen=True)
class Samples:
    """`batch` samples of one prompt, of which the last of `suffix` tokens, a multiple of the ranks, is decoded."""

    prefix: int
    batch: int
    suffix: int


def before(x: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, q_heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    """Return queries, keys and values of a layer, rotated."""
    heads = (F.rms_norm(x, x.shape[-1:]) @ qkv.T).unflatten(-1, (q_heads + 2 * kv_heads, -1)).transpose(1, 2)
    q, k, v = heads.split((q_heads, kv_heads, kv_heads), dim=1)

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    return rotate(q), rotate(k), v


def store(cache: Tensor, new: Tensor, slot: Tensor, here: Tensor) -> None:
    """Write a token on the rank where it belongs; on the others keep the slot as it is."""
    cache.index_copy_(2, slot, torch.where(here, new, cache.index_select(2, slot)))


def append(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, slot: Tensor, here: Tensor) -> None:
    store(keys, k, slot, here)
    store(values, v, slot, here)


def project(out: Tensor, weight: Tensor) -> Tensor:
    return out.transpose(1, 2).flatten(2) @ weight.T


def after(x: Tensor, projected: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return the output of a layer, after the projection of its attention."""
    x = x + projected
    gate, value = (F.rms_norm(x, x.shape[-1:]) @ up.T).chunk(2, dim=-1)
    return x + (F.silu(gate) * value) @ down.T


def last(x: Tensor, head: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:]) @ head.T


class SampleStep:
    """The step of one arm: `one` GPU alone, the KV sharded over the `sequence`, or attention and its KV over `heads`.

    Only attention differs: over heads, its weights are sharded with it, as in tensor parallelism. The rest is
    replicated.
    """

    def __init__(self, model: Decoder, ranks: Ranks, arm: str) -> None:
        self.model, self.ranks, self.arm = model, ranks, arm
        s, n, rank = model.sizes, ranks.size, ranks.rank
        self.q_heads, self.kv_heads = s.q_heads, s.kv_heads
        self.weights = [(qkv, project) for qkv, project, _, _ in model.layers]
        if arm == "heads":
            self.q_heads, self.kv_heads = s.q_heads // n, s.kv_heads // n
            self.weights = [self._heads_of_rank(*x, n, rank) for x in self.weights]
        compiled = torch.compile if ranks.device == "cuda" else lambda fn, **_: fn
        self.before, self.append, self.project, self.after, self.last = (
            compiled(fn, dynamic=False, fullgraph=True) for fn in (before, append, project, after, last)
        )

    def _heads_of_rank(self, qkv: Tensor, project: Tensor, n: int, rank: int) -> tuple[Tensor, Tensor]:
        s = self.model.sizes
        parts = qkv.split([heads * s.head_dim for heads in (s.q_heads, s.kv_heads, s.kv_heads)])
        qkv_shard = torch.cat([x.chunk(n)[rank] for x in parts])
        return qkv_shard, project.chunk(n, dim=1)[rank].contiguous()

    def part_of_rank(self, kv: KV) -> KV:
        """Return this rank's part of keys and values `[batch, kv_heads, length, d]`; position p is on rank p mod n."""
        n, rank = self.ranks.size, self.ranks.rank
        if self.arm == "heads":
            return [(k.chunk(n, 1)[rank].contiguous(), v.chunk(n, 1)[rank].contiguous()) for k, v in kv]
        if self.arm == "sequence":
            return [(k[:, :, rank::n].contiguous(), v[:, :, rank::n].contiguous()) for k, v in kv]
        return [(k.clone(), v.clone()) for k, v in kv]

    def bytes(self, samples: Samples) -> int:
        """Return the bytes of weights, keys and values that this rank reads, each once."""
        s = self.model.sizes
        weights = [*self.weights, *(layer[2:] for layer in self.model.layers), (self.model.head,)]
        shards = 1 if self.arm == "one" else self.ranks.size
        tokens = samples.prefix + samples.batch * samples.suffix
        kv = tokens * 2 * s.layers * s.kv_heads * s.head_dim * self.model.dtype.itemsize
        return sum(x.nbytes for xs in weights for x in xs) + kv // shards

    def make(self, samples: Samples, prefix: KV, suffix: KV) -> Callable[[], Tensor]:
        """Return a function that decodes the last token of each suffix to logits `[batch, 1, vocabulary]`."""
        model, device = self.model, self.ranks.device
        sharded, n = self.arm == "sequence", self.ranks.size
        kvs = [
            (*of_prefix, *of_suffix)
            for of_prefix, of_suffix in zip(
                self.part_of_rank(prefix) if self.arm != "one" else prefix, self.part_of_rank(suffix), strict=True
            )
        ]
        position = samples.suffix - 1  # of the suffix; interleaving begins anew at each segment here
        slot = torch.tensor([position // n if sharded else position], device=device)
        here = torch.tensor(not sharded or position % n == self.ranks.rank, device=device)
        tokens = torch.arange(1, samples.batch + 1, device=device).unsqueeze(1) % model.sizes.vocabulary
        angles = torch.tensor([samples.prefix + position], device=device)[:, None] * model.frequencies
        cos, sin = angles.cos().to(model.dtype), angles.sin().to(model.dtype)
        mask = torch.ones(samples.batch, 1, 1, kvs[0][2].shape[2], dtype=torch.bool, device=device)
        ops = torch.ops.tatten

        def step() -> Tensor:
            x = F.embedding(tokens, model.embedding)
            blocks = ops.block_mask.default(mask, samples.batch)  # once for all layers
            layers = zip(self.weights, model.layers, kvs, strict=True)
            for (qkv, output), (_, _, up, down), (pk, pv, keys, values) in layers:
                q, k, v = self.before(x, qkv, cos, sin, self.q_heads, self.kv_heads)
                self.append(keys, values, k, v, slot, here)
                masks = [None, mask], [None, blocks]
                out, lse = ops.bifurcated_attention.default(q, [pk, keys], [pv, values], *masks, None)
                if sharded:
                    out, _ = tatten.tree_merge(out, lse, self.ranks.group)
                projected = self.project(out, output)
                if self.arm == "heads":
                    dist.all_reduce(projected, group=self.ranks.group)
                x = self.after(x, projected, up, down)
            return self.last(x, model.head)

        return step
