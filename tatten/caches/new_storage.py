"""Storage that outlives the graph that first writes to it. This module imports Dynamo, which takes seconds."""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.caches.static_address import mark_static


@torch.compiler.disable(reason="a graph can't allocate storage that outlives it: store the first tokens in eager mode")
def new_storage(like: Tensor, batch: int, slots: int) -> Tensor:
    """Return zeros `[batch, kv_heads, slots, head_dim]` like the keys or values `like`, marked as a static address."""
    storage = like.new_zeros(batch, like.shape[1], slots, like.shape[3])
    mark_static(storage)
    return storage
