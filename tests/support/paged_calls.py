"""Random calls with a block table, each as a call over keys in order that has the same answer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from attention_cases import places_in_reach
from fuzz import small_shapes
from op_calls import Call, Segment, draw_call
from op_masks import NEG_INF, Choose
from torch import Tensor

import tatten
from tatten.ops.cpu import thresholds

INT32 = torch.iinfo(torch.int32)
PAGES, TINY_PAGES = (16, 1, 2, 4, 8, 32, 64, 128, 256), (16, 1, 4, 32)
POOLS = ("apart", "interleaved", "columns", "heads_first", "columns_heads_first", "sliced")
NARROW = {"float8": torch.float8_e4m3fn, "int8": torch.int8}


def make_pools(layout: str, n_pages: int, page: int, heads: int, dims: tuple[int, int], dtype: torch.dtype) -> Any:
    """Return pools of keys and of values, `[pages, page, kv_heads, d]`, laid out as engines do it."""
    if layout == "columns":  # those of a key and of its value side by side
        return torch.empty(n_pages, page, heads, sum(dims), dtype=dtype).split(dims, dim=3)
    if layout == "columns_heads_first":  # vLLM's
        return torch.empty(n_pages, heads, page, sum(dims), dtype=dtype).transpose(1, 2).split(dims, dim=3)
    if layout == "interleaved":  # a page of keys, then one of values
        both = torch.empty(n_pages, 2, page, heads, max(dims), dtype=dtype)
        return tuple(both[:, i, ..., :dim] for i, dim in enumerate(dims))
    if layout == "heads_first":
        return tuple(torch.empty(n_pages, heads, page, dim, dtype=dtype).transpose(1, 2) for dim in dims)
    if layout == "sliced":
        return tuple(torch.empty(n_pages + 3, page, heads + 1, dim, dtype=dtype)[2:-1, :, 1:] for dim in dims)
    return tuple(torch.empty(n_pages, page, heads, dim, dtype=dtype) for dim in dims)


def part_of_a_wide_table(table: Tensor) -> Tensor:
    """The same entries as a part of a larger table, transposed."""
    return torch.stack((table, table + 1, table), dim=2).transpose(0, 1).contiguous()[:, :, 0].T


def entries_with_stale_ones(
    table: Tensor, unread: Tensor, named: Tensor, n_pages: int, generator: torch.Generator
) -> Tensor:
    """A block table, int32, with anything where it is unread, and with no page where it is read and not `named`."""
    stale = torch.tensor([-1, INT32.max, INT32.min, n_pages, 0, n_pages - 1])
    anything = stale[torch.randint(len(stale), table.shape, generator=generator)]
    no_page = stale[torch.randint(4, table.shape, generator=generator)]
    return torch.where(unread, anything, torch.where(named, table, no_page)).int()


@dataclass(frozen=True)
class PagedCall:
    """A call of `decode_attention` whose keys are in pages.

    Attributes:
        page: the keys of a page.
        pools: see `make_pools`.
        shared: how many leading pages of sequence 0 the others have, too.
        repeated: whether a sequence may have a page several times.
        missing: whether some entries within a length name no page.
        wide_table: whether the table is a part of a larger one, transposed.
        narrow: "float8" or "int8" for keys and values in 8 bits.
        scales: of these: "heads", "keys" or "".
        tile_pages: the pages of a tile on a CPU; None for as many as its cache has room for.
        batch_invariant: on a CPU.
    """

    call: Call
    page: int = 16
    pools: str = "apart"
    shared: int = 0
    repeated: bool = False
    missing: bool = False
    wide_table: bool = False
    narrow: str = ""
    scales: str = ""
    tile_pages: int | None = None
    batch_invariant: bool = False

    @property
    def columns(self) -> int:
        """Those of the block table."""
        return -(-self.call.segments[0].kv_len // self.page)

    @property
    def most_tiles(self) -> int:
        """Into how many tiles a CPU may cut a sequence."""
        return 1 if self.tile_pages is None else max(1, -(-self.columns // self.tile_pages))

    def inputs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments of the op, and those of `decode_attention` over keys in order with the same answer."""
        dense = replace(self.call, poison=False).inputs()
        generator = torch.Generator().manual_seed(self.call.seed)
        batch, heads, kv_len, _ = dense["key"].shape
        columns, n_pages = self.columns, batch * self.columns + 3
        table = torch.randperm(n_pages, generator=generator)[: batch * columns].view(batch, columns)
        table[1:, : self.shared] = table[:1, : self.shared]
        if self.repeated and columns:
            table = table.gather(1, torch.randint(columns, (batch, columns), generator=generator))
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

        dtype = NARROW.get(self.narrow, dense["key"].dtype)
        unit, poison = (20.0, 127.0) if dtype == torch.int8 else (1.0, float("nan"))
        dims = dense["key"].shape[3], dense["value"].shape[3]
        pools = make_pools(self.pools, n_pages, self.page, heads, dims, dtype)
        in_order = []
        for x, pool in zip((dense["key"], dense["value"]), pools, strict=True):
            numbers = torch.zeros(pool.shape, dtype=torch.float64)
            numbers[of_key, in_page] = x.transpose(1, 2).double() * unit
            if dtype == torch.int8:
                numbers = numbers.round().clamp(-127, 127)
            pool.copy_(numbers.masked_fill(~read[..., None, None], poison).to(dtype))
            in_order.append(pool[of_key, in_page].transpose(1, 2))
        paged = dense | {"key": pools[0], "value": pools[1]}
        dense |= {"key": in_order[0], "value": in_order[1]}
        for name in ("key_scale", "value_scale") if self.scales else ():
            if self.scales == "heads":
                paged[name] = dense[name] = torch.rand(heads, generator=generator) / unit
                continue
            scale = torch.rand(n_pages, self.page, heads, generator=generator) / unit
            paged[name] = scale.masked_fill(~read[..., None], float("nan")).mT.contiguous().mT
            dense[name] = paged[name][of_key, in_page].transpose(1, 2)

        paged["block_table"] = self._entries(dense, table, named, n_pages, generator)
        mask, room = dense["attn_mask"], columns * self.page
        if mask is not None and mask.shape[-1] not in (1, room):
            paged["attn_mask"] = torch.nn.functional.pad(mask, (0, room - kv_len))
        if self.missing:
            dense["attn_mask"] = _narrowed(mask, named_keys[:, None, None])
        return paged, dense

    def _entries(
        self, dense: dict[str, Any], table: Tensor, named: Tensor, n_pages: int, generator: torch.Generator
    ) -> Tensor:
        """The block table, with anything in the entries that are not followed."""
        lens, first_keys = dense["kv_lens"][:, None], torch.arange(table.shape[1]) * self.page
        unread = first_keys >= lens
        if self.call.window is not None:
            unread |= first_keys + self.page <= lens - self.call.q_len - self.call.window + 1
        table = entries_with_stale_ones(table, unread, named, n_pages, generator)
        return part_of_a_wide_table(table) if self.wide_table else table

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
        return tatten.decode_attention(**inputs, batch_invariant=self.batch_invariant, return_lse=True)

    def alone(self, inputs: dict[str, Any], b: int) -> dict[str, Any]:
        """Arguments of the op for one sequence."""
        own = {name: inputs[name][b : b + 1] for name in ("query", "block_table", "kv_lens")}
        mask = inputs["attn_mask"]
        if mask is not None and mask.dim() == 4 and mask.shape[0] > 1:
            own["attn_mask"] = mask[b : b + 1]
        return inputs | own

    @contextlib.contextmanager
    def small_tiles(self) -> Iterator[None]:
        """Inside, a CPU has the threads, the thresholds and the tiles of this call."""
        call, (run_bytes, _, packed_rows) = self.call, self.call.thresholds or (1 << 18, 0, 64)
        item = NARROW.get(self.narrow, call.dtype).itemsize
        page_bytes = self.page * call.kv_heads * (call.head_dim + call.value_dim) * item
        with pytest.MonkeyPatch.context() as patch, small_shapes(run_bytes, call.split_bytes, packed_rows):
            patch.setattr(torch, "get_num_threads", lambda: call.threads)
            if self.tile_pages is not None:
                patch.setattr(thresholds.CPU, "block_bytes", -(-self.tile_pages * page_bytes // call.threads))
            yield


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
    narrow = choose(["", "", "float8", "int8"])
    scales = choose(["", "heads", "keys"]) if narrow else ""
    if narrow == "int8":
        scales = scales or "heads"  # so that scores are of the size of others
    factors = (call.factors[0], 1.0) if narrow else call.factors
    call = replace(call, segments=(segment,), lens=lens, found=False, float8="", factors=factors)
    batch_invariant = call.softcap is None and choose([False, False, True])
    return replace(
        draw_pages(choose, call, tiny),
        narrow=narrow,
        scales=scales,
        tile_pages=choose([None, 1, 2, 3]),
        batch_invariant=batch_invariant,
    )


def draw_pages(choose: Choose, call: Call, tiny: bool = False) -> PagedCall:
    """Draw pages for the keys of a call."""
    return PagedCall(
        call,
        choose(TINY_PAGES if tiny else PAGES),
        choose(POOLS),
        shared=choose([0, 0, 1, 3]),
        repeated=choose([False, False, True]),
        missing=choose([False, False, True]),
        wide_table=choose([False, True]),
    )
