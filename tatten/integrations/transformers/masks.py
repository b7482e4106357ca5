"""The masks of attention "tatten": those of transformers' SDPA, with a block mask found once for all layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from tatten.integrations.transformers.config import made_for_sdpa
from tatten.integrations.transformers.handover import hand_over, running_prefill
from tatten.ops.decode import block_mask
from tatten.ops.masks import BlockMask
from tatten.ops.moved import moved
from tatten.passes.eligible import DEFAULT_MAX_Q_LEN

_BLOCK_MASK = "_tatten_block_mask"


def mask(q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0, **kwargs: Any) -> Tensor | None:
    """Make the mask of a forward pass, or return None if all keys count or the mask is causal.

    Models that do more with masks than pass them on get the mask of `attn_implementation="eager"`.
    """
    hand_over(None)  # a forward pass begins: drop the share of one that failed
    kwargs |= {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset}
    if running_prefill() is not None:
        check_only_causal(kwargs["mask_function"], kwargs["attention_mask"])
        return None
    attn_mask: Tensor | None
    if not made_for_sdpa(kwargs["config"]):
        attn_mask = eager_mask(**kwargs)
    else:
        if q_length == 1 and (isinstance(q_offset, Tensor) or q_offset + 1 != kv_offset + kv_length):
            kwargs["allow_is_causal_skip"] = False  # there may be unused slots
        attn_mask = sdpa_mask(**kwargs)
    return attn_mask if attn_mask is None or q_length > DEFAULT_MAX_Q_LEN else with_blocks(attn_mask)


def check_only_causal(mask_function: Callable[..., Any], attention_mask: Tensor | None) -> None:
    """Raise NotImplementedError unless a mask is plainly causal, the only one of a prefill over several ranks."""
    if mask_function is not causal_mask_function or (attention_mask is not None and not attention_mask.all()):
        kind = getattr(mask_function, "__qualname__", mask_function) if attention_mask is None else "padding"
        raise NotImplementedError(f"`model` must have causal masks alone for a prefill over several ranks, got {kind}")


def with_blocks(attn_mask: Tensor) -> Tensor:
    """Return a copy of a mask that keeps its block mask as an attribute.

    While a graph is compiled, and on devices without the op, return the mask itself.
    """
    if torch.compiler.is_compiling() or attn_mask.device.type not in ("cpu", "cuda"):
        return attn_mask
    with torch.inference_mode(False):  # inference tensors have no version counter
        attn_mask = attn_mask.clone()
    version = _version(attn_mask)
    if version is not None:
        setattr(attn_mask, _BLOCK_MASK, (version, block_mask(attn_mask)))
    return attn_mask


def _version(x: Tensor) -> int | None:
    """Return the version counter of a tensor, which each write increments, or None if PyTorch has moved it."""
    try:
        return x._version
    except Exception as error:
        moved("torch.Tensor._version", error, "each layer searches the mask for the keys that count")
        return None


def blocks_of(attn_mask: Tensor) -> BlockMask | None:
    """Return the block mask that `with_blocks` kept with a mask, or None if the mask was written to since.

    Return None while a CUDA graph is captured, too: the contents of the mask may differ at each replay.
    """
    version, blocks = getattr(attn_mask, _BLOCK_MASK, (None, None))
    if blocks is None or version != _version(attn_mask):
        return None
    return None if attn_mask.is_cuda and torch.cuda.is_current_stream_capturing() else blocks
