"""tatten for transformers: caches as `transformers.Cache`s, attention "tatten", and a decode loop for `generate`."""

from typing import TYPE_CHECKING

from tatten.integrations.transformers import continuous_batching, registration  # noqa: F401
from tatten.integrations.transformers.config import cache_kwargs
from tatten.integrations.transformers.cross_attention import CrossAttentionCache
from tatten.integrations.transformers.loop.decode_loop import DecodeLoop, decode_loop
from tatten.integrations.transformers.quantised import QuantizedStaticCache
from tatten.integrations.transformers.shared_prefix import SharedPrefixCache

if TYPE_CHECKING:
    from tatten.integrations.transformers.sharded import ShardedKVCache

continuous_batching.install()

__all__ = [
    "CrossAttentionCache",
    "DecodeLoop",
    "QuantizedStaticCache",
    "ShardedKVCache",
    "SharedPrefixCache",
    "cache_kwargs",
    "continuous_batching",
    "decode_loop",
]


def __getattr__(name: str) -> object:
    if name == "ShardedKVCache":  # imports DTensor, which takes seconds
        from tatten.integrations.transformers.sharded import ShardedKVCache

        return ShardedKVCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
