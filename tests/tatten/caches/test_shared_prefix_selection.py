"""Selections from a shared-prefix cache: what is stored and copied, and what the host is not asked."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from shared_prefix_steps import (
    LAYERS,
    MODEL,
    memory,
    prefill,
    state,
    step,
    tensors,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tatten.caches import base
from tatten.caches.selection import Selection
from tatten.caches.shared_prefix import SharedPrefixCache


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_a_prefix_is_stored_once() -> None:
    cache, texts = prefill(2, 5)
    token = cache.nbytes // (2 * 5)
    child = cache.fork(8, 4)
    assert child.nbytes == token * (2 * 5 + 16 * 4)
    texts = step(child, [text for text in texts for _ in range(8)], 3)
    grandchild = child.fork(2, 1)
    assert grandchild.nbytes == token * (2 * 5 + 16 * 3 + 32 * 1)
    for old, mid, new in zip(cache.layers, child.layers, grandchild.layers, strict=True):
        pointers = [tensor.data_ptr() for tensor in new.tensors]
        assert pointers[:4] == [t.data_ptr() for t in (*old.segments[0], mid.keys, mid.values)]
        assert new.keys.shape[0] == 32
        assert max(tensor.shape[0] for segment in new.segments for tensor in segment) == 16


def test_prefill_is_copied() -> None:
    """Keys and values may be views of the output of a fused projection."""
    cache = SharedPrefixCache(1)
    fused = torch.randn(1, 3, 12, 4)
    cache.update(0, fused[..., :4, :].transpose(1, 2), fused[..., 4:8, :].transpose(1, 2))
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in cache.layers[0].tensors)


@pytest.mark.parametrize(
    "indices, stored, rows",
    [
        ([0, 1, 2, 3, 4, 5], [2, 6], [None, None]),
        ([1, 0, 2, 5, 4, 3], [2, 6], [None, [1, 0, 2, 5, 4, 3]]),  # beams within their prompts
        ([0, 0, 4, 4], [2, 6], [None, [0, 0, 4, 4]]),
        ([4, 4, 5, 5], [1, 2], [None, None]),  # consecutive rows, for equal blocks, are a view
        ([3], [1, 1], [None, None]),
        ([3, 4, 5], [1, 3], [None, None]),
        ([5, 0], [2, 6], [[1, 0], [5, 0]]),
        ([0, 1, 2, 3], [2, 4], [[0, 0, 0, 1], None]),  # three of one prompt and one of the other
    ],
)
def test_select_copies_no_prefix(indices: list[int], stored: list[int], rows: list[list[int] | None]) -> None:
    cache, texts = prefill(2, 5)
    cache, texts = cache.fork(3, 2), [text for text in texts for _ in range(3)]
    texts = step(cache, texts)
    cache = cache.fork(1, 2)
    for picked in (indices, torch.tensor(indices, dtype=torch.int32)):
        chosen = cache.select(picked)
        assert [key.shape[0] for key, _ in chosen.layers[0].segments] == stored
        assert [None if x is None else x.tolist() for x in chosen.layers[0].rows] == rows
        assert all(x is y for x, y in zip(chosen.layers[0].rows, chosen.layers[1].rows, strict=True))
        for new, old in zip(chosen.layers[0].segments, cache.layers[0].segments, strict=True):
            assert all(memory(a) == memory(b) for a, b in zip(new, old, strict=True))
        assert chosen.layers[0].keys.data_ptr() != cache.layers[0].keys.data_ptr()
        step(chosen, [texts[i] for i in indices])


def test_select_before_a_fork() -> None:
    cache, texts = prefill(2, 5, "left")
    assert cache.select([0, 1]).layers[0].segments[0][0].data_ptr() == cache.layers[0].segments[0][0].data_ptr()
    chosen = cache.select([1, 1, 0, 1])
    step(chosen, step(chosen, [texts[i] for i in (1, 1, 0, 1)], 2))


def test_select_in_place_keeps_addresses_but_not_those_that_children_read() -> None:
    cache, texts = prefill(1, 3)
    cache, texts = cache.fork(3, 4), texts * 3
    texts = step(cache, texts)
    address = cache.layers[0].keys.data_ptr()
    for order in ([2, 0, 1], [1, 1, 0]):
        cache.select_(order)
        texts = step(cache, [texts[i] for i in order])
    assert cache.layers[0].keys.data_ptr() == address
    child = cache.fork(1, 1)
    cache.select_([2, 1, 0])
    assert child.layers[0].segments[1][0].data_ptr() == address
    step(child, texts)
    step(cache, texts[::-1])


def test_rows_stay_where_they_are() -> None:
    """Tensors that a graph reads move neither in the reorderings of a beam search nor from a fork to the next."""
    graphs = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    compiled = torch.compile(MODEL, fullgraph=True, backend=backend)
    old = None
    for _ in range(3):
        cache, texts = prefill(2, 3)
        cache, texts = cache.fork(2, 1), [text for text in texts for _ in range(2)]
        texts = step(cache, texts)
        cache = cache.fork(2, 4, into=old)
        texts = [text for text in texts for _ in range(2)]
        for order in ([7, 1, 2, 3, 4, 5, 6, 0], [1, 1, 0, 2, 3, 4, 5, 7], [0, 1, 2, 3, 4, 5, 6, 7]):
            cache.select_(order)
            texts = step(cache, [texts[i] for i in order], forward=compiled)
        old = cache
    assert len(graphs) == 1
    calls = [node.target for node in graphs[0].graph.nodes if node.op.startswith("call")]
    assert calls.count("index_select") == 2 * 2 * LAYERS
    assert not any(str(target) == "expand" for target in calls)


def test_a_selection_into_an_old_one_is_read_by_its_graph() -> None:
    """Sequences are dropped in each rollout, of other prompts and others of them: one graph for each batch."""
    graphs = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    compiled = torch.compile(MODEL, fullgraph=True, dynamic=False, backend=backend)
    fork = bucket = None
    for picked in ([5, 0, 1], [3, 3, 1], [0, 1, 2], [2, 3, 4]):  # the last two read equal blocks, or one row
        cache, texts = prefill(2, 4, "left")
        fork, texts = cache.fork(3, 4, into=fork), [text for text in texts for _ in range(3)]
        texts = step(fork, texts, forward=compiled)
        addresses = bucket and [tensor.data_ptr() for tensor in bucket.layers[0].tensors]
        chosen = fork.select(picked, into=bucket)
        assert bucket is None or chosen is bucket
        assert addresses in (None, [tensor.data_ptr() for tensor in chosen.layers[0].tensors])
        both = step(chosen, step(chosen, [texts[i] for i in picked], forward=compiled), forward=compiled)
        assert [len(text) for text in both] == [len(texts[i]) + 2 for i in picked]
        step(fork, texts, forward=compiled)
        bucket = chosen
    assert len(graphs) == 2


def test_a_selection_into_an_old_one_says_what_differs() -> None:
    cache, texts = prefill(2, 4)
    fork = cache.fork(3, 2)
    rows, blocks = fork.select([5, 0]), fork.select([0, 3])
    step(fork, [text for text in texts for _ in range(3)])
    before = state(rows), state(blocks)
    with pytest.raises(
        ValueError, match=r"`into` must be a fork with the same batch and capacity, \(3, 2\), got \(2, 2\)"
    ):
        fork.select([5, 0, 1], into=rows)
    with pytest.raises(ValueError, match="`into` must have rows in level 0, as the new selection has, got none"):
        fork.select([5, 0], into=blocks)
    with pytest.raises(ValueError, match="`into` must be None for a selection before a fork"):
        cache.select([0], into=rows)
    with pytest.raises(TypeError, match="`into` must be a SharedPrefixCache, got int"):
        fork.select([0, 1], into=1)
    for old, cache in zip(before, (rows, blocks), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old, state(cache), strict=True))


@pytest.mark.parametrize("kind", ["list", "tensor"])
def test_any_selection_leaves_prefixes_at_their_size(kind: str) -> None:
    """Drops, duplicates and permutations, each of a selection of the last one."""
    choose = random.Random(0)
    cache, texts = prefill(4, 5, "left")
    cache, texts = cache.fork(4, 2), [text for text in texts for _ in range(4)]
    texts = step(cache, texts)
    cache, texts = cache.fork(2, 8), [text for text in texts for _ in range(2)]
    prefix = sum(tensor.nbytes for segment in cache.layers[0].segments for tensor in segment)
    addresses = [[memory(tensor) for tensor in segment] for segment in cache.layers[0].segments]
    for batch in (32, 24, 16, 7, 7, 3):
        picked = [choose.randrange(len(texts)) for _ in range(batch)]
        indices = picked if kind == "list" else torch.tensor(picked, dtype=torch.int32)
        cache, texts = cache.select(indices), [texts[i] for i in picked]
        assert sum(tensor.nbytes for segment in cache.layers[0].segments for tensor in segment) <= prefix
        assert [[memory(tensor) for tensor in segment] for segment in cache.layers[0].segments] == addresses
        texts = step(cache, texts)


class NoHostReads(TorchDispatchMode):
    """Refuses what waits for the device."""

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        assert not (func is torch.ops.aten._to_copy.default and kwargs.get("device", args[0].device).type == "cpu")
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("prompts", [{}, {"prompt_lens": [1, 3]}, {"prompt_mask": [[True] * 3, [False, True, True]]}])
@pytest.mark.parametrize("forked", [False, True])
def test_indices_on_the_device_are_not_read(forked: bool, prompts: dict) -> None:
    """Meta tensors have no values to read."""
    with torch.device("meta"):
        cache = SharedPrefixCache(2, **{name: torch.tensor(x) for name, x in prompts.items()})
        for layer in range(2):
            cache.update(layer, *tensors(2, 2, 3, 8))
        cache = cache.fork(3, 2) if forked else cache
        batch = cache.batch_size
        indices = torch.zeros(batch, dtype=torch.int32)
        with NoHostReads():
            for chosen in (cache.select(indices), cache.select(indices[:1]).select(indices[:1].repeat(5))):
                chosen.select_(torch.zeros(chosen.batch_size, dtype=torch.int64))
                assert all(tensor.is_meta for tensor in chosen.layers[0].tensors)
                assert len({id(layer.rows[0]) for layer in chosen.layers}) == 1
                if forked:
                    rows = chosen.layers[0].rows[0]
                    assert (rows.dtype, tuple(rows.shape), rows.is_meta) == (torch.int32, (chosen.batch_size,), True)
                    chosen.select_(torch.zeros(chosen.batch_size, dtype=torch.int64))
                    assert chosen.layers[1].rows[0] is rows


def test_selecting_by_the_device_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a GPU's path on a CPU: a selection that the host does not know."""
    cache, texts = prefill(2, 5, "lengths")
    cache, texts = cache.fork(3, 6), [text for text in texts for _ in range(3)]
    texts = step(cache, texts)
    for picked in ([5, 0, 0, 4], [3, 3, 1, 0, 2, 2], [1, 0]):
        with monkeypatch.context() as patch:
            patch.setattr(base, "Selection", unknown_selection)
            cache = cache.select(picked)
        assert [rows.dtype for rows in cache.layers[0].rows] == [torch.int32]
        texts = step(cache, [texts[i] for i in picked])
    cache, texts = cache.fork(2, 2), [text for text in texts for _ in range(2)]
    step(cache, texts)


def unknown_selection(picked: list[int], batch: int) -> Selection:
    selection = Selection(picked, batch)
    selection.on(torch.device("cpu"))
    selection._device_indices, selection.host_indices = torch.tensor(picked), None
    return selection
