"""Random calls with a block table, each as a call over keys in order that has the same answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from attention_cases import places_in_reach
from op_calls import Call, Segment, draw_call
from op_masks import NEG_INF, Choose
from torch import Tensor

import tatten

INT32 = torch.iinfo(torch.int32)
PAGES, TINY_PAGES = (16, 1, 2, 4, 8, 32, 64, 128, 256), (16, 1, 4, 32)
POOLS = ("apart", "interleaved", "columns", "heads_first", "sliced")


def make_pools(layout: str, n_pages: int, page: int, heads: int, dims: tuple[int, int], dtype: torch.dtype) -> Any:
    """Return pools of keys and of values, `[pages, page, kv_heads, d]`, laid out as engines do it."""
    if layout == "columns":  # vLLM: the columns of a key and of its value side by side
        return torch.empty(n_pages, page, heads, sum(dims), dtype=dtype).split(dims, dim=3)
    if layout == "interleaved":  # a page of keys, then one of values
        both = torch.empty(n_pages, 2, page, heads, max(dims), dtype=dtype)
        return tuple(both[:, i, ..., :dim] for i, dim in enumerate(dims))
    if layout == "heads_first":
        return tuple(torch.empty(n_pages, heads, page, dim, dtype=dtype).transpose(1, 2) for dim in dims)
    if layout == "sliced":
        return tuple(torch.empty(n_pages + 3, page, heads + 1, dim, dtype=dtype)[2:-1, :, 1:] for dim in dims)
    return tuple(torch.empty(n_pages, page, heads, dim, dtype=dtype) for dim in dims)


@dataclass(frozen=True)
class PagedCall:
    """A call of `decode_attention` whose keys are in pages.

    Attributes:
        page: the keys of a page.
        pools: see `make_pools`.
        shared: how many leading pages of sequence 0 the others have, too.
        missing: whether some entries within a length name no page.
        wide_table: whether the table is a part of a larger one, transposed.
    """

    call: Call
    page: int = 16
    pools: str = "apart"
    shared: int = 0
    missing: bool = False
    wide_table: bool = False

    def inputs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments of the op, and those of `decode_attention` over keys in order with the same answer."""
        dense = replace(self.call, poison=False).inputs()
        generator = torch.Generator().manual_seed(self.call.seed)
        batch, heads, kv_len, _ = dense["key"].shape
        columns = -(-kv_len // self.page)
        n_pages = batch * columns + 3
        table = torch.randperm(n_pages, generator=generator)[: batch * columns].view(batch, columns)
        table[1:, : self.shared] = table[:1, : self.shared]
        used = self._used(dense)
        named = torch.ones(batch, columns, dtype=torch.bool)
        if self.missing:
            named = torch.rand(batch, columns, generator=generator) < 0.7
        of_key = table.repeat_interleave(self.page, dim=1)[:, :kv_len]
        named_keys = named.repeat_interleave(self.page, dim=1)[:, :kv_len]
        used = used & named_keys
        in_page = (torch.arange(kv_len) % self.page).expand(batch, kv_len)
        read = torch.zeros(n_pages, self.page, dtype=torch.bool)
        read[of_key[used], in_page[used]] = True

        dims = dense["key"].shape[3], dense["value"].shape[3]
        pools = make_pools(self.pools, n_pages, self.page, heads, dims, dense["key"].dtype)
        in_order = []
        for x, pool in zip((dense["key"], dense["value"]), pools, strict=True):
            numbers = torch.full(pool.shape, float("nan"), dtype=torch.float64)
            numbers[of_key, in_page] = x.transpose(1, 2).double()
            pool.copy_(numbers.masked_fill(~read[..., None, None], float("nan")).to(pool.dtype))
            in_order.append(pool.double()[of_key, in_page].to(pool.dtype).transpose(1, 2))

        stale = torch.tensor([-1, INT32.max, INT32.min, n_pages, 0, n_pages - 1])
        anything = stale[torch.randint(len(stale), (batch, columns), generator=generator)]
        no_page = torch.tensor([-1, INT32.max, INT32.min, n_pages])[
            torch.randint(4, (batch, columns), generator=generator)
        ]
        beyond = torch.arange(columns) * self.page >= dense["kv_lens"][:, None]
        table = torch.where(beyond, anything, torch.where(named, table, no_page)).int()
        if self.wide_table:
            table = torch.stack((table, table + 1, table), dim=2).transpose(0, 1).contiguous()[:, :, 0].T
        paged = dense | {"key": pools[0], "value": pools[1], "block_table": table}
        mask, room = dense["attn_mask"], columns * self.page
        if mask is not None and mask.shape[-1] not in (1, room):
            paged["attn_mask"] = torch.nn.functional.pad(mask, (0, room - kv_len))
        dense |= {"key": in_order[0], "value": in_order[1]}
        if self.missing:
            dense["attn_mask"] = _narrowed(mask, named_keys[:, None, None])
        return paged, dense

    def _used(self, dense: dict[str, Any]) -> Tensor:
        """bool `[batch, kv_len]`: keys between the first and the last that any query of a sequence attends to."""
        query, mask, kv_len = dense["query"], dense["attn_mask"], dense["key"].shape[2]
        reach = places_in_reach(dense["kv_lens"], query.shape[0], query.shape[2], kv_len, self.call.window)
        if mask is not None:
            reach = reach & (mask if mask.dtype == torch.bool else mask != NEG_INF)
        used = reach.expand(query.shape[0], -1, -1, kv_len).flatten(1, 2).any(dim=1)
        return (used.cumsum(1) > 0) & (used.flip(1).cumsum(1).flip(1) > 0)

    def run(self, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The op's answer."""
        return tatten.decode_attention(**inputs, return_lse=True)


def _narrowed(mask: Tensor | None, allowed: Tensor) -> Tensor:
    if mask is None:
        return allowed
    return mask & allowed if mask.dtype == torch.bool else torch.where(allowed, mask, NEG_INF)


def draw_paged_call(choose: Choose, tiny: bool = False) -> PagedCall:
    """A call with a block table; `tiny` is for an interpreter."""
    call = draw_call(choose, tiny)
    segment = call.segments[0]
    segment = Segment(call.batch, segment.kv_len, segment.mask, choose(sorted({1, call.batch})))
    lens = choose([torch.int32, torch.int64])
    float8 = call.float8 or choose(["", "", "plain", "scaled"])
    factors = (call.factors[0], 1.0) if float8 else call.factors
    call = replace(call, segments=(segment,), lens=lens, found=False, float8=float8, factors=factors)
    return draw_pages(choose, call, tiny)


def draw_pages(choose: Choose, call: Call, tiny: bool = False) -> PagedCall:
    """Draw pages for the keys of a call."""
    page, pools = choose(TINY_PAGES if tiny else PAGES), choose(POOLS)
    return PagedCall(call, page, pools, choose([0, 0, 1, 3]), choose([False, False, True]), choose([False, True]))
