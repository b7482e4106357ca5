"""Random histories of the sharded cache on a mesh of one rank, against a naive model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from cache_model import LAYERS, History, Model, assert_step, keys_and_values, must_raise
from fuzz import settings
from hypothesis.stateful import initialize, invariant, precondition, rule
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tatten.caches.sharded import ShardedKVCache
from tatten.integrations import transformers as integration

picks = st.integers(0, 63)
widths = st.integers(1, 3)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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
    """The cache that `generate` uses: it returns the first tokens unchanged, and later all slots."""

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
    """The keys and values of the cache in order of position; slots beyond them have to be unused."""
    assert cache.capacity == model.capacity
    assert int(cache.length) == model.length
    if cache.batch_size:
        assert cache.nbytes == model.nbytes
        for layer in range(LAYERS):
            for got, want in zip(cache.to_global(layer), keys_and_values(model.tokens, layer), strict=True):
                assert torch.equal(got, want)
            assert not any(x[:, :, model.length :].any() for x in cache.layers[layer].tensors)


TestSharded = ShardedHistory.TestCase
TestTransformers = TransformersShardedHistory.TestCase
