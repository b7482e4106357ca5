"""Random histories of shared-prefix caches against a naive model: what they return, hold, and take in bytes."""

from __future__ import annotations

import copy
import io
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from cache_model import LAYERS, History, Model, assert_step, keys_and_values, must_raise
from fuzz import settings
from hypothesis.stateful import initialize, invariant, rule
from torch import Tensor

from tatten.caches.layer import Layer
from tatten.caches.selection import expand_to_batch
from tatten.caches.shared_prefix import SharedPrefixCache
from tatten.integrations import transformers as integration

pytestmark = pytest.mark.drawn(1)

MOST_SEQUENCES, MOST_CACHES = 12, 6
picks = st.integers(0, 63)
widths = st.integers(1, 3)
steps = st.lists(widths, max_size=3)
lists = st.lists(picks, min_size=1, max_size=6)


class PrefixHistory(History):
    """Caches derived from each other, none of which may disturb another."""

    caches: list[tuple[Any, Model]]

    @initialize(prompts=widths, padding=st.lists(st.lists(st.booleans(), min_size=4, max_size=4), max_size=3))
    def prefill(self, prompts: int, padding: list[list[bool]]) -> None:
        """Start with padding among the first 4 tokens, different for each prompt, or with none."""
        rows = [[*padding[i]] if len(padding) >= prompts else [] for i in range(prompts)]
        self.caches = [(self.make(rows), Model([[] for _ in rows], rows))]
        self.step(0, 1)

    @rule(pick=picks, tokens=widths, then=steps)
    def crop(self, pick: int, tokens: int, then: list[int]) -> None:
        cache, model = self.pick(pick)
        if tokens > (model.used - model.frozen if model.capacity else model.length):
            must_raise(lambda: self.remove(cache, tokens))
        elif model.capacity or tokens < model.length:
            self.remove(cache, tokens)
            model.crop(tokens)
            for q_len in then:
                self.step(pick, q_len)

    @rule(pick=picks, n=widths, capacity=st.integers(1, 12), used=widths, then=steps)
    def fork_into_an_old_one(self, pick: int, n: int, capacity: int, used: int, then: list[int]) -> None:
        cache, model = self.pick(pick)
        if len(model.tokens) * n <= MOST_SEQUENCES:
            old = copy.deepcopy(cache).fork(n, capacity)
            tensors = [x for layer in self.layers(old) for x in (*layer.tensors, layer.length, *layer.rows)]
            for tensor in tensors:
                if tensor is not None:
                    tensor.fill_(min(used, capacity))
            addresses = [x.data_ptr() for layer in self.layers(old) for x in (*layer.tensors, layer.length)]
            assert cache.fork(n, capacity, into=old) is old
            assert addresses == [x.data_ptr() for layer in self.layers(old) for x in (*layer.tensors, layer.length)]
            self.keep(old, model.fork(n, capacity), then)

    def pick(self, pick: int) -> tuple[Any, Model]:
        """Choose a cache, more often a new one than an old one."""
        return self.caches[-1 - pick % len(self.caches)]

    @rule(pick=picks, q_len=widths)
    def step(self, pick: int, q_len: int) -> None:
        cache, model = self.pick(pick)
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

    @rule(pick=picks, n=widths, capacity=st.integers(1, 12), then=steps)
    def fork(self, pick: int, n: int, capacity: int, then: list[int]) -> None:
        cache, model = self.pick(pick)
        if len(model.tokens) * n <= MOST_SEQUENCES:
            child = cache.fork(n, capacity)
            for old, new in zip(self.layers(cache), self.layers(child), strict=True):
                copied = {x.data_ptr() for segment in new.segments for x in segment} - {
                    x.data_ptr() for x in old.tensors
                }
                assert not copied
            self.keep(child, model.fork(n, capacity), then)

    @rule(pick=picks, indices=lists, times=widths, in_order=st.booleans(), then=steps)
    def select(self, pick: int, indices: list[int], times: int, in_order: bool, then: list[int]) -> None:
        cache, model = self.pick(pick)
        rows = self.rows(model, indices, times, in_order)
        self.keep(cache.select(rows), model.select(rows), then)

    @rule(pick=picks, way=st.sampled_from(["deepcopy", "save"]), then=steps)
    def reload(self, pick: int, way: str, then: list[int]) -> None:
        cache, model = self.pick(pick)
        if way == "deepcopy":
            again = copy.deepcopy(cache)
        else:
            file = io.BytesIO()
            torch.save(cache, file)
            file.seek(0)
            again = torch.load(file, weights_only=False)
        self.keep(again, copy.deepcopy(model), then)

    def rows(self, model: Model, indices: list[int], times: int, in_order: bool) -> list[int]:
        """Select sequences in any order, or in blocks of consecutive ones."""
        rows = [index % len(model.tokens) for index in indices for _ in range(times)][:MOST_SEQUENCES]
        return sorted(rows) if in_order else rows

    def keep(self, cache: Any, model: Model, then: list[int]) -> None:
        self.caches = [*self.caches, (cache, model)][-MOST_CACHES:]
        for q_len in then:
            self.step(0, q_len)

    @invariant()
    def all_hold_their_own(self) -> None:
        for cache, model in self.caches:
            assert cache.batch_size == len(model.tokens)
            assert cache.capacity == model.capacity
            assert cache.nbytes == model.nbytes
            for index, layer in enumerate(self.layers(cache)):
                assert [key.shape[::2] for key, _ in layer.segments] == [(x.stored, x.length) for x in model.prefixes]
                assert [rows is None for rows in layer.rows] == [x.aligned for x in model.prefixes]
                segments = zip(layer.segments, layer.rows, strict=True)
                parts = [[expand_to_batch(x, layer.batch_size, rows) for x in segment] for segment, rows in segments]
                if layer.static:
                    assert int(layer.length) == model.used
                    parts.append([layer.keys[:, :, : model.used], layer.values[:, :, : model.used]])
                    assert layer.keys.isfinite().all()
                    assert layer.values.isfinite().all()
                for got, want in zip(zip(*parts, strict=True), keys_and_values(model.tokens, index), strict=True):
                    assert torch.equal(torch.cat(got, dim=2), want)


