"""Programs that gather keys and values from pools through a block table, as people write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from graphs import run_rewritten
from torch import Tensor
from torch.fx import Node

from tatten.passes import Rewritten

B, HQ, HKV, D, P, PAGE, N = 3, 4, 2, 8, 6, 4, 23
S = P * PAGE


OP = torch.ops.tatten.decode_attention.default


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)


@dataclass(frozen=True)
class Form:
    """A way to gather `[batch, kv_heads, length, head_dim]`.

    Attributes:
        gather: of a pool and a table.
        page: the keys of a page of the op.
        layout: of the pool: "pages" `[pages, page, kv_heads, head_dim]`, "heads" with heads before the keys of a page,
            "slots" `[keys, kv_heads, head_dim]`, or "one row" `[1, kv_heads, keys, head_dim]`.
        wraps: whether an entry of -1 is the last page.
    """

    gather: Callable[[Tensor, Tensor], Tensor]
    page: int = PAGE
    layout: str = "pages"
    wraps: bool = True


def slots(table: Tensor) -> Tensor:
    return (table[:, :, None] * PAGE + torch.arange(PAGE, device=table.device)).flatten(1)


def flat_view(pool: Tensor) -> Tensor:
    return pool.view(-1, *pool.shape[2:])


FORMS = {
    "pool[table]": Form(lambda x, t: x[t].flatten(1, 2).transpose(1, 2)),
    "view": Form(lambda x, t: x[t].view(len(t), -1, *x.shape[2:]).transpose(1, 2)),
    "reshape": Form(lambda x, t: torch.permute(x[t.long()].reshape(len(t), -1, HKV, D), (0, 2, 1, 3))),
    "index_select": Form(
        lambda x, t: x.index_select(0, t.flatten()).view(len(t), -1, *x.shape[2:]).transpose(1, 2), wraps=False
    ),
    "index_select of a cast table": Form(
        lambda x, t: torch.index_select(x, 0, t.view(-1).long()).reshape(len(t), -1, HKV, D).transpose(1, 2),
        wraps=False,
    ),
    "two views": Form(
        lambda x, t: x[t.reshape(-1)].view(*t.shape, *x.shape[1:]).flatten(1, 2).transpose(1, 2).contiguous()
    ),
    "heads first": Form(lambda x, t: x[t].transpose(1, 2).reshape(len(t), HKV, -1, D), layout="heads"),
    "heads first, by index_select": Form(
        lambda x, t: x.index_select(0, t.flatten()).view(*t.shape, HKV, PAGE, D).permute(0, 2, 1, 3, 4).flatten(2, 3),
        layout="heads",
        wraps=False,
    ),
    "slots": Form(lambda x, t: x[t].transpose(1, 2), page=1, layout="slots"),
    "slots by index_select": Form(
        lambda x, t: x.index_select(0, t.flatten()).unflatten(0, t.shape).transpose(1, 2), 1, "slots", False
    ),
    "slots of a table": Form(lambda x, t: flat_view(x)[slots(t)].transpose(1, 2)),
    "slots of a table, in another order": Form(
        lambda x, t: (
            x.flatten(0, 1)[
                (torch.arange(0, PAGE, device=t.device)[None, None] + PAGE * t.unsqueeze(-1)).view(len(t), -1)
            ]
        ).transpose(1, 2)
    ),
    "flat slots of a table": Form(
        lambda x, t: flat_view(x).index_select(0, slots(t).flatten()).view(len(t), -1, *x.shape[2:]).transpose(1, 2),
        wraps=False,
    ),
    "gather": Form(
        lambda x, t: x.expand(len(t), -1, -1, -1).gather(2, t[:, None, :, None].long().expand(-1, HKV, -1, D)),
        1,
        "one row",
        False,
    ),
    "take_along_dim": Form(
        lambda x, t: torch.take_along_dim(
            x.expand(len(t), *x.shape[1:]), t.long()[:, None, :, None].expand(len(t), HKV, t.shape[1], D), 2
        ),
        1,
        "one row",
    ),
    "repeat_kv": Form(lambda x, t: x[t].flatten(1, 2).transpose(1, 2).repeat_interleave(HQ // HKV, dim=1)),
    "repeat_kv by expand": Form(
        lambda x, t: (
            x[t].flatten(1, 2).transpose(1, 2)[:, :, None].expand(-1, -1, HQ // HKV, -1, -1).reshape(len(t), HQ, -1, D)
        )
    ),
}


def inputs(form: Form, seed: int = 0, **sizes: Any) -> list[Tensor]:
    """The arguments of `step(form)`: a query, a pool of keys, one of values, a table and a mask.

    Pages beyond a length are -1, or numbers of other pages where the form takes no -1.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, q_len, dtype = sizes.get("batch", B), sizes.get("q_len", 1), sizes.get("dtype", torch.float64)
    columns, n_pages = sizes.get("columns", P), sizes.get("n_pages", N)
    page = PAGE if form.layout in ("pages", "heads") else 1
    length = columns * page if form.layout in ("pages", "heads") else columns
    shape = {
        "pages": (n_pages, PAGE, HKV, D),
        "heads": (n_pages, HKV, PAGE, D),
        "slots": (n_pages, HKV, D),
        "one row": (1, HKV, n_pages, D),
    }[form.layout]
    query, key, value = (
        torch.randn(x, generator=generator, dtype=torch.float64).to(dtype)
        for x in ((batch, HQ, q_len, D), shape, shape)
    )
    table = torch.randint(n_pages, (batch, columns), generator=generator, dtype=torch.int32)
    lens = torch.randint(1, length + 1, (batch, 1), generator=generator)
    stale = torch.randint(2, table.shape, generator=generator).bool() & (torch.arange(columns) * page >= lens)
    if form.wraps:
        table[stale] = -1
    mask = (torch.arange(length) < lens)[:, None, None]
    return [query, key, value, table, mask]


def step(form: Form) -> Callable[..., Tensor]:
    def fn(q: Tensor, k: Tensor, v: Tensor, table: Tensor, mask: Tensor | None = None) -> Tensor:
        return attend(q, form.gather(k, table), form.gather(v, table), mask)

    return fn


def in_order(pool: Tensor, table: Tensor) -> Tensor:
    return FORMS["pool[table]"].gather(pool, table)


def paged(fn: Callable[..., Any], *args: Any, **options: Any) -> tuple[Rewritten, Node, Any]:
    """The finding, the op's node and the result of a call that is read in pages."""
    (finding,), gm, out = run_rewritten(fn, *args, **options)
    assert isinstance(finding, Rewritten), finding
    (op,) = gm.graph.find_nodes(op="call_function", target=OP)
    assert op.kwargs.get("block_table") is not None, finding.note
    return finding, op, out
