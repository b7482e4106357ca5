"""The checks that the ops make on real inputs. Each message names the argument, what was expected and what came."""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.states import accumulator_dtype

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_CUDA_HEAD_DIM = 512  # a tile of 32 keys in float32 is then 64 KiB


def check_tensors(**arguments: object) -> None:
    """Raise TypeError for what is no tensor; the dispatcher's own error does not name our arguments."""
    for name, argument in arguments.items():
        if not isinstance(argument, Tensor):
            raise TypeError(f"`{name}` must be a Tensor, got {type(argument).__name__}")


def check_no_grad(op: str, **tensors: Tensor | None) -> None:
    """Raise NotImplementedError if autograd would have to differentiate `op`."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise NotImplementedError(
                f"tatten.{op} has no backward: `{name}` must not require grad, got requires_grad=True; "
                "call it under torch.no_grad() or pass a detached tensor"
            )


def check_decode_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, kv_lens: Tensor | None
) -> None:
    """Raise ValueError, TypeError or NotImplementedError unless the inputs fit `tatten::decode_attention`.

    Reads no tensor's data, so it is safe on any device; `check_kv_lens` reads. Devices are left to `check_devices`.
    """
    if torch.is_grad_enabled():
        check_no_grad("decode_attention", query=query, key=key, value=value, attn_mask=attn_mask)
    dtype, q, k, v = query.dtype, query.shape, key.shape, value.shape
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"`query` must be float16, bfloat16, float32 or float64, got {dtype}")
    if key.dtype != dtype or value.dtype != dtype:
        name, tensor = ("key", key) if key.dtype != dtype else ("value", value)
        raise TypeError(f"`{name}` must have the dtype of `query`, {dtype}, got {tensor.dtype}")
    if len(q) != 4 or len(k) != 4 or len(v) != 4:
        name, shape = next((name, x) for name, x in (("query", q), ("key", k), ("value", v)) if len(x) != 4)
        raise ValueError(f"`{name}` must be [batch, heads, length, head_dim], got shape {tuple(shape)}")

    batch, q_heads, q_len, head_dim = q
    kv_heads, kv_len = k[1], k[2]
    if 0 in q:
        raise ValueError(f"`query` must have no dimension of size 0, got shape {tuple(q)}")
    if k[0] != batch or k[3] != head_dim:
        raise ValueError(f"`key` must be [{batch}, kv_heads, kv_length, {head_dim}], got shape {tuple(k)}")
    if v[:3] != k[:3] or v[3] == 0:
        raise ValueError(f"`value` must be [{batch}, {kv_heads}, {kv_len}, head_dim] like `key`, got shape {tuple(v)}")
    if kv_heads == 0 or q_heads % kv_heads:
        raise ValueError(f"`key` must have a number of heads that divides `query`'s {q_heads}, got {kv_heads}")

    if attn_mask is not None:
        check_mask(attn_mask, query, (batch, q_heads, q_len, kv_len))
    if kv_lens is not None:
        if kv_lens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"`kv_lens` must be int32 or int64, got {kv_lens.dtype}")
        if tuple(kv_lens.shape) != (batch,):
            raise ValueError(f"`kv_lens` must have shape ({batch},), got {tuple(kv_lens.shape)}")


def check_devices(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, kv_lens: Tensor | None) -> None:
    """Raise ValueError unless all are on one device. On a CPU the dispatcher sees to that."""
    for name, x in (("key", key), ("value", value), ("attn_mask", attn_mask), ("kv_lens", kv_lens)):
        if x is not None and x.device != query.device:
            raise ValueError(f"`{name}` must be on the device of `query`, {query.device}, got {x.device}")


def check_mask(attn_mask: Tensor, query: Tensor, scores: tuple[int, int, int, int]) -> None:
    """Raise unless `attn_mask` is a bool or additive mask that broadcasts to the shape `scores`."""
    if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise TypeError(f"`attn_mask` must be bool, float32 or `query`'s {query.dtype}, got {attn_mask.dtype}")
    shape = (1,) * (4 - attn_mask.dim()) + attn_mask.shape
    if len(shape) != 4 or (shape != scores and any(n not in (1, want) for n, want in zip(shape, scores, strict=True))):
        raise ValueError(
            "`attn_mask` must broadcast to [batch, q_heads, q_length, kv_length] = "
            f"{list(scores)}, got shape {tuple(attn_mask.shape)}"
        )


def check_kv_lens(kv_lens: Tensor, kv_len: int) -> list[int]:
    """The lengths, or ValueError unless each lies in [0, kv_len]. Reads the tensor: for CPU only."""
    lens: list[int] = kv_lens.tolist()
    for n in lens:
        if not 0 <= n <= kv_len:
            raise ValueError(f"`kv_lens` must lie between 0 and `key`'s length {kv_len}, got {n}")
    return lens


def check_states(op: str, out: Tensor, lse: Tensor, out_name: str = "out", lse_name: str = "lse") -> None:
    """Raise unless `(out, lse)` is a state or a stack of them: `[..., head_dim]` and `[...]`."""
    check_no_grad(op, **{out_name: out, lse_name: lse})
    if out.dtype not in FLOAT_DTYPES:
        raise TypeError(f"`{out_name}` must be float16, bfloat16, float32 or float64, got {out.dtype}")
    lse_dtype = accumulator_dtype(out.dtype)
    if lse.dtype != lse_dtype:
        raise TypeError(f"`{lse_name}` must be {lse_dtype} for `{out_name}` in {out.dtype}, got {lse.dtype}")
    if lse.device != out.device:
        raise ValueError(f"`{lse_name}` must be on the device of `{out_name}`, {out.device}, got {lse.device}")
    if out.dim() == 0 or lse.shape != out.shape[:-1]:
        raise ValueError(
            f"`{lse_name}` must have `{out_name}`'s shape without its last dimension, "
            f"{tuple(out.shape[:-1])}, got {tuple(lse.shape)}"
        )


def check_stack(out: Tensor, lse: Tensor) -> None:
    """Raise unless `(out, lse)` is a stack of at least one state."""
    check_states("merge_states", out, lse)
    if out.dim() < 2:
        raise ValueError(f"`out` must be states stacked on dim 0, [n, ..., head_dim], got shape {tuple(out.shape)}")
    if out.shape[0] == 0:
        raise ValueError(f"`out` must hold at least one state, got shape {tuple(out.shape)}")


def check_state_pair(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Raise unless both are states and agree in shape, dtype and device."""
    check_states("merge_state", out_a, lse_a, "out_a", "lse_a")
    check_states("merge_state", out_b, lse_b, "out_b", "lse_b")
    if out_b.dtype != out_a.dtype:
        raise TypeError(f"`out_b` must have the dtype of `out_a`, {out_a.dtype}, got {out_b.dtype}")
    if out_b.shape != out_a.shape:
        raise ValueError(f"`out_b` must have the shape of `out_a`, {tuple(out_a.shape)}, got {tuple(out_b.shape)}")
    if out_b.device != out_a.device:
        raise ValueError(f"`out_b` must be on the device of `out_a`, {out_a.device}, got {out_b.device}")
