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


def static_cache(model: PreTrainedModel, capacity: int) -> Cache:
    """Make a static cache for the self-attention of a model's decoder.

    Layers with windows keep all tokens, too. The model's masks exclude tokens outside the window, and tatten does not
    read them. A static sliding-window layer would need three graphs, as its code depends on a length on the host, and
    would move all of its keys at each step.
    """
    static = StaticCache(model.config.get_text_config(decoder=True), max_cache_len=capacity)
    static.layers = [
        StaticLayer(max_cache_len=capacity) if type(layer) is StaticSlidingWindowLayer else layer
        for layer in static.layers
    ]
    return static


def cache_for_prefill(decoder: Cache, like: Cache) -> Cache:
    """Return an empty cache for a prefill in place of `like`, the cache that `generate` made.

    Args:
        decoder: the cache of the decoder's self-attention, which is cleared.
        like: stays empty for the loop of `generate`, which runs if the step does not compile.
    """
    decoder.reset()
    if not isinstance(like, EncoderDecoderCache):
        return decoder
    return EncoderDecoderCache(decoder, copy.deepcopy(like.cross_attention_cache))


def decoder_cache(cache: Cache) -> Cache:
    """Return the cache of the decoder's self-attention."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def decoder_layers(cache: Cache) -> list[Any]:
    """Return the layers of the decoder's self-attention."""
    return list(decoder_cache(cache).layers)