@settings(60, stateful_step_count=15)
class SharedPrefixHistory(PrefixHistory):
    def make(self, padding: list[list[bool]]) -> Any:
        real = ~torch.tensor(padding) if padding[0] else None
        return SharedPrefixCache(LAYERS, real)

    def layers(self, cache: Any) -> list[Layer]:
        return cache.layers

    def look(self, cache: Any, q_len: int) -> tuple[Tensor, Tensor | None]:
        return cache.mask(q_len), cache.positions(q_len)

    def update(self, cache: Any, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return cache.update(layer, key, value)

    def remove(self, cache: Any, tokens: int) -> None:
        cache.crop(tokens)


@settings(60, stateful_step_count=15)
class TransformersHistory(PrefixHistory):
    """The cache that `generate` uses: it selects in place, and knows of no padding."""

    def make(self, padding: list[list[bool]]) -> Any:
        padding[:] = [[] for _ in padding]
        return integration.SharedPrefixCache(LAYERS)

    def layers(self, cache: Any) -> list[Layer]:
        return [layer.kv for layer in cache.layers]

    def look(self, cache: Any, q_len: int) -> tuple[Tensor, None]:
        total, offset = cache.get_mask_sizes(q_len, 0)
        assert offset == 0
        return torch.arange(total) <= cache.get_seq_length() + torch.arange(q_len)[:, None], None

    def update(self, cache: Any, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return cache.update(key, value, layer)

    def remove(self, cache: Any, tokens: int) -> None:
        cache.crop(-tokens)

    @rule(pick=picks, indices=lists, times=widths, in_order=st.booleans(), then=steps)
    def batch_select_indices(self, pick: int, indices: list[int], times: int, in_order: bool, then: list[int]) -> None:
        cache, model = self.pick(pick)
        rows = self.rows(model, indices, times, in_order)
        cache.batch_select_indices(torch.tensor(rows))
        self.replace(pick, cache, model.select(rows, in_place=True), then)

    @rule(pick=picks, shift=picks, stride=widths, then=steps)
    def reorder_cache(self, pick: int, shift: int, stride: int, then: list[int]) -> None:
        """Reorder as beam search does, with as many sequences as before."""
        cache, model = self.pick(pick)
        batch = len(model.tokens)
        rows = [(shift + stride * i) % batch for i in range(batch)]
        cache.reorder_cache(torch.tensor(rows))
        self.replace(pick, cache, model.select(rows, in_place=True), then)

    @rule(pick=picks, times=widths, then=steps)
    def batch_repeat_interleave(self, pick: int, times: int, then: list[int]) -> None:
        cache, model = self.pick(pick)
        if len(model.tokens) * times <= MOST_SEQUENCES:
            cache.batch_repeat_interleave(times)
            rows = [i for i in range(len(model.tokens)) for _ in range(times)]
            self.replace(pick, cache, model.select(rows, in_place=True), then)

    def replace(self, pick: int, cache: Any, model: Model, then: list[int]) -> None:
        self.caches[-1 - pick % len(self.caches)] = cache, model
        for q_len in then:
            self.step(pick, q_len)


TestSharedPrefix = SharedPrefixHistory.TestCase
TestTransformers = TransformersHistory.TestCase
