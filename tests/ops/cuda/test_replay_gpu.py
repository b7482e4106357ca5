"""CUDA graphs replayed over random calls: each replay draws keys, lengths and masks anew, and checks what comes out.

All of it is in the graph: the inputs with NaN in each key that does not count, the op, whose fresh memory is NaN, too,
attention in float64, and the comparison. `TATTEN_FUZZ_N=50` makes 10,000 replays of each kind of call.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from poison import fresh_memory_is_poison
from torch import Tensor

from tatten.ops.reference import bifurcated_attention_reference, decode_attention_reference

pytestmark = pytest.mark.gpu

NEG_INF, NAN = float("-inf"), float("nan")
LOWEST = torch.finfo(torch.float32).min
REPLAYS = 200 * int(os.environ.get("TATTEN_FUZZ_N", "1"))
ROUND, LIMIT_S = 100, 60.0  # replays of a round, and the seconds that it may take
BATCH, Q_HEADS, KV_HEADS, KV_LEN = 4, 8, 2, 500
Call = dict[str, Any]

decode = partial(torch.ops.tatten.decode_attention, provider="triton")
bifurcated = torch.ops.tatten.bifurcated_attention


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def rand(*shape: int) -> Tensor:
    return torch.rand(shape, device="cuda")


def some(*shape: int) -> Tensor:
    """Bool: runs, holes, nothing and everything, as the first dimension and the replay have it."""
    keys = torch.arange(shape[-1], device="cuda")
    first, stop = (rand(*shape[:-1], 1) * (shape[-1] + 1) for _ in range(2))
    density = rand(*shape[:-1], 1) * 1.6 - 0.3
    return ((keys >= first) & (keys < stop)) ^ (rand(*shape) < density)


def bias(*shape: int) -> Tensor:
    """Additive: some keys at -inf, some at the lowest float32, and of some queries all of them."""
    low = torch.where(rand(*shape[:-1], 1) < 0.5, LOWEST, NEG_INF)
    return torch.where(some(*shape), torch.randn(shape, device="cuda"), low)


def lengths() -> Tensor:
    return (2 ** (rand(BATCH) * 9)).long() - (rand(BATCH) < 0.3).long()


def keys_and_values(rows: int, kv_len: int, used: Tensor, dims: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """`used`: bool, `[rows, kv_length]`; the others are NaN."""
    unread = ~used[:, None, :, None]
    return [randn(rows, KV_HEADS, kv_len, dim, dtype=dtype).masked_fill(unread, NAN) for dim in dims]


def of_rows(mask: Tensor, rows: int) -> Tensor:
    """Which keys any query of a row attends to."""
    used = mask if mask.dtype == torch.bool else mask != NEG_INF
    return used.expand(BATCH, -1, -1, -1).reshape(rows, -1, mask.shape[-1]).any(dim=1)


def ragged(dtype: torch.dtype, dims: tuple[int, int] = (64, 64), q_len: int = 1, **extras: Any) -> Call:
    lens = lengths()
    used = torch.arange(KV_LEN, device="cuda") < lens[:, None]
    key, value = keys_and_values(BATCH, KV_LEN, used, dims, dtype)
    query = randn(BATCH, Q_HEADS, q_len, dims[0], dtype=dtype)
    return {"query": query, "key": key, "value": value, "kv_lens": lens, **extras}


def masked(dtype: torch.dtype, mask: Tensor, dims: tuple[int, int] = (64, 64), q_len: int = 1, **extras: Any) -> Call:
    key, value = keys_and_values(BATCH, KV_LEN, of_rows(mask, BATCH), dims, dtype)
    query = randn(BATCH, Q_HEADS, q_len, dims[0], dtype=dtype)
    return {"query": query, "key": key, "value": value, "attn_mask": mask, **extras}


def with_other_entries(table: Tensor, unread: Tensor, share: float, n_pages: int) -> Tensor:
    """A table with random numbers in its `unread` entries, and numbers of no page in a `share` of the others.

    A random number that happens to name a page becomes -1 there: the page may be NaN.
    """
    numbers = (rand(*table.shape) * 2**31).long() - 1
    no_page = torch.where((numbers >= 0) & (numbers < n_pages), -1, numbers)
    table = torch.where(rand(*table.shape) < share, no_page, table)
    return torch.where(unread, numbers, table)


def pages(page: int, dtype: torch.dtype = torch.bfloat16, q_len: int = 1, **extras: Any) -> Call:
    """Pages in random order, some of which two sequences share; entries that name none; NaN where nothing is read."""
    lens, columns = lengths(), 512 // page
    n_pages = BATCH * columns + 5
    table = rand(n_pages).argsort()[: BATCH * columns].view(BATCH, columns)
    places = torch.arange(columns, device="cuda")
    table = torch.where((places < rand(1) * columns) & (rand(BATCH, 1) < 0.5), table[:1], table)
    keys = torch.arange(columns * page, device="cuda")
    slots = table.repeat_interleave(page, dim=1) * page + keys % page
    read = torch.zeros(n_pages * page, device="cuda")
    read = read.index_add(0, slots.flatten(), (keys < lens[:, None]).flatten().float()).view(n_pages, page) > 0
    table = with_other_entries(table, places * page >= lens[:, None], 0.05, n_pages)
    pool = randn(n_pages, 2, page, KV_HEADS, 64, dtype=dtype).masked_fill(~read[:, None, :, None, None], NAN)
    query = randn(BATCH, Q_HEADS, q_len, 64, dtype=dtype)
    key, value = pool.unbind(1)
    return {"query": query, "key": key, "value": value, "kv_lens": lens, "block_table": table.int(), **extras}


def shared_pages(
    page: int, dtype: torch.dtype = torch.bfloat16, q_len: int = 1, batch: int = 16, heads: int = Q_HEADS, **extras: Any
) -> Call:
    """Sequences in a random tree of two levels, or none: pages that they share, and those found to be shared."""
    room = 1024
    columns = room // page
    lens = (rand(batch) * (room + 1)).long() * (rand(batch) < 0.9)
    n_pages = batch * columns + 5
    table = rand(n_pages).argsort()[: batch * columns].view(batch, columns)
    places = torch.arange(columns, device="cuda")
    for groups in (4, 1):  # those that share the second level, and the first one
        of = (rand(batch) * groups).long()
        span = rand(1) * columns * groups / 4 * (rand(1) < 0.8)
        table = torch.where((places < span) & (rand(batch, 1) < 0.9), table[of], table)
    keys = torch.arange(room, device="cuda")
    slots = table.repeat_interleave(page, dim=1) * page + keys % page
    read = torch.zeros(n_pages * page, device="cuda")
    read = read.index_add(0, slots.flatten(), (keys < lens[:, None]).flatten().float()).view(n_pages, page) > 0
    table = with_other_entries(table, places * page >= lens[:, None], 0.01, n_pages).int()
    pool = randn(n_pages, 2, page, KV_HEADS, 64, dtype=dtype).masked_fill(~read[:, None, :, None, None], NAN)
    found = torch.ops.tatten.shared_pages(table, lens, n_pages, page, q_len)
    given = {"kv_lens": lens, "block_table": table, "shared_pages": found}
    query = randn(batch, heads, q_len, 64, dtype=dtype)
    return {"query": query, "key": pool[:, 0], "value": pool[:, 1], **given, **extras}


def float8_pages() -> Call:
    given = pages(16)
    scales = {f"{name}_scale": rand(*given[name].shape[:3]) for name in ("key", "value")}
    return {**given, **{name: given[name].to(torch.float8_e4m3fn) for name in ("key", "value")}, **scales}


def float8() -> Call:
    given = ragged(torch.bfloat16)
    scales = {"key_scale": rand(KV_HEADS), "value_scale": rand(KV_HEADS)}
    return {**given, **{name: given[name].to(torch.float8_e4m3fn) for name in ("key", "value")}, **scales}


def segments(dtype: torch.dtype, *rows_and_masks: tuple[int, int, Callable[[int], Tensor | None]], batch: int) -> Call:
    keys, values, masks = [], [], []
    for rows, kv_len, make in rows_and_masks:
        mask = make(kv_len)
        used = torch.ones(rows, kv_len, dtype=torch.bool, device="cuda") if mask is None else of_rows(mask, rows)
        key, value = keys_and_values(rows, kv_len, used, (128, 128), dtype)
        keys.append(key)
        values.append(value)
        masks.append(mask)
    query = randn(batch, Q_HEADS, 1, 128, dtype=dtype)
    return {"query": query, "keys": keys, "values": values, "attn_masks": masks}


def none(kv_len: int) -> None:
    return None


F32, BF16 = torch.float32, torch.bfloat16
CALLS: dict[str, Callable[[], Call]] = {
    "ragged": lambda: ragged(BF16, q_len=2),
    "ragged, head_dim 192 and 128": lambda: ragged(BF16, (192, 128)),
    "ragged, window, soft cap, sinks": lambda: ragged(
        F32, q_len=3, window=70, softcap=5.0, sinks=torch.randn(Q_HEADS, device="cuda")
    ),
    "float8": float8,
    "pages of 16": lambda: pages(16, q_len=2),
    "pages of 1": lambda: pages(1),
    "pages of 64": lambda: pages(64, torch.float32),
    "pages of 256, window, soft cap, sinks": lambda: pages(
        256, F32, q_len=3, window=70, softcap=5.0, sinks=torch.randn(Q_HEADS, device="cuda")
    ),
    "pages of 16, bool mask": lambda: pages(16, attn_mask=some(BATCH, 1, 1, 512)),
    "pages of 4, bias of each query": lambda: pages(4, F32, q_len=2, attn_mask=bias(BATCH, 1, 2, 512)),
    "float8 in pages": float8_pages,
    "shared pages of 16": lambda: shared_pages(16),
    "shared pages of 16, one query head each": lambda: shared_pages(16, batch=80, heads=KV_HEADS),
    "shared pages of 1, two queries": lambda: shared_pages(1, q_len=2),
    "shared pages of 128, soft cap, sinks": lambda: shared_pages(
        128, F32, softcap=5.0, sinks=torch.randn(Q_HEADS, device="cuda")
    ),
    "bool mask": lambda: masked(BF16, some(BATCH, 1, 1, KV_LEN)),
    "bool mask for each head and query": lambda: masked(F32, some(BATCH, Q_HEADS, 3, KV_LEN), q_len=3),
    "bias": lambda: masked(F32, bias(BATCH, 1, 1, KV_LEN)),
    "bias for each query, head_dim 256": lambda: masked(BF16, bias(BATCH, 1, 2, KV_LEN), (256, 256), q_len=2),
    "two segments": lambda: segments(BF16, (1, 300, none), (BATCH, 130, lambda n: some(BATCH, 1, 1, n)), batch=BATCH),
    "three segments with biases": lambda: segments(
        F32,
        (1, 300, lambda n: bias(BATCH, 1, 1, n)),
        (2, 70, none),
        (BATCH, 33, lambda n: bias(BATCH, Q_HEADS, 1, n)),
        batch=BATCH,
    ),
    "a prefix for the prefix kernel": lambda: segments(BF16, (1, 700, none), (64, 40, none), batch=64),
}


def of_magnitudes(call: Call) -> Call:
    """The same weights on absolute values, to which rounding is relative."""
    if "values" in call:
        return {**call, "values": [x.abs() for x in call["values"]]}
    return {**call, "value": call["value"].double().abs()}


def replay(graph: torch.cuda.CUDAGraph, n: int) -> None:
    """Replay a graph `n` times, in rounds that must end in time.

    Else the process ends, as pytest would wait for the GPU before it prints the failure.
    """
    for first in range(0, n, ROUND):
        stop = min(first + ROUND, n)
        for _ in range(first, stop):
            graph.replay()
        ended, deadline = torch.cuda.Event(), time.monotonic() + LIMIT_S
        ended.record()
        while not ended.query():
            if time.monotonic() > deadline:
                name = os.environ.get("PYTEST_CURRENT_TEST")
                print(
                    f"{name}: a replay of {first} to {stop - 1} hangs for {LIMIT_S:g} s",
                    file=sys.__stderr__,
                    flush=True,
                )
                os._exit(1)
            time.sleep(1e-3)


@pytest.mark.parametrize("name", CALLS)
def test_each_replay_is_right(name: str) -> None:
    draw = CALLS[name]
    torch.manual_seed(int(os.environ.get("TATTEN_FUZZ_SEED", "0")))
    wrong, replays = torch.zeros(2, dtype=torch.int64, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")

    def step() -> None:
        call = draw()
        with fresh_memory_is_poison():
            if "keys" in call:
                out, lse = bifurcated(*call.values(), [None] * len(call["keys"]))
            else:
                out, lse = decode(**call)
        reference = bifurcated_attention_reference if "keys" in call else decode_attention_reference
        want, want_lse = reference(**call)
        eps = torch.finfo(out.dtype).eps
        bound = eps * want.abs() + 2 * max(eps, 2e-6) * reference(**of_magnitudes(call))[0] + 1e-30
        near = (out.double() - want).abs() <= bound  # false for NaN
        lse_bound = 2e-4 + 1e-5 * want_lse.abs()
        lse_near = torch.where(want_lse == NEG_INF, lse == NEG_INF, (lse.double() - want_lse).abs() <= lse_bound)
        wrong.add_(torch.stack((~near.all(), ~lse_near.all())).long())
        replays.add_(1)

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    wrong.zero_(), replays.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay(graph, REPLAYS)
    assert replays.item() == REPLAYS
    assert wrong.tolist() == [0, 0], f"of {REPLAYS} replays out and lse were wrong"
