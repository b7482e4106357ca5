"""Calls over pages in random order with NaN in unused memory, and their answers, one sequence after the other."""

from __future__ import annotations

from typing import Any

import torch
from paged_calls import make_pools
from torch import Tensor

from tatten.ops.reference import decode_attention_reference


def paged(page: int, lens: list[int], columns: int, layout: str = "apart", **shape: Any) -> dict[str, Any]:
    """Arguments of a call in float64 whose pages are in random order; those that no length reaches are NaN."""
    q_len, heads, kv_heads, dim = (
        shape.get(x, y) for x, y in (("q_len", 1), ("heads", 4), ("kv_heads", 2), ("dim", 8))
    )
    batch = len(lens)
    n_pages = batch * columns + 2
    pools = make_pools(layout, n_pages, page, kv_heads, (dim, dim), torch.float64)
    table = torch.randperm(n_pages)[: batch * columns].view(batch, columns).int()
    read = torch.zeros(n_pages, page, dtype=torch.bool)
    for b, n in enumerate(lens):
        for j in range(n):
            read[table[b, j // page], j % page] = True
        table[b, -(-n // page) :] = torch.tensor([-1, 2**31 - 1, n_pages, 0])[torch.arange(columns - -(-n // page)) % 4]
    for pool in pools:
        pool.copy_(torch.where(read[..., None, None], torch.randn(pool.shape, dtype=torch.float64), torch.nan))
    query = torch.randn(batch, heads, q_len, dim, dtype=torch.float64)
    return {
        "query": query,
        "key": pools[0],
        "value": pools[1],
        "block_table": table,
        "kv_lens": torch.tensor(lens, dtype=torch.int32),
    }


def keys_of(x: Tensor, table: Tensor, b: int, length: int) -> Tensor:
    """`[1, kv_heads, length, d]`, one key after the other."""
    page = x.shape[1]
    keys = [x[table[b, j // page], j % page] for j in range(length)]
    return torch.stack(keys, dim=1)[None] if keys else x.new_empty(1, x.shape[2], 0, x.shape[3])


def one_by_one(inputs: dict[str, Any], **variant: Any) -> tuple[Tensor, Tensor]:
    """The states of the sequences over their keys in order, each in a call of its own."""
    states = []
    for b, n in enumerate(inputs["kv_lens"].tolist()):
        key, value = (keys_of(inputs[name], inputs["block_table"], b, n) for name in ("key", "value"))
        states.append(decode_attention_reference(inputs["query"][b : b + 1], key, value, **variant))
    return tuple(torch.cat(x) for x in zip(*states, strict=True))


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
