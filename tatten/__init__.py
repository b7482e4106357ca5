"""tatten: `torch.compile(model, backend="tatten")` makes decode attention exact and near the memory floor."""

from tatten.explain import explain
from tatten.ops import bifurcated_attention, decode_attention, merge_state, merge_states
from tatten.report import Report, recording
from tatten.shared_prefix import SharedPrefixCache

__all__ = [
    "Report",
    "SharedPrefixCache",
    "bifurcated_attention",
    "decode_attention",
    "explain",
    "merge_state",
    "merge_states",
    "recording",
]
