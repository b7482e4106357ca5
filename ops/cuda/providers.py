"""Who computes plain decode attention on CUDA: ours, or kernels of others that return the lse; who is fastest where."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from tatten.ops.cuda.heuristics import capability
from tatten.ops.cuda.tuning.regimes import REGIMES
from tatten.ops.layout import pack_gqa

State = tuple[Tensor, Tensor]


def unsupported_reason(provider: str, query: Tensor, key: Tensor, value: Tensor, plain: bool) -> str | None:
    """Why `provider` can't compute this, or None. `plain`: all keys count, as they are, in `query`'s dtype."""
    head_dim, kv_len = key.shape[3], key.shape[2]
    if provider == "triton":
        if key.element_size() == 1 and capability(query.device) < (8, 9):
            return "it takes float8 from compute capability 8.9 on"
        return "it takes no float64" if query.dtype == torch.float64 else None
    if not plain:
        return "it takes no mask, lengths, window, soft cap, sinks or float8"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {query.dtype}"
    if provider == "fa3" and importlib.util.find_spec("flash_attn_interface") is None:
        return "FlashAttention-3, module flash_attn_interface, is not installed (hopper/ of Dao-AILab/flash-attention)"
    widest = 128 if provider == "cudnn" else 256
    if head_dim != value.shape[3] or head_dim > widest or head_dim % 8:
        return f"it takes one head_dim up to {widest} in eights, not {head_dim} and {value.shape[3]}"
    if kv_len == 0 or any(x.stride(3) != 1 for x in (query, key, value)):
        return "it takes keys, at least one, that are dense in head_dim"
    return None


def cudnn_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> State:
    """The state from cuDNN, which packs the query heads of a kv head itself where there is one query."""
    state = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
        query, key, value, None, True, 0.0, False, False, scale=scale
    )
    return state[0].contiguous(), state[1].reshape(query.shape[:3])


def flash_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> State:
    """The state from PyTorch's FlashAttention-2, which splits the keys where heads are few."""
    packed = pack_gqa(query, key.shape[1])
    state = torch.ops.aten._scaled_dot_product_flash_attention.default(packed, key, value, scale=scale)
    return state[0].reshape(query.shape), state[1].reshape(query.shape[:3])


def fa3_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> State:
    """The state from FlashAttention-3, which packs query heads and splits the keys as it sees fit."""
    from flash_attn_interface import flash_attn_with_kvcache

    inputs = (x.transpose(1, 2) for x in (query, key, value))
    out, lse, *_ = flash_attn_with_kvcache(*inputs, softmax_scale=scale, return_softmax_lse=True)
    return out.transpose(1, 2).contiguous(), lse.contiguous()


def fastest(query: Tensor, key: Tensor, value: Tensor) -> str:
    """The provider that was fastest for plain decode attention of such a shape, of those that can compute it."""
    batch, kv_heads, kv_len, _ = key.shape
    provider = regime(query.shape[1] // kv_heads * query.shape[2], batch * kv_heads, kv_len)
    return "triton" if unsupported_reason(provider, query, key, value, plain=True) else provider


def regime(packed: int, pairs: int, kv_len: int) -> str:
    """The fastest provider for `packed` queries on each of `pairs` (sequence, kv head) pairs."""
    return "triton" if packed > 16 else nearest_regime(pairs, kv_len)


def nearest_regime(pairs: int, kv_len: int) -> str:
    """What was measured for the nearest powers of two of (sequence, kv head) pairs and of keys."""
    row = min(max(round_log2(pairs), 0), len(REGIMES) - 1)
    column = min(max(round_log2(kv_len) - 8, 0), len(REGIMES[row]) - 1)
    return {"T": "triton", "C": "cudnn", "F": "flash", "A": "fa3"}[REGIMES[row][column]]


def round_log2(n: int) -> int:
    """The exponent of the power of two that is nearest to `n` in ratio; 0 for 0."""
    return max(0, (n * n).bit_length() // 2)
