"""Products of each head's rows with a weight of its own: `W_uv`, applied to what `tatten::latent_attention` summed."""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.validation import check_no_grad


def project_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `x @ weight.mT` for each head, in sums of float32 that are rounded once.

    `torch.bmm` would round `x` first, or want a copy of the weight in float32.

    Args:
        x: `[batch, heads, q_length, rank]`, float32, any strides.
        weight: `[heads, columns, rank]`, bfloat16, any strides.

    Returns:
        `[batch, heads, q_length, columns]`, bfloat16, contiguous.

    Raises:
        TypeError, ValueError: dtypes, shapes or devices do not fit; the message names the argument.
        NotImplementedError: gradients are required.
    """
    check_project_heads(x, weight)
    return torch.einsum("bhlr,hcr->bhlc", x, weight.float()).to(weight.dtype).contiguous()


def check_project_heads(x: Tensor, weight: Tensor) -> None:
    """Raise unless `project_heads` takes these."""
    check_no_grad("project_heads", x=x, weight=weight)
    if x.device != weight.device:
        raise ValueError(f"`weight` must be on the device of `x`, {x.device}, got {weight.device}")
    if x.dtype != torch.float32:
        raise TypeError(f"`x` must be float32, got {x.dtype}")
    if weight.dtype != torch.bfloat16:
        raise TypeError(f"`weight` must be bfloat16, got {weight.dtype}")
    if x.dim() != 4:
        raise ValueError(f"`x` must be [batch, heads, q_length, rank], got shape {tuple(x.shape)}")
    if weight.dim() != 3 or (weight.shape[0], weight.shape[2]) != (x.shape[1], x.shape[3]):
        wanted = f"[{x.shape[1]}, columns, {x.shape[3]}], of the heads and the rank of `x`"
        raise ValueError(f"`weight` must be {wanted}, got shape {tuple(weight.shape)}")


def fake_project_heads(x: Tensor, weight: Tensor) -> Tensor:
    """The result of `project_heads` without its numbers."""
    check_project_heads(x, weight)
    return weight.new_empty((*x.shape[:3], weight.shape[1]))
