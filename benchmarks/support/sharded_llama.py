"""A decoder in the shape of Llama whose KV cache is sharded over ranks, just enough of it for measurements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from support.ring import ring_prefill, shard_zigzag
from support.together import Ranks


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder like Llama; the defaults are Llama-3.1-8B's, but for the context."""

    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 128256
    theta: float = 5e5


class Decoder:
    """A Llama with random weights, the same on all ranks, and a KV cache that is sharded over them.

    Each rank has its part of the prompt, by `shard_zigzag`, and room for its share of the new tokens. Lengths and the
    turn of the next token live on the device, so that a captured step can be replayed.
    """

    def __init__(self, sizes: Sizes, ranks: Ranks, dtype: torch.dtype) -> None:
        self.sizes, self.ranks, self.dtype = sizes, ranks, dtype
        s, g = sizes, torch.Generator(ranks.device).manual_seed(0)

        def weight(out: int, of: int) -> Tensor:
            return torch.randn(out, of, generator=g, device=ranks.device, dtype=dtype).mul_(of**-0.5)

        self.embedding, self.head = weight(s.vocabulary, s.hidden), weight(s.vocabulary, s.hidden)
        qkv = (s.q_heads + 2 * s.kv_heads) * s.head_dim
        self.layers = [
            (
                weight(qkv, s.hidden),
                weight(s.hidden, s.q_heads * s.head_dim),
                weight(2 * s.intermediate, s.hidden),
                weight(s.hidden, s.intermediate),
            )
            for _ in range(s.layers)
        ]
        exponents = torch.arange(0, s.head_dim, 2, device=ranks.device, dtype=torch.float32) / s.head_dim
        self.frequencies = s.theta**-exponents

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Apply the rotary embedding to `[batch, heads, length, head_dim]`; positions are `[length]`."""
        angles = positions[:, None] * self.frequencies
        cos, sin = (f(angles).to(x.dtype) for f in (torch.cos, torch.sin))
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def run(self, tokens: Tensor, positions: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        """Return the likeliest token `[batch, 1]` after the last of `tokens` `[batch, length]`."""
        s = self.sizes
        x = F.embedding(tokens, self.embedding)
        for layer, (qkv, project, up, down) in enumerate(self.layers):
            heads = (F.rms_norm(x, (s.hidden,)) @ qkv.T).unflatten(-1, (-1, s.head_dim)).transpose(1, 2)
            q, k, v = heads.split((s.q_heads, s.kv_heads, s.kv_heads), dim=1)
            q, k = self.rotate(q, positions), self.rotate(k, positions)
            x = x + attention(layer, q, k, v).transpose(1, 2).flatten(2) @ project.T
            gate, value = (F.rms_norm(x, (s.hidden,)) @ up.T).chunk(2, dim=-1)
            x = x + (F.silu(gate) * value) @ down.T
        return (F.rms_norm(x[:, -1:], (s.hidden,)) @ self.head.T).argmax(-1)

    def allocate(self, prompt: int, new: int, batch: int = 1) -> None:
        s, n, device = self.sizes, self.ranks.size, self.ranks.device
        capacity = prompt // n + -(-new // n) + 1
        shape = 2, s.layers, batch, s.kv_heads, capacity, s.head_dim
        self.keys, self.values = torch.zeros(shape, device=device, dtype=self.dtype)
        self.prompt = prompt
        self.first = torch.empty(batch, 1, dtype=torch.int64, device=device)
        self.token = torch.empty_like(self.first)
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(n, batch, dtype=torch.int32, device=device)

    def prefill(self, tokens: Tensor) -> None:
        """Fill the cache from the whole prompt `[batch, length]`, of which this rank computes its part."""
        rank, n = self.ranks.rank, self.ranks.size
        positions = shard_zigzag(torch.arange(self.prompt, device=tokens.device), rank, n, dim=0)

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.keys[layer, :, :, : k.shape[2]] = k
            self.values[layer, :, :, : v.shape[2]] = v
            return ring_prefill(q, k, v, self.ranks.group)[0]

        self.first.copy_(self.run(shard_zigzag(tokens, rank, n, dim=1), positions, attention))
        dist.broadcast(self.first, 0, self.ranks.group)  # the last token of the prompt is on rank 0

    def restart(self) -> None:
        """Go back to the end of the prompt."""
        self.token.copy_(self.first)
        self.turn.zero_()
        self.lengths.fill_(self.prompt // self.ranks.size)

    def step(self, merged: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Return the next token; `merged` attends from q to this rank's k and v, and those of the others."""
        rank, n = self.ranks.rank, self.ranks.size
        # All ranks write the token at their next slot; those whose length does not grow overwrite it later.
        slot = self.lengths[rank, :1].long()
        self.lengths.index_add_(0, self.turn % n, torch.ones_like(self.lengths[:1]))

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.keys[layer].index_copy_(2, slot, k)
            self.values[layer].index_copy_(2, slot, v)
            return merged(q, self.keys[layer], self.values[layer], self.lengths)

        self.token.copy_(self.run(self.token, self.turn + self.prompt, attention))
        dist.broadcast(self.token, 0, self.ranks.group)  # the ring sums in another order on each rank
        self.turn += 1
        return self.token
