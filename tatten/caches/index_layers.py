"""Layers of a cache for the keys of indexers. An indexer picks the keys that attention reads."""

from __future__ import annotations

from tatten.caches.base import BaseCache
from tatten.caches.layer import Layer


def add_index_layers(cache: BaseCache, n: int) -> None:
    """Append `n` layers to an empty cache, for index keys `[batch, 1, q_len, dim]`.

    Their values have width 0. Over a mesh each rank stores all index keys, as each picks from all tokens.
    """
    cache.layers += [Layer(cache.layout.replicated, cache.capacity or None) for _ in range(n)]
