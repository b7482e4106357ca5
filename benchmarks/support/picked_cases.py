"""The calls that `sparse.py` times: attention of one query to the keys that a top-k picked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from support.decode_cases import L2

PICKED_KEYS = 2048
RUN = 16  # neighbours in a row, where picks are clustered
RANK, ROPE = 512, 64
SCALE = (128 + 64) ** -0.5  # of DeepSeek-V3's keys


@dataclass(frozen=True)
class Shape:
    """One call of a decode step.

    Attributes:
        kv_heads: 0 stands for latents of rank 512 with a rope of 64.
        picks: "random", "clustered" in runs, or "blocks", of 128 keys for each kv head.
    """

    heads: int
    batch: int
    length: int
    picks: str
    dtype: torch.dtype = torch.bfloat16
    kv_heads: int = 0
    head_dim: int = 128

    @property
    def row_bytes(self) -> int:
        """The stored bytes of each key."""
        return self.dtype.itemsize * (2 * self.kv_heads * self.head_dim or RANK + ROPE)

    @property
    def picked_bytes(self) -> int:
        return self.batch * PICKED_KEYS * self.row_bytes

    @property
    def index_block(self) -> int:
        return 128 if self.picks == "blocks" else 1


class Inputs(NamedTuple):
    """Tensors of a call; `key_rope` and `query_rope` are None unless the keys are latents."""

    query: Tensor
    key: Tensor
    value: Tensor
    query_rope: Tensor | None
    key_rope: Tensor | None
    indices: Tensor
    mask: Tensor


def shapes(device: str) -> list[Shape]:
    k = 1024
    if device == "cpu":
        latents = [
            Shape(heads, 1, n * k, picks, dtype)
            for dtype in (torch.float32, torch.bfloat16)
            for heads in (16, 128)
            for n in (32, 128)
            for picks in ("random", "clustered")
        ]
        return [*latents, Shape(64, 1, 32 * k, "blocks", torch.float32, 4)]
    batches = (1, 8, 64)
    latents = [
        Shape(heads, batch, n * k, picks)
        for heads in (128, 64, 16)
        for batch in batches
        for n in (8, 128)
        for picks in ("random", "clustered")
    ]
    return [*latents, *(Shape(64, batch, 128 * k, "blocks", kv_heads=4) for batch in batches)]


def draw(s: Shape, device: str) -> Tensor:
    """Return indices for one call."""
    heads = s.kv_heads if s.picks == "blocks" else 1
    size = {"random": 1, "clustered": RUN, "blocks": s.index_block}[s.picks]
    starts = torch.rand(s.batch, heads, 1, s.length // size, device=device).topk(PICKED_KEYS // size).indices
    if s.picks == "clustered":
        starts = (starts.unsqueeze(-1) * RUN + torch.arange(RUN, device=device)).flatten(3)
    return starts.to(torch.int32)


def keys_of(s: Shape, indices: Tensor) -> Tensor:
    """Return the picked keys, `[batch, heads, picks]`."""
    each = torch.arange(s.index_block, device=indices.device)
    return (indices[:, :, 0].long().unsqueeze(-1) * s.index_block + each).flatten(2)


def calls(s: Shape, device: str) -> list[Inputs]:
    """Return inputs of several calls, more in total than the cache holds. They share large caches."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(s.batch, *shape, device=device, dtype=torch.float32).to(s.dtype)

    cache_bytes = s.batch * s.length * s.row_bytes
    n_caches, n_calls = (-(-L2[device] // size) for size in (cache_bytes, s.picked_bytes))
    if s.kv_heads:
        stored = [(*(randn(s.kv_heads, s.length, s.head_dim) for _ in range(2)), None) for _ in range(n_caches)]
    else:
        latents = [(randn(1, s.length, RANK), randn(1, s.length, ROPE)) for _ in range(n_caches)]
        stored = [(latent, latent, rope) for latent, rope in latents]
    inputs = []
    for i in range(min(32, max(8 if device == "cuda" else 1, n_calls, n_caches))):
        indices, (key, value, rope) = draw(s, device), stored[i % n_caches]
        keys = keys_of(s, indices)
        mask = torch.zeros((*keys.shape[:2], s.length), dtype=torch.bool, device=device).scatter(2, keys, True)
        mask = mask.repeat_interleave(s.heads // s.kv_heads if s.picks == "blocks" else 1, dim=1).unsqueeze(2)
        query = randn(s.heads, 1, key.shape[3])
        inputs.append(Inputs(query, key, value, None if rope is None else randn(s.heads, 1, ROPE), rope, indices, mask))
    return inputs
