"""What runs: `torch.library` ops that return attention states `(out, lse)`, and their implementations."""

from tatten.ops.api import bifurcated_attention, decode_attention, merge_state, merge_states
from tatten.ops.distributed.tree_merge import tree_merge

__all__ = ["bifurcated_attention", "decode_attention", "merge_state", "merge_states", "tree_merge"]
