"""Attention "tatten" and its masks, registered with transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from tatten.integrations.transformers.masks import mask


def attention(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Attention "tatten" of transformers: over the DTensors of a sharded cache, or on one device."""
    from torch.distributed.tensor import DTensor  # takes seconds, unless transformers has loaded a model

    sharded = isinstance(key, DTensor)
    for name in ("block_indices", "indices")[: 1 + sharded]:  # selected keys, which would be missed without an error
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f'`{name}` must be None for attention "tatten"{" over a sharded cache" * sharded}, got a '
                f"{type(kwargs[name]).__name__}: {type(module).__name__} makes masks of them with "
                'attn_implementation="sdpa" or "eager"'
            )
    if isinstance(key, DTensor):
        from tatten.integrations.transformers.sharded import attention as over_shards

        return over_shards(module, query, key, *args, **kwargs)
    from tatten.integrations.transformers.local import attention as on_one_device

    return on_one_device(module, query, key, *args, **kwargs)


AttentionInterface.register("tatten", attention)
AttentionMaskInterface.register("tatten", mask)
