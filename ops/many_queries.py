"""Attention of many queries with its lse, by PyTorch's own flash kernels: the building block of a prefill.

The ops are for the few queries of a decode step. PyTorch's kernels take any number of queries, a causal flag in place
of a mask, and kv heads as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.cpu.flash import flash_problem
from tatten.ops.cuda.gpu import has_cudnn_decode
from tatten.ops.cuda.providers import cudnn_decodes_wrong
from tatten.ops.states import State

WIDEST_FLASH, WIDEST_CUDNN = 256, 128


def attend_many(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> State:
    """Return the state of queries over at least one key; `lse` is as in `merge_states`.

    Args:
        query: `[batch, q_heads, q_len, head_dim]`, dense in head_dim, like key and value.
        key, value: `[batch, kv_heads, kv_len, head_dim]`.
        causal: True if query `i` sees only the keys `0 ... i`; `kv_len` is then `q_len`.

    Raises:
        NotImplementedError: there is no kernel that returns the lse for these tensors; the message says why.
    """
    if reason := unsupported_reason(query, value):
        raise NotImplementedError(f"no flash kernel of PyTorch returns the lse here: {reason}")
    causal = causal and query.shape[2] > 1  # one query sees its one key: no kernel has to be causal
    if query.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
            query, key, value, 0.0, causal, scale=scale
        )
    elif _takes_cudnn(query):
        out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            query, key, value, None, True, 0.0, causal, False, scale=scale
        )[:2]
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention.default(
            query, key, value, 0.0, causal, False, scale=scale
        )[:2]
    return out, lse.reshape(query.shape[:3])


def unsupported_reason(query: Tensor, value: Tensor) -> str | None:
    """Return the reason why `attend_many` can't compute this, or None. Reads no data."""
    head_dim, device = query.shape[3], query.device.type
    if value.shape[3] != head_dim:
        return f"they take one head_dim, not {head_dim} for keys and {value.shape[3]} for values"
    if value.dtype != query.dtype:
        return f"they take one dtype, not {query.dtype} for queries and {value.dtype} for values"
    if device == "cpu":
        return flash_problem()
    if device != "cuda":
        return f"they take CPU and CUDA tensors, not {device}"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"on CUDA they take float16 and bfloat16, not {query.dtype}"
    if head_dim > WIDEST_FLASH or head_dim % 8:
        return f"on CUDA they take a head_dim up to {WIDEST_FLASH} in eights, not {head_dim}"
    return None


def _takes_cudnn(query: Tensor) -> bool:
    """Return True if cuDNN computes the call. Its kernel is made for Hopper, unlike PyTorch's flash attention."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cudnn.is_available()
    wrong = cudnn_decodes_wrong(query.device, query.shape[2])
    return enabled and not wrong and query.shape[3] <= WIDEST_CUDNN and has_cudnn_decode(query.device)
