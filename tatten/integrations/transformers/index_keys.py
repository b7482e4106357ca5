"""The index keys of a layer of a cache: the indexer of a model adds new keys, and gets all keys to score."""

from __future__ import annotations

from torch import Tensor

from tatten.caches.layer import Layer


class IndexKeys:
    """Index keys of one layer. All index heads share them, so they are keys of one head. Their values have width 0.

    Attributes:
        layer: the layer that stores them.
        is_initialized, repeated: as for the `CacheLayer` of the same tokens.
    """

    def __init__(self, layer: Layer):
        self.layer, self.is_initialized, self.repeated = layer, bool(layer.segments), 0

    def update(self, new: Tensor) -> Tensor:
        """Add the index keys of new tokens, `[batch, q_len, dim]`, and return all index keys, `[batch, total, dim]`."""
        key = new[:, self.repeated :].unsqueeze(1)
        keys, _ = self.layer.append(key, key[..., :0])
        if self.repeated or not self.is_initialized:
            self.repeated, self.is_initialized = 0, True
            return new
        return keys.squeeze(1)

    def reset(self) -> None:
        """Remove all tokens."""
        self.layer.clear()
        self.is_initialized = False
