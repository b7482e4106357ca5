"""The tables of a step, and attention over them, beside attention over the keys that each token sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tatten.integrations.transformers.continuous_batching.attention import attention
from tatten.integrations.transformers.continuous_batching.layer_pages import LayerPages
from tatten.integrations.transformers.continuous_batching.steps import (
    ChunkStep,
    Step,
    chunk_step,
    decode_step,
    ring_step,
)
from tatten.integrations.transformers.continuous_batching.tables import STATE, LayerGroup

STRIDE, KV_HEADS, Q_HEADS, DIM = 3, 2, 4, 8
MODULE = SimpleNamespace()


@dataclass
class Request:
    past: int
    new: int


class Batch:
    """Requests with random keys and values, stored as transformers stores them, and the tables of a step."""

    def __init__(self, requests: list[Request], page: int, window: int | None, seed: int = 0):
        torch.manual_seed(seed)
        self.requests, self.window = requests, window
        shape = (sum(x.past + x.new for x in requests), KV_HEADS, DIM)
        self.keys, self.values = (list(torch.randn(shape).split([x.past + x.new for x in requests])) for _ in range(2))
        widest = [min(x.past + x.new, window or x.past + x.new) for x in requests]
        counts = [-(-n // page) for n in widest]
        free = torch.randperm(sum(counts) + 4).add(1).tolist()
        self.blocks = [[free.pop() for _ in range(n)] for n in counts]
        n_pages = (sum(counts) + 6) * STRIDE
        self.group = LayerGroup(page, n_pages, STRIDE, window, trash=(n_pages - 1) * page, shares=window is None)
        self.pools = [torch.full((n_pages, page, KV_HEADS, DIM), 9.0) for _ in range(2)]
        for request, blocks, *stored in zip(requests, self.blocks, self.keys, self.values, strict=True):
            for pool, x in zip(self.pools, stored, strict=True):
                for position in range(request.past):
                    pool.flatten(0, 1)[self.group.slot(blocks, position)] = x[position]
        self.n_tokens = sum(x.new for x in requests)
        self.query = torch.randn(self.n_tokens, Q_HEADS, DIM)

    def new(self, stored: list[Tensor]) -> Tensor:
        return torch.cat([x[request.past :] for x, request in zip(stored, self.requests, strict=True)])

    def decode_rows(self, padding: int) -> Tensor:
        columns = max(map(len, self.blocks)) + 3
        rows = torch.full((len(self.requests) + padding, columns + STATE), -1, dtype=torch.int32)
        for row, request, blocks in zip(rows, self.requests, self.blocks, strict=False):
            self.group.fill_row(row, blocks, request.past)
        return rows

    def tables(self, padding: int, empty: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The read index, slots, and the starts of tokens and of keys, as transformers makes them."""
        reads: list[int] = []
        slots: list[int] = []
        starts, key_starts = [0], [0]
        for request, blocks in zip(self.requests, self.blocks, strict=True):
            if not empty:
                self.group.extend_reads(reads, blocks, request.past, request.new)
            kept = min(request.new, self.window or request.new)
            positions = range(request.past + request.new - kept, request.past + request.new)
            slots += [self.group.trash] * (request.new - kept) + [self.group.slot(blocks, p) for p in positions]
            starts.append(starts[-1] + request.new)
            held = request.past if self.window is None else min(request.past, self.window - 1)
            key_starts.append(key_starts[-1] + held + request.new)
        for x in (starts, key_starts):
            x += x[-1:] * padding
        slots += [self.group.trash] * padding
        reads += [0] * (0 if empty else padding)
        made = [torch.tensor(x, dtype=torch.int64) for x in (reads, slots)]
        made += [torch.tensor(x, dtype=torch.int32) for x in (starts, key_starts)]
        return made[0], made[1], made[2], made[3]

    def attend(self, step: Step, padding: int) -> Tensor:
        pad = torch.full((padding, KV_HEADS, DIM), torch.nan)
        key, value = (torch.cat((self.new(x), pad)).transpose(0, 1)[None] for x in (self.keys, self.values))
        query = torch.cat((self.query, self.query.new_zeros(padding, Q_HEADS, DIM))).transpose(0, 1)[None]
        sinks = torch.linspace(-1, 1, Q_HEADS)
        pages = LayerPages(self.pools[0], self.pools[1], step, key, value)
        out, _ = attention(MODULE, query, key, value, None, pages, softcap=4.0, s_aux=sinks)  # type: ignore[arg-type]
        return out[0, : self.n_tokens]

    def expected(self) -> Tensor:
        outs = []
        for i, request in enumerate(self.requests):
            for position in range(request.past, request.past + request.new):
                first = 0 if self.window is None else max(0, position - self.window + 1)
                key, value = (x[i][first : position + 1].repeat_interleave(2, 1) for x in (self.keys, self.values))
                scores = 4 * torch.tanh(torch.einsum("hd,khd->hk", self.query[len(outs)], key) / DIM**0.5 / 4)
                weights = torch.cat((scores, torch.linspace(-1, 1, Q_HEADS)[:, None]), 1).softmax(1)[:, :-1]
                outs.append(torch.einsum("hk,khd->hd", weights, value))
        return torch.stack(outs)

    def check_stored(self) -> None:
        """All keys that later tokens see are in their slots."""
        for request, blocks, *stored in zip(self.requests, self.blocks, self.keys, self.values, strict=True):
            length = request.past + request.new
            for pool, x in zip(self.pools, stored, strict=True):
                for position in range(0 if self.window is None else max(0, length - self.window), length):
                    assert torch.equal(pool.flatten(0, 1)[self.group.slot(blocks, position)], x[position])


