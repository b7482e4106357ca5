"""One query over a KV that is sharded over ranks: shapes, arms, and errors, for `tree_vs_ring.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import tatten
from support.errors import relative_error
from support.ring import attend, ring_decode
from support.together import Ranks
from tatten.ops.reference import decode_attention_reference

CHUNK = 32 << 10  # keys that are upcast to float64 at a time


@dataclass(frozen=True)
class Shape:
    """Decode attention of one query over `length` keys, of which each of `ranks` has its part."""

    ranks: int
    length: int
    q_heads: int
    kv_heads: int
    batch: int = 1
    head_dim: int = 128

    @property
    def kv(self) -> tuple[int, ...]:
        return self.batch, self.kv_heads, self.length // self.ranks, self.head_dim

    @property
    def q(self) -> tuple[int, ...]:
        return self.batch, self.q_heads, 1, self.head_dim

    @property
    def btd(self) -> int:
        return math.prod(self.kv)

    @property
    def bd(self) -> int:
        return math.prod(self.q)

    @property
    def bn(self) -> int:
        return self.batch * self.q_heads


def arms(ranks: Ranks, strategies: list[str]) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Return attention of q and this rank's k and v, by name."""

    def tree(strategy: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return lambda q, k, v: tatten.tree_merge(*attend(q, k, v), ranks.group, strategy=strategy)[0]

    return {
        "local": lambda q, k, v: attend(q, k, v)[0],
        **{f"tree:{x}": tree(x) for x in strategies},
        "ring": lambda q, k, v: ring_decode(q, k, v, ranks.group)[0],
        "ring_home": lambda q, k, v: ring_decode(q, k, v, ranks.group, home=True)[0],
    }


def make_inputs(s: Shape, ranks: Ranks, dtype: torch.dtype, copies: int = 1) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the same queries on all ranks, and each rank's own keys and values."""
    of_rank = torch.Generator(ranks.device).manual_seed(1 + ranks.rank)
    shared = torch.Generator(ranks.device).manual_seed(0)

    def randn(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator, device=ranks.device, dtype=dtype)

    return [(randn(s.q, shared), randn(s.kv, of_rank), randn(s.kv, of_rank)) for _ in range(copies)]


def error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, ranks: Ranks | None) -> float:
    """Return the relative error against float64, over the shards of all ranks, or this rank's alone without `ranks`."""
    chunks = zip(k.split(CHUNK, dim=2), v.split(CHUNK, dim=2), strict=True)
    outs, lses = map(torch.stack, zip(*(decode_attention_reference(q, *chunk) for chunk in chunks), strict=True))
    if ranks:
        gathered = []
        for x in (outs, lses):
            every = [torch.empty_like(x) for _ in range(ranks.size)]
            dist.all_gather(every, x, ranks.group)
            gathered.append(torch.cat(every))
        outs, lses = gathered
    exact = (lses.softmax(0).unsqueeze(-1) * outs).sum(0)
    return relative_error(out, exact)


def decoders(ranks: Ranks, strategies: list[str]) -> dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]]:
    def tree(strategy: str) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        return lambda q, k, v, lengths: tatten.tree_merge(
            *attend(q, k, v, lengths[ranks.rank]), ranks.group, strategy=strategy
        )[0]

    return {
        **{f"tree:{x}": tree(x) for x in strategies},
        "ring": lambda q, k, v, lengths: ring_decode(q, k, v, ranks.group, lengths)[0],
    }
