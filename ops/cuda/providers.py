"""Providers of plain decode attention on CUDA: tatten's kernels, others that return the lse, and the choice.

The choice needs sizes and dtypes only, so the op and the report make it with the same function.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tatten.ops.cuda.heuristics import capability, device_name
from tatten.ops.cuda.tuning import Table, table_of
from tatten.ops.layout import pack_gqa
from tatten.ops.states import State


@dataclass(frozen=True)
class Workload:
    """Properties of a call on which the choice of a provider depends.

    Attributes:
        device: where the tensors are.
        dtype: of the query.
        kv_dtype: of key and value.
        query: its shape `[batch, q_heads, q_length, head_dim]`.
        key: its shape `[batch, kv_heads, kv_length, head_dim]`.
        value_dim: the head_dim of value.
        dense: query, key and value have a stride of 1 over head_dim.
        plain: all keys count as they are: no mask, lengths, window, soft cap or sinks.
    """

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    query: tuple[int, ...]
    key: tuple[int, ...]
    value_dim: int
    dense: bool
    plain: bool

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, plain: bool, size: Callable[[int], int] = int) -> Workload:
        """The workload of tensors, which may be fake; `size` makes a number of a symbolic size."""
        dense = all(size(x.stride(3)) == 1 for x in (query, key, value))
        query_shape, key_shape = (tuple(size(n) for n in x.shape) for x in (query, key))
        return cls(
            query.device, query.dtype, key.dtype, query_shape, key_shape, size(value.shape[3]), dense=dense, plain=plain
        )

    @property
    def packed(self) -> int:
        """The queries that read one kv head of a sequence."""
        return self.query[1] // self.key[1] * self.query[2]

    @property
    def pairs(self) -> int:
        """The number of (sequence, kv head) pairs."""
        return self.key[0] * self.key[1]


def choose_provider(work: Workload) -> str:
    """The provider that `provider="auto"` takes: the one measured to be fastest if it can, else Triton.

    `"reference"` is plain PyTorch in float64, which is for checking models and has no kernel of its own.
    """
    if work.dtype == torch.float64:
        return "reference"
    provider = _tuned(work).provider(work.pairs, work.key[2]) if _asks_table(work) else "triton"
    return "triton" if unsupported_reason(provider, work) else provider


def borrowed_table(work: Workload) -> str:
    """A note on the choice where the table of another GPU made it; else empty."""
    device, measured = device_name(work.device), _tuned(work).device
    if not _asks_table(work) or device in ("", measured):
        return ""
    return f"provider table measured on {measured}, borrowed for {device}"


def _asks_table(work: Workload) -> bool:
    """Whether another provider than Triton is considered: none was faster with more packed queries."""
    return work.plain and unsupported_reason("flash", work) is None and 0 < work.packed <= 16


def _tuned(work: Workload) -> Table:
    return table_of(device_name(work.device), capability(work.device))


def unsupported_reason(provider: str, work: Workload) -> str | None:
    """Why `provider` can't compute this, or None."""
    head_dim, value_dim = work.key[3], work.value_dim
    if provider == "triton":
        if work.kv_dtype.itemsize == 1 and capability(work.device) < (8, 9):
            return "it takes float8 from compute capability 8.9 on"
        return "it takes no float64" if work.dtype == torch.float64 else None
    if not work.plain or work.kv_dtype != work.dtype:
        return "it takes no mask, lengths, window, soft cap, sinks or float8"
    if work.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {work.dtype}"
    if provider == "fa3" and importlib.util.find_spec("flash_attn_interface") is None:
        return "FlashAttention-3, module flash_attn_interface, is not installed (hopper/ of Dao-AILab/flash-attention)"
    widest = 128 if provider == "cudnn" else 256
    if head_dim != value_dim or head_dim > widest or head_dim % 8:
        return f"it takes one head_dim up to {widest} in eights, not {head_dim} and {value_dim}"
    if work.key[2] == 0 or not work.dense:
        return "it takes keys, at least one, that are dense in head_dim"
    return None


def cudnn_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> State:
    """Call cuDNN, which packs the query heads of a kv head itself if there is one query."""
    state = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
        query, key, value, None, True, 0.0, False, False, scale=scale
    )
    return state[0].contiguous(), state[1].reshape(query.shape[:3])


def flash_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> State:
    """Call PyTorch's FlashAttention-2, which splits the keys if heads are few."""
    packed = pack_gqa(query, key.shape[1])
    state = torch.ops.aten._scaled_dot_product_flash_attention.default(packed, key, value, scale=scale)
    return state[0].reshape(query.shape), state[1].reshape(query.shape[:3])


def fa3_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> State:
    """Call FlashAttention-3, which packs query heads and splits the keys as it sees fit."""
    from flash_attn_interface import flash_attn_with_kvcache

    inputs = (x.transpose(1, 2) for x in (query, key, value))
    out, lse, *_ = flash_attn_with_kvcache(*inputs, softmax_scale=scale, return_softmax_lse=True)
    return out.transpose(1, 2).contiguous(), lse.contiguous()
