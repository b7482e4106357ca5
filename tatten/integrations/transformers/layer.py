"""A layer of a cache for transformers, and the part that the caches have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from tatten.caches.base import BaseCache
from tatten.caches.layer import Layer
from tatten.integrations.transformers.handover import LayerShare, hand_over, running_prefill
from tatten.integrations.transformers.index_keys import IndexKeys


class CacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """A `Layer` for transformers: dynamic while its root grows, else static, hence compileable.

    Attention gets the first tokens unchanged, and over a mesh later ones as DTensors. Of latents, which the model
    expands before that, it gets this rank's share as plain tensors, and has to be told.

    Attributes:
        index: of the layer in the model.
        latents: whether the model expands what it gets, over a mesh.
        index_keys: those of the layer's indexer; None for a layer without one of its own.
        repeated: how many tokens that are held already the next update begins with. To transformers that step is one
            of an empty cache.
    """

    is_sliding = False

    def __init__(self, kv: Layer, index: int, latents: bool = False, index_keys: Layer | None = None):
        super().__init__()
        self.kv, self.index, self.latents = kv, index, latents
        self.index_keys = None if index_keys is None else IndexKeys(index_keys)
        self.is_initialized = bool(kv.segments)
        self.repeated = 0

    @property
    def is_compileable(self) -> bool:
        return self.kv.static

    @property
    def is_croppable(self) -> bool:
        """Without which transformers refuses assisted decoding, from 5.24 on."""
        return bool(self.kv.segments) or not self.kv.static

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if (prefill := running_prefill()) is not None:
            return prefill.store(self.kv, key_states, value_states)
        if self.repeated:
            self.kv.append(key_states[:, :, self.repeated :], value_states[:, :, self.repeated :])
            self.repeated = 0
            return key_states, value_states
        if not self.is_initialized:
            self.kv.append(key_states, value_states)
            self.lazy_initialization(key_states, value_states)
            hand_over(None)
            return key_states, value_states
        if not self.latents:
            return self.kv.append(key_states, value_states)
        keys, values = self.kv.append_local(key_states, value_states)
        hand_over(LayerShare(self.kv.layout, self.index, keys.shape[2]) if self.kv.layout.ranks > 1 else None)
        return keys, values

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Add the index keys of new tokens, `[batch, q_len, dim]`, and return those of all tokens.

        For sequences that share a prefix, the result has a copy each of its index keys, which are stored once.
        """
        if self.index_keys is None:
            raise ValueError(
                f"layer {self.index} must have an indexer of its own to store index keys, got none: give the cache the "
                "config of the model"
            )
        return self.index_keys.update(indexer_key_states)

    def expect_again(self, tokens: int) -> None:
        """Expect that the next update begins with as many tokens that are held already."""
        self.repeated = tokens
        if self.index_keys is not None:
            self.index_keys.repeated = tokens

    def get_seq_length(self) -> int | Tensor:
        if self.repeated or not self.is_initialized:
            return 0
        return self.kv.prefix_length + self.kv.length if self.kv.static else self.kv.prefix_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.repeated and query_length <= self.repeated:
            raise ValueError(
                f"assisted decoding must get the whole text as `input_ids`, of which the cache holds "
                f"{self.repeated} tokens, got {query_length} with the candidates"
            )
        if self.repeated or not self.is_initialized:
            return query_length, 0
        if not self.kv.static:
            return self.kv.prefix_length + query_length, 0
        # `generate` asks on the host, ahead of a compiled forward that cannot check.
        if self.kv.length.device.type == "cpu":
            self.kv.check_room(query_length)
        return self.get_max_length(), 0

    def get_max_length(self) -> int:
        return self.kv.prefix_length + self.kv.capacity if self.kv.static else -1

    def reset(self) -> None:
        self.kv.clear()
        self.is_initialized = False
        if self.index_keys is not None:
            self.index_keys.reset()


class WrappedCache(Cache):  # type: ignore[misc]
    """A cache of tatten as one of transformers.

    Args:
        cache: has one layer for each of the model, and behind those one for each in `indexed`.
        latents: as for `CacheLayer`.
        indexed: the layers of the model with index keys of their own.
    """

    def __init__(self, cache: BaseCache, latents: bool, indexed: Sequence[int] = ()):
        self._cache, self._latents, self._indexed = cache, latents, indexed
        layers = cache.layers[: len(cache.layers) - len(indexed)]
        index_keys = dict(zip(indexed, cache.layers[len(layers) :], strict=True))
        super().__init__(layers=[CacheLayer(kv, i, latents, index_keys.get(i)) for i, kv in enumerate(layers)])

    @property
    def batch_size(self) -> int:
        """Number of sequences; -1 before the prefill."""
        return self._cache.batch_size or -1

    @property
    def capacity(self) -> int:
        """Number of tokens that each sequence can hold on all ranks together, since the last fork; 0 before a fork."""
        return self._cache.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and index keys on this rank; see `tatten.SharedPrefixCache.nbytes`."""
        return self._cache.nbytes

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select in place, for beam search; see `tatten.SharedPrefixCache.select_`."""
        self._cache.select_(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select in place, on all ranks alike; see `tatten.SharedPrefixCache.select_`."""
        self._cache.select_(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence in place, without copying prefixes."""
        self._cache.select_([index for index in range(self._cache.batch_size) for _ in range(repeats)])
