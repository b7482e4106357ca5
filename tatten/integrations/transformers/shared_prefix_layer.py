"""A layer of the shared-prefix cache for transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from tatten.caches.shared_prefix_layer import SharedPrefixLayer
from tatten.integrations.transformers.handover import running_prefill


class SharedPrefixCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """A `SharedPrefixLayer` for transformers: dynamic before a fork; static, hence compileable, after it.

    Attributes:
        repeated: how many tokens that are held already the next update begins with. To transformers that step is one
            of an empty cache.
    """

    is_sliding = False
    is_croppable = True  # without which transformers refuses assisted decoding, from 5.24 on

    def __init__(self, kv: SharedPrefixLayer, index: int):
        super().__init__()
        self.kv = kv
        self.index = index
        self.is_initialized = bool(kv.segments)
        self.repeated = 0

    @property
    def is_compileable(self) -> bool:
        return self.kv.forked

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if (prefill := running_prefill()) is not None:
            return prefill.store(self.kv, key_states, value_states)  # type: ignore[arg-type]
        if self.repeated:
            self.kv.append(key_states[:, :, self.repeated :], value_states[:, :, self.repeated :])
            self.repeated = 0
            return key_states, value_states
        keys, values = self.append(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return keys, values

    def append(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Add new tokens, and return what attention, or what the model computes before it, gets of all tokens."""
        return self.kv.append(key_states, value_states)

    def get_seq_length(self) -> int | Tensor:
        if self.repeated:
            return 0
        return self.kv.prefix_length + self.kv.length if self.kv.forked else self.kv.prefix_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.repeated:
            if query_length <= self.repeated:
                raise ValueError(
                    f"assisted decoding must get the whole text as `input_ids`, of which the cache holds "
                    f"{self.repeated} tokens, got {query_length} with the candidates"
                )
            return query_length, 0
        if not self.kv.forked:
            return self.kv.prefix_length + query_length, 0
        # `generate` asks on the host, ahead of a compiled forward that cannot check.
        if self.kv.length.device.type == "cpu":
            self.kv.check_room(query_length)
        return self.kv.prefix_length + self.kv.capacity, 0

    def get_max_length(self) -> int:
        return self.kv.prefix_length + self.kv.capacity if self.kv.forked else -1
