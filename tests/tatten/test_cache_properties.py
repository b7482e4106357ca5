"""Random histories of each cache against a naive model: what it returns, what it holds, and how many bytes that takes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from cache_model import LAYERS, Model, assert_step, keys_and_values
from fuzz import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tatten.integrations import transformers as integration
from tatten.prefixed_kv import PrefixedKV, repeat_rows
from tatten.sharded_cache import ShardedKVCache
from tatten.shared_prefix import SharedPrefixCache

MOST_SEQUENCES, MOST_CACHES = 12, 6
picks = st.integers(0, 63)
widths = st.integers(1, 3)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def must_raise(fails: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="must|needs"):
        fails()


class History(RuleBasedStateMachine):
    """Tokens that no two sequences ever share by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.next_token = 1

    def new_tokens(self, batch: int, q_len: int) -> list[list[int]]:
        first, self.next_token = self.next_token, self.next_token + batch * q_len
        return [[first + row * q_len + i for i in range(q_len)] for row in range(batch)]


class PrefixHistory(History):
    """Caches that were made of each other, none of which may disturb another."""

    caches: list[tuple[Any, Model]]

    @initialize(prompts=widths, padding=st.lists(st.lists(st.booleans(), min_size=4, max_size=4), max_size=3))
    def prefill(self, prompts: int, padding: list[list[bool]]) -> None:
        """With padding anywhere among the first 4 tokens, of each prompt its own, or none."""
        rows = [[*padding[i]] if len(padding) >= prompts else [] for i in range(prompts)]
        self.caches = [(self.make(rows), Model([[] for _ in rows], rows))]
        self.step(0, 1)

    @rule(pick=picks, q_len=widths)
    def step(self, pick: int, q_len: int) -> None:
        cache, model = self.caches[pick % len(self.caches)]
        new = self.new_tokens(len(model.tokens), q_len)
        pairs = [keys_and_values(new, layer) for layer in range(LAYERS)]
        across = model.length < len(model.padding[0]) < model.length + q_len
        if model.capacity and model.used + q_len > model.capacity:
            must_raise(lambda: self.look(cache, q_len))
            must_raise(lambda: self.update(cache, 0, *pairs[0]))
        elif across and not model.capacity:
            must_raise(lambda: self.update(cache, 0, *pairs[0]))
        else:
            mask, positions = self.look(cache, q_len)
            held = [self.update(cache, layer, *pair) for layer, pair in enumerate(pairs)]
            model.add(new)
            assert_step(model, new, mask, positions, held)

    @rule(pick=picks, n=widths, capacity=st.integers(1, 5))
    def fork(self, pick: int, n: int, capacity: int) -> None:
        cache, model = self.caches[pick % len(self.caches)]
        if len(model.tokens) * n <= MOST_SEQUENCES:
            self.keep(cache.fork(n, capacity), model.fork(n, capacity))

    @rule(pick=picks, indices=st.lists(picks, min_size=1, max_size=6), times=widths, in_order=st.booleans())
    def select(self, pick: int, indices: list[int], times: int, in_order: bool) -> None:
        cache, model = self.caches[pick % len(self.caches)]
        rows = self.rows(model, indices, times, in_order)
        self.keep(cache.select(rows), model.select(rows))

    @rule(pick=picks, way=st.sampled_from(["deepcopy", "save"]))
    def reload(self, pick: int, way: str) -> None:
        cache, model = self.caches[pick % len(self.caches)]
        if way == "deepcopy":
            again = copy.deepcopy(cache)
        else:
            file = io.BytesIO()
            torch.save(cache, file)
            file.seek(0)
            again = torch.load(file, weights_only=False)
        self.keep(again, copy.deepcopy(model))

    def rows(self, model: Model, indices: list[int], times: int, in_order: bool) -> list[int]:
        """Sequences in any order, or in blocks of one after the other."""
        rows = [index % len(model.tokens) for index in indices for _ in range(times)][:MOST_SEQUENCES]
        return sorted(rows) if in_order else rows

    def keep(self, cache: Any, model: Model) -> None:
        self.caches = [*self.caches, (cache, model)][-MOST_CACHES:]

    @invariant()
    def all_hold_their_own(self) -> None:
        for cache, model in self.caches:
            assert cache.batch_size == len(model.tokens)
            assert cache.capacity == model.capacity
            assert cache.nbytes == model.nbytes
            for index, layer in enumerate(self.layers(cache)):
                assert [key.shape[::2] for key, _ in layer.segments] == model.prefixes
                parts = [[repeat_rows(x, layer.batch_size) for x in segment] for segment in layer.segments]
                if layer.forked:
                    assert int(layer.length) == model.used
                    parts.append([layer.keys[:, :, : model.used], layer.values[:, :, : model.used]])
                    assert not layer.keys[:, :, model.used :].any()
                    assert not layer.values[:, :, model.used :].any()
                for got, want in zip(zip(*parts, strict=True), keys_and_values(model.tokens, index), strict=True):
                    assert torch.equal(torch.cat(got, dim=2), want)


