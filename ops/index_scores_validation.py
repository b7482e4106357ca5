"""Checks of `tatten::index_scores`. Each message names the argument, the expected and the actual value."""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.states import accumulator_dtype
from tatten.ops.validation import FLOAT_DTYPES, NARROW_DTYPES, check_devices, check_no_grad, dtype_of_query_or


def check_index_scores(
    query: Tensor, key: Tensor, weights: Tensor, attn_mask: Tensor | None, key_scale: Tensor | None
) -> None:
    """Raise TypeError, ValueError or NotImplementedError unless `index_scores` supports the arguments."""
    others = {"key": key, "weights": weights, "attn_mask": attn_mask, "key_scale": key_scale}
    check_no_grad("index_scores", query=query, **others)
    check_devices(query, **others)
    if query.dtype not in FLOAT_DTYPES:
        raise TypeError(f"`query` must be float16, bfloat16, float32 or float64, got {query.dtype}")
    if query.dim() != 4 or 0 in query.shape[2:]:
        wanted = "[batch, q_length, index_heads, dim], with at least one head and one dim"
        raise ValueError(f"`query` must be {wanted}, got shape {tuple(query.shape)}")
    batch, q_len, heads, dim = query.shape
    if key.dtype not in (query.dtype, *NARROW_DTYPES):
        raise TypeError(f"`key` must be {dtype_of_query_or(query.dtype, *NARROW_DTYPES)}, got {key.dtype}")
    if key.dim() != 3 or (key.shape[0], key.shape[2]) != (batch, dim):
        raise ValueError(f"`key` must be [{batch}, kv_length, {dim}], got shape {tuple(key.shape)}")
    _check_dtype("weights", weights, "", query)
    if tuple(weights.shape) != (batch, q_len, heads):
        raise ValueError(f"`weights` must have shape {(batch, q_len, heads)}, got {tuple(weights.shape)}")
    if attn_mask is not None:
        _check_mask(attn_mask, query, key)
    if key_scale is not None:
        _check_key_scale(key_scale, query, key)


def _check_mask(attn_mask: Tensor, query: Tensor, key: Tensor) -> None:
    if attn_mask.dtype != torch.bool:
        _check_dtype("attn_mask", attn_mask, "torch.bool, ", query)
    (batch, q_len), kv_len, shape = query.shape[:2], key.shape[1], tuple(attn_mask.shape)
    if len(shape) != 3 or shape[0] not in (1, batch) or shape[1] not in (1, q_len) or shape[2] != kv_len:
        wanted = f"[1 or {batch}, 1 or {q_len}, {kv_len}]"
        raise ValueError(f"`attn_mask` must be {wanted}, got shape {shape}")


def _check_key_scale(key_scale: Tensor, query: Tensor, key: Tensor) -> None:
    if key.dtype not in NARROW_DTYPES:
        raise TypeError(f"`key_scale` must be None unless `key` is float8_e4m3fn or int8, got `key` in {key.dtype}")
    if key_scale.dtype not in (torch.float32, query.dtype):
        wanted = " or ".join(dict.fromkeys(("torch.float32", str(query.dtype))))
        raise TypeError(f"`key_scale` must be {wanted}, got {key_scale.dtype}")
    shape = tuple(key.shape[:2])
    if tuple(key_scale.shape) not in (shape, (*shape, 1)):
        raise ValueError(f"`key_scale` must have shape {shape} or {(*shape, 1)}, got {tuple(key_scale.shape)}")


def _check_dtype(name: str, x: Tensor, other_dtypes: str, query: Tensor) -> None:
    dtypes = [*dict.fromkeys((torch.float16, torch.bfloat16, torch.float32, query.dtype))]
    if x.dtype not in dtypes:
        raise TypeError(
            f"`{name}` must be {other_dtypes}{', '.join(map(str, dtypes[:-1]))} or {dtypes[-1]}, got {x.dtype}"
        )


def fake_index_scores(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    scale: float = 1.0,
    attn_mask: Tensor | None = None,
    key_scale: Tensor | None = None,
) -> Tensor:
    """Return a tensor like the result of `index_scores`, uninitialised: its fake implementation."""
    check_index_scores(query, key, weights, attn_mask, key_scale)
    return query.new_empty((*query.shape[:2], key.shape[1]), dtype=accumulator_dtype(query.dtype))
