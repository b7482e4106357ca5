"""Checks of `indices` and the arguments beside it. Each names the argument, the expected and the actual value."""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.call import AttentionCall
from tatten.ops.masks import EXCLUDING_BIAS
from tatten.ops.states import accumulator_dtype
from tatten.ops.validation import check_kv_heads, check_query, check_tensors


def check_picks(call: AttentionCall) -> None:
    """Raise ValueError or TypeError unless all `indices` fit a call that is valid without them. Reads no data."""
    for i, stored in enumerate(call.segments):
        if stored.indices is not None:
            names = call.name_of("indices", i), call.name_of("key", i)
            check_indices(stored.indices, call.query, stored.key, call.index_block, names)
    if call.window is not None:
        raise ValueError(f"`window` must be None with `indices`, got {call.window}: the picks say which keys count")
    if call.rest_bias is None:
        return
    mask = call.segments[0].attn_mask
    if mask is not None and mask.dtype == torch.bool:
        raise TypeError("`rest_bias` must come with an additive `attn_mask` or none, got one in torch.bool")
    least = torch.finfo(accumulator_dtype(call.query.dtype)).min
    if not least <= call.rest_bias <= EXCLUDING_BIAS:
        raise ValueError(f"`rest_bias` must lie between {least} and {EXCLUDING_BIAS}, got {call.rest_bias}")


def check_indices(indices: Tensor, query: Tensor, key: Tensor, index_block: int, names: tuple[str, str]) -> None:
    """Raise unless `indices` can be picks of `query` among the keys. `names`: of `indices` and of `key`, for errors."""
    name, key_name = names
    check_tensors(**{name: indices})
    check_query(query)
    if key.dim() != 4:
        raise ValueError(f"`{key_name}` must be [batch, heads, length, head_dim], got shape {tuple(key.shape)}")
    check_kv_heads(query, key, key_name)
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"`{name}` must be int32 or int64, got {indices.dtype}")
    batch, _, q_len, _ = query.shape
    heads = sorted({1, key.shape[1]})
    shape = tuple(indices.shape)
    if len(shape) != 4 or shape[0] != batch or shape[1] not in heads or shape[2] != q_len:
        wanted = f"[{batch}, {' or '.join(map(str, heads))}, {q_len}, picks]"
        raise ValueError(f"`{name}` must be {wanted}, got shape {shape}")
    if indices.device != query.device:
        raise ValueError(f"`{name}` must be on the device of `query`, {query.device}, got {indices.device}")
    if not isinstance(index_block, int | torch.SymInt):
        raise TypeError(f"`index_block` must be an int, got {type(index_block).__name__}")
    if index_block < 1:
        raise ValueError(f"`index_block` must be at least 1, got {index_block}")