@settings(60, stateful_step_count=15)
class SharedPrefixHistory(PrefixHistory):
    def make(self, padding: list[list[bool]]) -> Any:
        real = ~torch.tensor(padding) if padding[0] else None
        return SharedPrefixCache(LAYERS, real)

    def layers(self, cache: Any) -> list[PrefixedKV]:
        return cache.layers

    def look(self, cache: Any, q_len: int) -> tuple[Tensor, Tensor | None]:
        return cache.mask(q_len), cache.positions(q_len)

    def update(self, cache: Any, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return cache.update(layer, key, value)


@settings(60, stateful_step_count=15)
class TransformersHistory(PrefixHistory):
    """The form that `generate` uses: selections in place, and nothing that takes tokens away. It knows no padding."""

    def make(self, padding: list[list[bool]]) -> Any:
        padding[:] = [[] for _ in padding]
        return integration.SharedPrefixCache(LAYERS)

    def layers(self, cache: Any) -> list[PrefixedKV]:
        return [layer.kv for layer in cache.layers]

    def look(self, cache: Any, q_len: int) -> tuple[Tensor, None]:
        total, offset = cache.get_mask_sizes(q_len, 0)
        assert offset == 0
        return torch.arange(total) <= cache.get_seq_length() + torch.arange(q_len)[:, None], None

    def update(self, cache: Any, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return cache.update(key, value, layer)

    @rule(
        pick=picks,
        method=st.sampled_from(["reorder_cache", "batch_select_indices"]),
        indices=st.lists(picks, min_size=1, max_size=6),
        times=widths,
        in_order=st.booleans(),
    )
    def select_in_place(self, pick: int, method: str, indices: list[int], times: int, in_order: bool) -> None:
        cache, model = self.caches[pick % len(self.caches)]
        rows = self.rows(model, indices, times, in_order)
        getattr(cache, method)(torch.tensor(rows))
        self.caches[pick % len(self.caches)] = cache, model.select(rows)

    @rule(pick=picks, times=widths)
    def repeat_in_place(self, pick: int, times: int) -> None:
        cache, model = self.caches[pick % len(self.caches)]
        if len(model.tokens) * times <= MOST_SEQUENCES:
            cache.batch_repeat_interleave(times)
            rows = [i for i in range(len(model.tokens)) for _ in range(times)]
            self.caches[pick % len(self.caches)] = cache, model.select(rows)

    @rule(pick=picks)
    def takes_nothing_away(self, pick: int) -> None:
        cache, _ = self.caches[pick % len(self.caches)]
        for refused in (lambda: cache.crop(1), cache.reset):
            with pytest.raises(NotImplementedError):
                refused()


@settings(30, stateful_step_count=12)
class ShardedHistory(History):
    """The cache of a mesh of one rank: all slots are its own."""

    @initialize(batch=widths, capacity=st.integers(4, 12), padding=st.none() | st.lists(st.booleans(), min_size=4))
    def make(self, batch: int, capacity: int, padding: list[bool] | None) -> None:
        row = (padding or [])[:4]
        self.model = Model([[] for _ in range(batch)], [row] * batch, capacity=capacity)
        self.cache = self.another(capacity)

    def another(self, capacity: int) -> Any:
        padding = self.model.padding
        real = ~torch.tensor(padding) if padding[0] else None
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("kv",))
        return ShardedKVCache(LAYERS, mesh, capacity, prompt_mask=real)

    def look(self, q_len: int) -> tuple[Tensor, Tensor | None]:
        return self.cache.mask(q_len).to_local(), self.cache.positions(q_len)

    def update(self, layer: int, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        return [x.to_local() for x in self.cache.append(layer, key, value)]

    @rule(q_len=widths)
    def step(self, q_len: int) -> None:
        new = self.new_tokens(len(self.model.tokens), q_len)
        pairs = [keys_and_values(new, layer) for layer in range(LAYERS)]
        if self.model.length + q_len > self.model.capacity:
            must_raise(lambda: self.look(q_len))
            must_raise(lambda: self.update(0, *pairs[0]))
            return
        mask, positions = self.look(q_len)
        held = [tuple(self.update(layer, *pair)) for layer, pair in enumerate(pairs)]
        self.model.add(new)
        assert_step(self.model, new, mask, positions, held)

    @invariant()
    def holds_its_own(self) -> None:
        assert_sharded(self.cache, self.model)

    @rule(q_len=widths)
    def prefill(self, q_len: int) -> None:
        new = self.new_tokens(len(self.model.tokens), q_len)
        pairs = [keys_and_values(new, layer) for layer in range(LAYERS)]
        if self.model.length:
            must_raise(lambda: self.cache.prefill(0, *pairs[0]))
            return
        for layer, pair in enumerate(pairs):
            self.cache.prefill(layer, *pair)
        self.model.add(new)

    @precondition(lambda self: self.model.length)
    @rule(capacity=st.integers(1, 12), plain=st.booleans())
    def reload(self, capacity: int, plain: bool) -> None:
        state = self.cache.state_dict()
        if plain:
            state = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in state.items()}
        if capacity < len(self.model.padding[0]):
            return
        new = self.another(capacity)
        if capacity < self.model.length:
            must_raise(lambda: new.load_state_dict(state))
            assert new.nbytes == 0
            return
        new.load_state_dict(state)
        self.cache, self.model.capacity = new, capacity


@settings(30, stateful_step_count=12)
class TransformersShardedHistory(History):
    """The form that `generate` uses: the first tokens are handed back as they are, then all slots."""

    @initialize(batch=widths, capacity=st.integers(4, 12))
    def make(self, batch: int, capacity: int) -> None:
        self.model = Model([[] for _ in range(batch)], [[]] * batch, capacity=capacity)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("kv",))
        self.cache = integration.ShardedKVCache(LAYERS, mesh, capacity)

    @rule(q_len=widths)
    def step(self, q_len: int) -> None:
        cache, model = self.cache, self.model
        new = self.new_tokens(len(model.tokens), q_len)
        pairs = [keys_and_values(new, layer) for layer in range(LAYERS)]
        if model.length + q_len > model.capacity:
            must_raise(lambda: cache.get_mask_sizes(q_len, 0))
            must_raise(lambda: cache.update(*pairs[0], 0))
            return
        total, offset = cache.get_mask_sizes(q_len, 0)
        assert (total, offset) == (model.capacity if model.length else q_len, 0)
        mask = torch.arange(total) <= int(cache.get_seq_length()) + torch.arange(q_len)[:, None]
        held = [cache.update(*pair, layer) for layer, pair in enumerate(pairs)]
        held = [tuple(x.to_local() if model.length else x for x in pair) for pair in held]
        model.add(new)
        assert_step(model, new, mask, None, held)

    @precondition(lambda self: self.model.length)
    @rule(order=st.lists(picks, min_size=3, max_size=3))
    def reorder(self, order: list[int]) -> None:
        rows = [index % len(self.model.tokens) for index in order[: len(self.model.tokens)]]
        self.cache.reorder_cache(torch.tensor(rows))
        self.model.tokens = [[*self.model.tokens[row]] for row in rows]

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        for tokens in self.model.tokens:
            tokens.clear()

    @rule()
    def takes_nothing_away(self) -> None:
        with pytest.raises(NotImplementedError):
            self.cache.crop(1)

    @invariant()
    def holds_its_own(self) -> None:
        assert_sharded(self.cache._cache, self.model)
        assert int(self.cache.get_seq_length()) == self.model.length


def assert_sharded(cache: ShardedKVCache, model: Model) -> None:
    """What the cache of one rank holds, in the order of positions, and nothing behind it."""
    assert cache.capacity == model.capacity
    assert int(cache.length) == model.length
    if cache.batch_size:
        assert cache.nbytes == model.nbytes
        for layer in range(LAYERS):
            for got, want in zip(cache.to_global(layer), keys_and_values(model.tokens, layer), strict=True):
                assert torch.equal(got, want)
            assert not any(x[:, :, model.length :].any() for x in cache.layers[layer].tensors)


TestSharedPrefix = SharedPrefixHistory.TestCase
TestTransformers = TransformersHistory.TestCase
TestSharded = ShardedHistory.TestCase
TestTransformersSharded = TransformersShardedHistory.TestCase
