"""Layers for the keys of indexers, which pick the keys that attention reads."""

from __future__ import annotations

from tatten.caches.base import BaseCache
from tatten.caches.layer import Layer


def add_index_layers(cache: BaseCache, n: int) -> None:
    """Add `n` layers behind the others of an empty cache, for index keys `[batch, 1, q_len, dim]`.

    Their values have no width. Over a mesh each rank stores all index keys, of which the picks are made.
    """
    cache.layers += [Layer(cache.layout.replicated, cache.capacity or None) for _ in range(n)]
