"""The cache that a decode loop makes if the user passes none."""

from __future__ import annotations

import copy
from typing import Any

from transformers import Cache, EncoderDecoderCache, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

LEAST_CAPACITY = 1024


def capacity_for(length: int) -> int:
    """Return the number of slots of a cache for `length` tokens: a power of two, so that many lengths share a graph.

    tatten does not read unused slots, so they cost only memory.
    """
    return max(LEAST_CAPACITY, 1 << (length - 1).bit_length())


def static_cache(model: PreTrainedModel, capacity: int, like: Cache) -> Cache:
    """Make a static cache in place of `like`, the cache that `generate` made.

    Layers with windows keep all tokens, too. The model's masks exclude tokens outside the window, and tatten does not
    read them. A static sliding-window layer would need three graphs, as its code depends on a length on the host, and
    would move all of its keys at each step.
    """
    static = StaticCache(model.config.get_text_config(decoder=True), max_cache_len=capacity)
    static.layers = [
        StaticLayer(max_cache_len=capacity) if type(layer) is StaticSlidingWindowLayer else layer
        for layer in static.layers
    ]
    if not isinstance(like, EncoderDecoderCache):
        return static
    # A copy: `like` must stay empty for the loop of `generate`, which runs if the step does not compile.
    return EncoderDecoderCache(static, copy.deepcopy(like.cross_attention_cache))


def empty(cache: Cache, like: Cache) -> None:
    """Remove all tokens from a cache of `static_cache`, and the source of an encoder-decoder."""
    if not isinstance(cache, EncoderDecoderCache):
        cache.reset()
        return
    assert isinstance(like, EncoderDecoderCache)
    cache.self_attention_cache.reset()
    cache.cross_attention_cache = copy.deepcopy(like.cross_attention_cache)
    cache.is_updated = dict(like.is_updated)


def decoder_cache(cache: Cache) -> Cache:
    """Return the cache of the decoder's self-attention."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def decoder_layers(cache: Cache) -> list[Any]:
    """Return the layers of the decoder's self-attention."""
    return list(decoder_cache(cache).layers)
