"""A layer of a cache for transformers, and the base class of the caches."""

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
    """A `Layer` for transformers: dynamic while its root grows, then static and compileable.

    Attention gets the first tokens unchanged. Over a mesh it gets later tokens as DTensors, or, if the model expands
    latents first, this rank's share as plain tensors, whose layout is handed over (`handover.py`).

    Attributes:
        index: index of the layer in the model.
        latents: whether the model expands latents from the cache, over a mesh.
        index_keys: the keys of the layer's indexer; None for a layer without an indexer.
        repeated: number of tokens at the start of the next update that the cache already holds. transformers treats
            that step as the first step of an empty cache.
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
        """Return True if tokens can be removed, which transformers (5.24) requires for assisted decoding."""
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
        """Add the index keys of new tokens, `[batch, q_len, dim]`, and return the index keys of all tokens.

        The index keys of a shared prefix are stored once. The result repeats them for each sequence.
        """
        if self.index_keys is None:
            raise ValueError(
                f"layer {self.index} must have an indexer of its own to store index keys, got none: give the cache the "
                "config of the model"
            )
        return self.index_keys.update(indexer_key_states)

    def expect_again(self, tokens: int) -> None:
        """Expect the next update to begin with `tokens` tokens that the cache already holds."""
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
                f"assisted decoding must pass the full text as `input_ids`, with the {self.repeated} tokens in the "
                f"cache, got {query_length} tokens with the candidates"
            )
        if self.repeated or not self.is_initialized:
            return query_length, 0
        if not self.kv.static:
            return self.kv.prefix_length + query_length, 0
        # `generate` calls this on the host before a compiled forward, which can't check.
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
    """A cache of tatten as a cache of transformers.

    Args:
        cache: has one layer for each layer of the model, then one for each layer in `indexed`.
        latents: as for `CacheLayer`.
        indexed: the layers of the model that cache index keys.
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
