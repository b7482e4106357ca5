"""tatten: `torch.compile(model, backend="tatten")` makes decode attention exact and near the memory floor."""

from tatten.ops import decode_attention, merge_state, merge_states

__all__ = ["decode_attention", "merge_state", "merge_states"]
