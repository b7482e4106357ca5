"""Attention "tatten", registered with transformers. Its code is loaded at the first call: DTensor takes seconds."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask


def attention(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Compute `sharded.attention`."""
    from tatten.integrations.transformers.sharded import attention as loaded

    return loaded(*args, **kwargs)


AttentionInterface.register("tatten", attention)
AttentionMaskInterface.register("tatten", sdpa_mask)  # without it, `attention_mask` would be None
