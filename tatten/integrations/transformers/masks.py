"""The masks of attention "tatten": those of transformers' SDPA, with what is found in them once for all layers."""

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

_FOUND = "_tatten_block_mask"


def mask(q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0, **kwargs: Any) -> Tensor | None:
    """Make the mask of a forward pass; None where all keys count or `is_causal` says the same.

    Models that do more with masks than to pass them on get what they get with `attn_implementation="eager"`.
    """
    hand_over(None)  # a forward pass begins: what is left is of one that failed
    kwargs |= {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset}
    if running_prefill() is not None:
        check_only_causal(kwargs["mask_function"], kwargs["attention_mask"])
        return None
    made: Tensor | None
    if not made_for_sdpa(kwargs["config"]):
        made = eager_mask(**kwargs)
    else:
        if q_length == 1 and (isinstance(q_offset, Tensor) or q_offset + 1 != kv_offset + kv_length):
            kwargs["allow_is_causal_skip"] = False  # there are unused slots, or may be
        made = sdpa_mask(**kwargs)
    return made if made is None or q_length > DEFAULT_MAX_Q_LEN else with_blocks(made)


def check_only_causal(mask_function: Callable[..., Any], attention_mask: Tensor | None) -> None:
    """Raise unless a mask is causal and no more: a prefill over several ranks has none."""
    if mask_function is not causal_mask_function or (attention_mask is not None and not attention_mask.all()):
        what = getattr(mask_function, "__qualname__", mask_function) if attention_mask is None else "padding"
        raise NotImplementedError(f"`model` must have causal masks alone for a prefill over several ranks, got {what}")


def with_blocks(made: Tensor) -> Tensor:
    """Find the block mask of a mask that was just made, and keep it with that: where the op runs, and not compiled."""
    if torch.compiler.is_compiling() or made.device.type not in ("cpu", "cuda"):
        return made
    with torch.inference_mode(False):  # inference tensors do not say whether they were written to
        made = made.clone()
    version = _version(made)
    if version is not None:
        setattr(made, _FOUND, (version, block_mask(made)))
    return made


def _version(x: Tensor) -> int | None:
    """A number that each write to a tensor changes; None where there is none."""
    try:
        return x._version
    except Exception as error:
        moved("torch.Tensor._version", error, "each layer searches the mask for the keys that count")
        return None


def blocks_of(attn_mask: Tensor) -> BlockMask | None:
    """Return the blocks that `with_blocks` found in a mask, or None if the mask was written to since.

    It returns None while a CUDA graph is captured, too: the graph reads the mask as it is at each replay.
    """
    version, blocks = getattr(attn_mask, _FOUND, (None, None))
    if blocks is None or version != _version(attn_mask):
        return None
    return None if attn_mask.is_cuda and torch.cuda.is_current_stream_capturing() else blocks
