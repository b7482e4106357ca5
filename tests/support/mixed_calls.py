"""Random calls of `paged_attention`, each with the call of `decode_attention` whose sequences are its tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from op_bounds import assert_within_bound
from op_masks import Choose
from paged_calls import PAGES, POOLS, TINY_PAGES, entries_with_stale_ones, make_pools, part_of_a_wide_table
from torch import Tensor

Q_LENS, PASTS = (1, 0, 2, 3, 5, 16, 17, 33, 64, 70), (0, 1, 7, 63, 64, 100, -1, -3, -1000)
TINY_Q_LENS, TINY_PASTS = (1, 0, 2, 5, 9, 17, 40), (0, 1, 7, 33, 70, -1, -3, -1000)
HEADS = ((4, 2), (1, 1), (4, 1), (6, 2), (3, 3), (20, 1))


@dataclass(frozen=True)
class MixedBatch:
    """A call, as data.

    Attributes:
        sequences: the number of queries of each, and how many keys it has before them; fewer than 0 leave queries
            without keys.
        padding: tokens after those of all sequences.
        narrow: "" or a dtype of 8 bits; `scaled`: "", "head" or "key".
        pools: see `paged_calls.make_pools`.
        layout: of the queries.
        missing: whether some entries within a length name no page.
        shared: whether the sequences have pages in common.
    """

    sequences: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (4, 2)
    dtype: torch.dtype = torch.float32
    dims: tuple[int, int] = (8, 8)
    page: int = 16
    pools: str = "apart"
    padding: int = 0
    window: int | None = None
    softcap: float | None = None
    sinks: str = ""
    scale: float | None = None
    narrow: str = ""
    scaled: str = ""
    layout: str = "dense"
    lens: torch.dtype = torch.int32
    spare_columns: int = 0
    missing: bool = False
    shared: bool = False
    wide_table: bool = False
    seed: int = 0

    @property
    def lengths(self) -> list[int]:
        return [max(0, q_len + past) for q_len, past in self.sequences]

    @property
    def used(self) -> int:
        """The tokens of all sequences."""
        return sum(q_len for q_len, _ in self.sequences)

    def inputs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments of the op, and those of `decode_attention` for its tokens, without padding, over keys in order."""
        generator = torch.Generator().manual_seed(self.seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        batch, (q_heads, kv_heads), lengths = len(self.sequences), self.heads, self.lengths
        columns = -(-max(lengths) // self.page) + self.spare_columns
        n_pages = batch * columns + 3
        table = torch.randperm(n_pages, generator=generator)[: batch * columns].view(batch, columns)
        if self.shared:
            table[1:, :2] = table[:1, :2]
        named = torch.ones(batch, columns, dtype=torch.bool)
        if self.missing:
            named = torch.rand(batch, columns, generator=generator) < 0.7
        keys = torch.arange(columns * self.page)
        of_key, named_keys = (x.repeat_interleave(self.page, dim=1) for x in (table, named))
        firsts = [0 if self.window is None else max(0, n - q - self.window + 1) for n, (q, _) in self._lengths_and_q()]
        reached = (keys >= torch.tensor(firsts)[:, None]) & (keys < torch.tensor(lengths)[:, None]) & named_keys
        read = torch.zeros(n_pages, self.page, dtype=torch.bool)
        read[of_key[reached], (keys % self.page).expand(batch, -1)[reached]] = True

        kv_dtype = getattr(torch, self.narrow) if self.narrow else self.dtype
        pools = make_pools(self.pools, n_pages, self.page, kv_heads, self.dims, kv_dtype)
        scales: dict[str, Any] = {}
        in_order = []
        for pool, name in zip(pools, ("key", "value"), strict=True):
            size = 20 if self.scaled else 3  # larger ones without scales would leave weights that float32 flushes to 0
            numbers = randn(*pool.shape) * (size if self.narrow == "int8" else 1)
            pool.copy_(torch.where(read[..., None, None], numbers, 97 if self.narrow else torch.nan))
            x = pool[of_key, keys % self.page]
            if self.scaled:
                shape = (n_pages, self.page, kv_heads) if self.scaled == "key" else (kv_heads,)
                factors = torch.rand(shape, generator=generator) / (20 if self.narrow == "int8" else 1)
                if self.scaled == "key":
                    x = x.double() * factors[of_key, keys % self.page][..., None].double()
                    factors = factors.masked_fill(~read[..., None], torch.nan).mT.contiguous().mT
                scales[f"{name}_scale"] = factors
            x = x.transpose(1, 2)
            in_order.append(
                x if self.narrow and self.scaled != "key" else x.to(torch.float64 if self.narrow else x.dtype)
            )

        n_tokens = self.used + self.padding
        query = randn(n_tokens, q_heads, self.dims[0]).to(self.dtype)
        if self.layout == "heads_first":
            query = query.transpose(0, 1).contiguous().transpose(0, 1)
        elif self.layout == "columns":
            query = query.mT.contiguous().mT
        elif self.layout == "sliced":
            query = torch.cat((query, query, query), dim=1)[:, q_heads : 2 * q_heads]
        starts = torch.tensor([0, *(q for q, _ in self.sequences)]).cumsum(0).int()
        beyond = torch.arange(columns) * self.page >= torch.tensor(lengths)[:, None]
        entries = entries_with_stale_ones(table, beyond, named, n_pages, generator)
        if self.wide_table:
            entries = part_of_a_wide_table(entries)
        variant: dict[str, Any] = {"scale": self.scale, "window": self.window, "softcap": self.softcap, **scales}
        if self.sinks:
            sinks = 3 * torch.randn(q_heads, generator=generator)
            variant["sinks"] = sinks.masked_fill(sinks < 0, -torch.inf) if self.sinks == "some" else sinks
        given = {
            "query": query,
            "key": pools[0],
            "value": pools[1],
            "block_table": entries,
            "cu_seqlens_q": starts,
            "kv_lens": torch.tensor(lengths, dtype=self.lens),
            **variant,
        }
        sequence = torch.tensor([b for b, (q, _) in enumerate(self.sequences) for _ in range(q)], dtype=torch.int64)
        seen = [max(0, n - q + i + 1) for n, (q, _) in self._lengths_and_q() for i in range(q)]
        dense = {name: x for name, x in variant.items() if not (self.scaled == "key" and name.endswith("_scale"))}
        dense |= {"query": query[: self.used, :, None], "kv_lens": torch.tensor(seen, dtype=torch.int64)}
        most = max(lengths)
        dense |= {name: x[:, :, :most][sequence] for name, x in zip(("key", "value"), in_order, strict=True)}
        dense["attn_mask"] = named_keys[sequence, None, None, :most] if self.missing else None
        return given, dense

    def _lengths_and_q(self) -> list[tuple[int, tuple[int, int]]]:
        return [*zip(self.lengths, self.sequences, strict=True)]

    def check(self, out: Tensor, lse: Tensor, dense: dict[str, Any], parts: int) -> None:
        """Hold the answer to float64, and padding to 0 and -inf."""
        padded_out, padded_lse = out[self.used :], lse[self.used :]
        assert out.is_contiguous()
        assert lse.is_contiguous()
        assert not padded_out.any()
        assert (padded_lse == -torch.inf).all()
        if self.used:
            state = out[: self.used, :, None].contiguous(), lse[: self.used, :, None].contiguous()
            assert_within_bound(*state, dense, parts, roundings=2)


def draw_mixed_batch(choose: Choose, tiny: bool = False) -> MixedBatch:
    """A call; `tiny` is for an interpreter."""
    q_lens, pasts = (TINY_Q_LENS, TINY_PASTS) if tiny else (Q_LENS, PASTS)
    sequences = [(choose(q_lens), choose(pasts)) for _ in range(choose((1, 2, 3)))]
    padding = choose((0, 0, 1, 5, 40))
    if padding == 0 and not any(q_len for q_len, _ in sequences):
        padding = 1
    narrow = choose(("", "", "", "int8", "float8_e4m3fn"))
    dtype = choose((torch.float32, torch.bfloat16, torch.float16, *([] if tiny else [torch.float64])))
    scaled = choose(("", "head", "key")) if narrow else ""
    if scaled == "key" and dtype.itemsize == 2:
        scaled = "head"
    return MixedBatch(
        tuple(sequences),
        choose(HEADS),
        dtype,
        choose(((8, 8), (16, 16), (16, 8), (3, 23), *([] if tiny else [(64, 64), (80, 32)]))),
        choose(TINY_PAGES if tiny else PAGES),
        choose(POOLS),
        padding,
        choose((None, None, 1, 3, 17, 64, 1000)),
        choose((None, None, None, 3.0)),
        choose(("", "", "random", "some")),
        choose((None, None, 0.3, -0.3)),
        narrow,
        scaled,
        choose(("dense", "dense", "heads_first", "columns", "sliced")),
        choose((torch.int32, torch.int64)),
        choose((0, 0, 1, 3)),
        choose((False, False, True)),
        choose((False, False, True)),
        choose((False, True)),
        choose((0, 1, 2, 3)),
    )


def batch_for_hopper(rng: random.Random, dims: tuple[int, ...] = (64,), most: int = 4) -> MixedBatch:
    """Draw a call of at most `most` sequences that the pages kernel for Hopper takes."""
    sequences = tuple(
        (q_len, rng.choice((0, 1, -1, 128 - q_len, rng.randint(0, 300))))
        for q_len in rng.choices((0, 1, 1, 2, 5, 40), k=rng.randint(1, most))
    )
    dim = rng.choice(dims)
    return MixedBatch(
        sequences if any(q_len for q_len, _ in sequences) else ((3, 130),),
        padding=rng.choice((0, 3)),
        page=rng.choice((8, 16, 64, 128, 256)),
        heads=rng.choice(((4, 2), (5, 1), (2, 2))),
        dims=(dim, dim),
        dtype=torch.bfloat16,
        window=rng.choice((None, None, 1, 70, 200)),
        sinks=rng.choice(("", "finite")),
        missing=rng.random() < 0.3,
        seed=rng.randrange(1 << 30),
    )
