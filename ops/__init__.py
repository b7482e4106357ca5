"""Ops of `torch.library`, most of which return attention states `(out, lse)`, and their implementations."""

from tatten.ops.bifurcated import bifurcated_attention
from tatten.ops.decode import block_mask, decode_attention
from tatten.ops.decompositions import decompositions
from tatten.ops.distributed.sharded_pages import local_lens
from tatten.ops.distributed.tree_merge import tree_merge
from tatten.ops.index_scores import index_scores
from tatten.ops.latent import latent_attention
from tatten.ops.masks import BlockMask
from tatten.ops.merge import merge_state, merge_states
from tatten.ops.paged_attention import paged_attention
from tatten.ops.shared_pages import SharedPages, shared_pages

__all__ = [
    "BlockMask",
    "SharedPages",
    "bifurcated_attention",
    "block_mask",
    "decode_attention",
    "decompositions",
    "index_scores",
    "latent_attention",
    "local_lens",
    "merge_state",
    "merge_states",
    "paged_attention",
    "shared_pages",
    "tree_merge",
]
