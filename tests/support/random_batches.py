"""Random batches around a sequence, for what must be the same to the bit in each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NEG_INF, NAN = float("-inf"), float("nan")


@dataclass(frozen=True)
class Sequences:
    """Draws calls of decode attention. `mask` is "keys", "causal", "holes" or "bias", or "none", which has lengths."""

    q_heads: int = 4
    kv_heads: int = 2
    q_len: int = 1
    head_dim: int = 16
    longest: int = 1400
    dtype: torch.dtype = torch.float32
    mask: str = "none"
    extras: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        dtype, extras = str(self.dtype)[6:], "-".join(self.extras)
        heads = f"H{self.q_heads}x{self.kv_heads}-L{self.q_len}-D{self.head_dim}"
        return f"{heads}-{dtype}-{self.mask}-{extras}"

    def draw(self, batch: int, capacity: int, length: int) -> dict[str, Tensor]:
        """A call with `batch` sequences, of which the first and some others have `length`; keys behind one are NaN."""

        def randn(heads: int, length: int) -> Tensor:
            return torch.randn(batch, heads, length, self.head_dim).to(self.dtype)

        lens = (torch.rand(batch) ** 2 * (self.longest + 1)).long()
        lens = torch.where((torch.rand(batch) < 0.3) | (torch.arange(batch) == 0), length, lens)
        keys = torch.arange(capacity)
        key, value = (randn(self.kv_heads, capacity) for _ in range(2))
        for x in (key, value):
            x.masked_fill_((keys >= lens[:, None])[:, None, :, None], NAN)
        given = {"query": randn(self.q_heads, self.q_len), "key": key, "value": value}
        if self.mask == "none":
            return given | {"kv_lens": lens}
        used = keys < (lens[:, None] - torch.arange(self.q_len).flip(0))[:, None, :, None]
        match self.mask:
            case "keys":
                return given | {"attn_mask": used[:, :, -1:]}
            case "causal":
                return given | {"attn_mask": used}
            case "holes":
                return given | {"attn_mask": used & (torch.rand(batch, self.q_heads, self.q_len, capacity) < 0.9)}
        bias = torch.randn(batch, self.q_heads, self.q_len, capacity)
        return given | {"attn_mask": torch.where(used, bias, NEG_INF).to(self.dtype)}

    def batches(self, n: int, most: int = 16) -> Iterator[tuple[dict[str, Any], dict[str, Any], int]]:
        """Draw a sequence alone, and `n` batches that have it at a random place, some with more room for keys."""
        torch.manual_seed(0)
        length = self.longest // 2 + int(torch.randint(self.longest // 2, ()))
        alone = self.draw(1, self.longest, length)
        for _ in range(n):
            batch = int(torch.randint(1, most + 1, ()))
            at = int(torch.randint(batch, ()))
            capacity = self.longest + 100 * int(torch.randint(3, ()))
            together = self.draw(batch, capacity, length)
            for name, x in alone.items():
                own = together[name][at]
                if name in ("key", "value"):
                    own[:, self.longest :] = NAN
                elif name == "attn_mask":
                    own[..., self.longest :] = NEG_INF if x.is_floating_point() else False
                own[(..., *(slice(n) for n in x.shape[1:]))] = x[0]
            yield alone | self.extras, together | self.extras, at


@dataclass(frozen=True)
class SharedSequences:
    """Draws calls of bifurcated attention: beside keys of their own, sequences read rows of others that they share.

    `own` has a mask. With `rows` they choose among those rows, else aligned blocks share them. With `holes` each
    sequence has a mask of its own for them, and keys behind the last one that counts are NaN.
    """

    own: Sequences
    shared: int = 900
    rows: bool = False
    holes: bool = False

    def __str__(self) -> str:
        return f"{self.own}-shared" + "-rows" * self.rows + "-holes" * self.holes

    def draw(self) -> tuple[Tensor, Tensor]:
        """Keys and values of a row, and the mask of a sequence that reads it."""
        own = self.own
        mask = torch.rand(1, own.q_heads, own.q_len, self.shared) < 0.8
        mask[..., -300:] = False
        return torch.randn(2, 1, own.kv_heads, self.shared, own.head_dim).to(own.dtype), mask

    def share(self, call: dict[str, Any], at: int, row: Tensor, mask: Tensor, stored: int) -> dict[str, Any]:
        """The call with so many rows that sequences share; sequence `at` reads `row` with `mask`."""
        batch = call["query"].shape[0]
        rows = torch.randint(stored, (batch,)) if self.rows else torch.arange(batch) * stored // batch
        segment = torch.randn(2, stored, *row.shape[2:]).to(row.dtype)
        masks = torch.rand(batch, *mask.shape[1:]) < torch.rand(batch, 1, 1, 1)
        segment[:, rows[at]], masks[at] = row[:, 0], mask[0]
        if self.holes:
            used = torch.zeros(stored, self.shared).index_add(0, rows, masks.flatten(1, 2).sum(1).float())
            behind = used.flip(1).cumsum(1).flip(1) == 0
            segment = segment.masked_fill(behind[:, None, :, None], NAN)
        own = {name: call[name] for name in ("key", "value", "attn_mask")}
        return {name: x for name, x in call.items() if name not in own} | {
            "keys": [segment[0], own["key"]],
            "values": [segment[1], own["value"]],
            "attn_masks": [masks if self.holes else None, own["attn_mask"]],
            "rows": [rows, None] if self.rows else None,
        }

    def batches(self, n: int, most: int = 16) -> Iterator[tuple[dict[str, Any], dict[str, Any], int]]:
        """As `Sequences.batches`: the sequence alone reads the same keys."""
        drawn = None
        for alone, together, at in self.own.batches(n, most):
            drawn = drawn or self.draw()
            batch = together["query"].shape[0]
            stored = int(torch.randint(1, 5, ())) if self.rows else batch // 2 if batch % 2 == 0 else 1
            yield self.share(alone, 0, *drawn, 3 if self.rows else 1), self.share(together, at, *drawn, stored), at


def with_latents(call: dict[str, Any], rank: int) -> dict[str, Any]:
    """The call of `latent_attention` whose latents and rope are the keys of a call with one kv head."""
    given = {name: x for name, x in call.items() if name not in ("query", "key", "value")}
    parts = zip(("query", "query_rope"), call["query"].split((rank, call["query"].shape[3] - rank), dim=3), strict=True)
    keys = zip(("latent", "key_rope"), call["key"].split((rank, call["key"].shape[3] - rank), dim=3), strict=True)
    return given | dict(parts) | dict(keys) | {"scale": 0.3}


def part_of(call: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """The part of a call that one of several ranks has: every `ranks`-th key, as caches shard them."""
    every = slice(rank, None, ranks)
    own = call | {name: call[name][:, :, every].contiguous() for name in ("key", "value")}
    if "attn_mask" in call:
        own["attn_mask"] = call["attn_mask"][..., every].contiguous()
    if "kv_lens" in call:
        own["kv_lens"] = (call["kv_lens"] + ranks - 1 - rank) // ranks
    return own
