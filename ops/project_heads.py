"""Products of each head's rows with the head's own weight: queries with `W_uk`, and sums over latents with `W_uv`."""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.validation import check_no_grad


def project_heads(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """Compute `x @ weight.mT` for each head, with float32 sums that are rounded once or not at all.

    `torch.bmm` would first round a float32 `x`, or need a copy of the weight in float32.

    Args:
        x: `[batch, heads, q_length, rank]`, float32 or bfloat16, any strides.
        weight: `[heads, columns, rank]`, bfloat16, any strides.
        out_dtype: bfloat16, which is the default, or float32.

    Returns:
        `[batch, heads, q_length, columns]` in `out_dtype`, contiguous.

    Raises:
        TypeError, ValueError: dtypes, shapes or devices do not fit; the message names the argument.
        NotImplementedError: gradients are required.
    """
    out_dtype = check_project_heads(x, weight, out_dtype)
    return torch.einsum("bhlr,hcr->bhlc", x.float(), weight.float()).to(out_dtype).contiguous()


def check_project_heads(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the result; raise unless `project_heads` supports the arguments."""
    check_no_grad("project_heads", x=x, weight=weight)
    if x.device != weight.device:
        raise ValueError(f"`weight` must be on the device of `x`, {x.device}, got {weight.device}")
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"`x` must be float32 or bfloat16, got {x.dtype}")
    if weight.dtype != torch.bfloat16:
        raise TypeError(f"`weight` must be bfloat16, got {weight.dtype}")
    if out_dtype not in (None, torch.float32, torch.bfloat16):
        raise TypeError(f"`out_dtype` must be float32 or bfloat16, got {out_dtype}")
    if x.dim() != 4:
        raise ValueError(f"`x` must be [batch, heads, q_length, rank], got shape {tuple(x.shape)}")
    if weight.dim() != 3 or (weight.shape[0], weight.shape[2]) != (x.shape[1], x.shape[3]):
        wanted = f"[{x.shape[1]}, columns, {x.shape[3]}], with the heads and the rank of `x`"
        raise ValueError(f"`weight` must be {wanted}, got shape {tuple(weight.shape)}")
    return out_dtype or weight.dtype


def fake_project_heads(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor like the result of `project_heads`, uninitialised: its fake implementation."""
    return weight.new_empty((*x.shape[:3], weight.shape[1]), dtype=check_project_heads(x, weight, out_dtype))
