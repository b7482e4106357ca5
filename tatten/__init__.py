"""tatten: `torch.compile(model, backend="tatten")` makes decode attention exact and near the memory floor."""

from typing import TYPE_CHECKING

from tatten.caches.shared_prefix import SharedPrefixCache
from tatten.dtensor_sdpa import disable_dtensor_sdpa, enable_dtensor_sdpa
from tatten.explain import explain
from tatten.export import rewrite
from tatten.ops import (
    BlockMask,
    SharedPages,
    bifurcated_attention,
    block_mask,
    decode_attention,
    decompositions,
    index_scores,
    latent_attention,
    local_lens,
    merge_state,
    merge_states,
    paged_attention,
    shared_pages,
    tree_merge,
)
from tatten.report import Report, recording

if TYPE_CHECKING:
    from tatten.caches.sharded import ShardedKVCache
    from tatten.integrations.transformers import QuantizedStaticCache

__version__ = "0.1.0"

__all__ = [
    "BlockMask",
    "QuantizedStaticCache",
    "Report",
    "ShardedKVCache",
    "SharedPages",
    "SharedPrefixCache",
    "bifurcated_attention",
    "block_mask",
    "decode_attention",
    "decompositions",
    "disable_dtensor_sdpa",
    "enable_dtensor_sdpa",
    "explain",
    "index_scores",
    "latent_attention",
    "local_lens",
    "merge_state",
    "merge_states",
    "paged_attention",
    "recording",
    "rewrite",
    "shared_pages",
    "tree_merge",
]


def __getattr__(name: str) -> object:
    if name == "ShardedKVCache":  # imports DTensor, which takes seconds
        from tatten.caches.sharded import ShardedKVCache

        return ShardedKVCache
    if name == "QuantizedStaticCache":  # imports transformers
        from tatten.integrations.transformers import QuantizedStaticCache

        return QuantizedStaticCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
