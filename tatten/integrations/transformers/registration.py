"""Attention "tatten" and its masks, registered with transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from tatten.integrations.transformers.config import weights_collected
from tatten.integrations.transformers.continuous_batching.attention import KEYWORD, OF_A_BATCH
from tatten.integrations.transformers.continuous_batching.attention import attention as over_pages
from tatten.integrations.transformers.handover import running_prefill, take_over
from tatten.integrations.transformers.masks import mask


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention "tatten" of transformers: over pages in continuous batching, over a sharded cache, or on one device.

    Keys and values of a sharded cache are DTensors, or what the model has expanded from this rank's latents.
    """
    if OF_A_BATCH in kwargs:
        pages = kwargs.pop(KEYWORD, None)
        batched: tuple[Tensor, None] = over_pages(
            module, query, key, value, attention_mask, *args, pages=pages, **kwargs
        )
        return batched
    if weights_collected():
        kwargs["output_attentions"] = True
    if (prefill := running_prefill()) is not None:
        from tatten.integrations.transformers.prefill import attention as striped

        return striped(prefill, module, query, key, value, attention_mask, *args, **kwargs)
    from torch.distributed.tensor import DTensor  # takes seconds, unless transformers has loaded a model

    layout = take_over(module, key)
    if isinstance(key, DTensor):
        from tatten.caches.interleaved import Interleaved

        layout = Interleaved(key.device_mesh, key.placements)
    elif layout is not None:
        key, value = layout.keys(key), layout.keys(value)
    if (blocks := kwargs.get("block_indices")) is not None:  # selected keys, which would be missed
        raise NotImplementedError(
            f'`block_indices` must be None for attention "tatten", got a {type(blocks).__name__}: '
            f'{type(module).__name__} makes masks of them with attn_implementation="sdpa" or "eager"'
        )
    if layout is not None:
        from tatten.caches.interleaved import Interleaved
        from tatten.integrations.transformers.sharded import attention as over_shards

        assert isinstance(layout, Interleaved)
        assert isinstance(key, DTensor)
        assert isinstance(value, DTensor)
        return over_shards(module, query, key, value, attention_mask, *args, layout=layout, **kwargs)
    from tatten.integrations.transformers.local import attention as on_one_device

    return on_one_device(module, query, key, value, attention_mask, *args, **kwargs)


AttentionInterface.register("tatten", attention)
AttentionMaskInterface.register("tatten", mask)