PASTS_AND_NEW = {
    "decode": [(7, 1), (0, 1), (30, 1), (16, 1), (8, 1), (9, 1), (15, 1)],
    "mixed": [(7, 1), (0, 20), (30, 5), (9, 1), (10, 13), (3, 40), (8, 2), (0, 1)],
    "boundaries": [(n, 3) for n in (7, 8, 9, 10, 15, 16, 17)],
    "prompts": [(0, 3), (0, 33), (0, 8), (0, 1)],
}
WINDOWS = [None, 2, 8, 9, 10, 16, 17, 45, 64]


def make(batch: Batch, padding: int, empty: bool = False) -> tuple[Callable[..., Step], tuple[Tensor, ...]]:
    """The function that makes the step of chunks, and the tensors that it takes."""
    most_new, past = max(x.new for x in batch.requests), max(x.past for x in batch.requests)
    longest = max(x.past + x.new for x in batch.requests) + padding
    if batch.window is None or longest <= batch.window:
        return lambda *tables: chunk_step(*tables, longest, batch.group), batch.tables(padding, empty)
    longest = most_new + min(past, batch.window - 1) + padding
    return lambda *tables: ring_step(*tables, most_new, longest, batch.group), batch.tables(padding, empty)


@pytest.mark.drawn(24)
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("page", [4, 8, 16])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("requests", PASTS_AND_NEW)
def test_chunks(requests: str, window: int | None, page: int, padding: int) -> None:
    batch = Batch([Request(*x) for x in PASTS_AND_NEW[requests]], page, window)
    make_step, tables = make(batch, padding)
    step = make_step(*tables)
    if isinstance(step, ChunkStep):
        assert (step.shared is None) == (window is not None)
    out = batch.attend(step, padding)
    torch.testing.assert_close(out, batch.expected(), atol=1e-5, rtol=0)
    batch.check_stored()


@pytest.mark.parametrize("window", [None, 8, 9])
def test_prompts_alone(window: int | None) -> None:
    """Without a request that has keys from before, transformers passes no read index."""
    batch = Batch([Request(*x) for x in PASTS_AND_NEW["prompts"]], 4, window)
    step, tables = make(batch, 0, empty=True)
    out = batch.attend(step(*tables), 0)
    torch.testing.assert_close(out, batch.expected(), atol=1e-5, rtol=0)
    batch.check_stored()


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("page", [4, 16])
@pytest.mark.parametrize("window", WINDOWS)
def test_decode_steps(window: int | None, page: int, padding: int) -> None:
    batch = Batch([Request(*x) for x in PASTS_AND_NEW["decode"]], page, window)
    step = decode_step(batch.decode_rows(padding), batch.group)
    assert (step.shared is not None) is (window is None)
    out = batch.attend(step, padding)
    torch.testing.assert_close(out, batch.expected(), atol=1e-5, rtol=0)
    batch.check_stored()


def tensors_of(step: Step) -> list[Tensor]:
    return [x for x in vars(step).values() if isinstance(x, Tensor)]


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("decode", [True, False])
def test_steps_read_nothing_on_the_host(decode: bool, window: int | None) -> None:
    """A CUDA graph is captured once for tables of any contents: fake tensors have none to read."""
    batches = [
        Batch([Request(past + i, 1 if decode else 1 + (past + i) % 3) for past in (5, 12, 2)], 4, window, seed=i)
        for i in (0, 1)
    ]

    def tables(batch: Batch) -> tuple[Tensor, ...]:
        if decode:
            return (batch.decode_rows(3)[:, -6:],)
        made = batch.tables(24 - batch.n_tokens, empty=False)
        sizes = 64, 24, 12, 12  # more requests than there are
        return tuple(torch.cat((x, x[-1:].expand(64)))[:n] for x, n in zip(made, sizes, strict=True))

    def run(*given: Tensor) -> list[Tensor]:
        group: Any = batches[0].group
        if decode:
            return tensors_of(decode_step(given[0], group))
        if window is None:
            return tensors_of(chunk_step(*given, 40, group))  # type: ignore[arg-type,call-arg,misc]
        return tensors_of(ring_step(*given, 24, 40, group))  # type: ignore[arg-type,call-arg,misc]

    first, second = map(tables, batches)
    graph = make_fx(run, tracing_mode="fake")(*first)
    for given in (first, second):
        for got, want in zip(graph(*given), run(*given), strict=True):
            assert torch.equal(got, want)
