"""A check of each new cache: transformers must lay out pages as the tables expect."""

from __future__ import annotations

from typing import Any

from tatten.integrations.transformers.continuous_batching.tables import LayerGroup
from tatten.ops.sizes import ceil_div

PROBE = "__tatten__"


def check_layout(allocator: Any, group: LayerGroup) -> None:
    """Raise RuntimeError unless an allocator has the layout of pools and the slots that `group` computes."""
    kind, page = type(allocator).__name__, allocator.tokens_per_page
    for layer in allocator.layer_indices:
        for pool, slots in zip(allocator._kv_page_views[layer], allocator._kv_token_views[layer], strict=True):
            fits = pool.dim() == 4 and pool.shape[1] == page and pool.is_contiguous() and slots.is_contiguous()
            if not fits or pool.data_ptr() != slots.data_ptr() or pool.shape[2:] != slots.shape[1:]:
                raise RuntimeError(
                    f"the pool of layer {layer} must be [pages, {page}, kv_heads, head_dim] in order, got "
                    f"{tuple(pool.shape)} of strides {pool.stride()} from {kind}"
                )
    if group.n_pages * page >= 1 << 31:
        raise RuntimeError(f"the slots of a pool must be less than 2^31, got {group.n_pages} pages of {page} tokens")
    # Positions around the end of a page and of a ring, in blocks out of order.
    last = group.window or 2 * page
    blocks = [5, 3, *range(7, 7 + ceil_div(last, page))]
    allocator.block_table[PROBE] = blocks
    try:
        for past, new in ((0, 1), (max(0, last - 2), 4)):
            new = min(new, group.window or new)
            actual = allocator.get_write_indices(PROBE, past, new)
            expected = [group.slot(blocks, past + i) for i in range(new)]
            if actual != expected:
                raise RuntimeError(
                    f"tokens {past} to {past + new - 1} must have slots {expected}, got {actual} from {kind}"
                )
    finally:
        del allocator.block_table[PROBE]
