"""Attention "tatten" and its masks, registered with transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from tatten.integrations.transformers.config import weights_collected
from tatten.integrations.transformers.continuous_batching.attention import BATCHING_ARGUMENT, PAGES_ARGUMENT
from tatten.integrations.transformers.continuous_batching.attention import attention as paged_attention
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
    """Compute attention "tatten": over pages in continuous batching, over a sharded cache, or on one device.

    Keys and values of a sharded cache are DTensors, or plain tensors that the model expanded from this rank's latents.
    """
    if BATCHING_ARGUMENT in kwargs:
        pages = kwargs.pop(PAGES_ARGUMENT, None)
        batched: tuple[Tensor, None] = paged_attention(
            module, query, key, value, attention_mask, pages, *args, **kwargs
        )
        return batched
    if weights_collected():
        kwargs["output_attentions"] = True
    if (prefill := running_prefill()) is not None:
        from tatten.integrations.transformers.prefill import attention as striped_attention

        return striped_attention(prefill, module, query, key, value, attention_mask, *args, **kwargs)
    from torch.distributed.tensor import DTensor  # takes seconds, unless transformers has loaded a model

    layout = take_over(module, key)
    if isinstance(key, DTensor):
        from tatten.caches.interleaved import Interleaved

        layout = Interleaved(key.device_mesh, key.placements)
    elif layout is not None:
        key, value = layout.keys(key), layout.keys(value)
    if (blocks := kwargs.get("block_indices")) is not None:  # a selection of keys, which the ops would ignore
        raise NotImplementedError(
            f'`block_indices` must be None for attention "tatten", got a {type(blocks).__name__}: '
            f'{type(module).__name__} makes masks of them with attn_implementation="sdpa" or "eager"'
        )
    if layout is not None:
        from tatten.caches.interleaved import Interleaved
        from tatten.integrations.transformers.sharded import attention as sharded_attention

        assert isinstance(layout, Interleaved)
        assert isinstance(key, DTensor)
        assert isinstance(value, DTensor)
        return sharded_attention(module, query, key, value, attention_mask, *args, layout=layout, **kwargs)
    from tatten.integrations.transformers.local import attention as local_attention

    return local_attention(module, query, key, value, attention_mask, *args, **kwargs)


AttentionInterface.register("tatten", attention)
AttentionMaskInterface.register("tatten", mask)
