"""Linear layers of one row with the ops around them: `fused_linear`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tatten.ops.skinny_linear import check_linear_no_grad, check_linear_operands

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
# A program of 16 warps holds all features of a row of a weight in registers, and with a gate of a row of both weights.
MOST_FEATURES, MOST_GATED_FEATURES = 1 << 15, 1 << 14


def fused_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    gate: str | None = None,
    residual: Tensor | None = None,
    prefetch: bool = False,
) -> list[Tensor]:
    """Compute `x @ weight.T` for each weight and one row `x`, with a norm before it, and a gate and a sum after it.

    One launch replaces up to four. A decode step of a small model has many launches that are shorter than the time
    from one launch to the next.

    Args:
        x: `[..., in_features]` with one row, so that all other dims have size 1. bfloat16 or float16, any strides.
        weights: one to three of `[out_features, in_features]`, in the dtype of `x`, any strides. On CUDA, a weight that
            is not contiguous is copied.
        norm_weight: `[in_features]`, in the dtype of `x`. If given, the layers read the RMS norm (arXiv 1910.07467) of
            `x`, which is `x * rsqrt(mean(x ** 2) + eps) * norm_weight`.
        eps: that of the norm.
        gate: "silu", "gelu" or "gelu_tanh". If given, there are two weights of one shape, and one result, the
            activation of the first product times the second product.
        residual: `[..., out_features]`, in the dtype of `x`, any strides. If given, there is one result, to which it is
            added.
        prefetch: let the launch load weights, also that of the norm, before the previous launch has ended. No launch
            that may still run then may write them.

    Returns:
        For each weight, or for both of a gate, `[..., out_features]` in the dtype of `x`, contiguous. All ops are
        computed in float32, and the result is rounded once. On CUDA, the factor of the norm multiplies sums of `x *
        norm_weight * weight`, which have to fit into float32.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or numbers do not fit; the message names the argument.
        NotImplementedError: gradients are required.
    """
    check_fused_linear(x, weights, norm_weight, eps, gate, residual)
    row = x.float()
    if norm_weight is not None:
        row = row * torch.rsqrt(row.square().mean(-1, keepdim=True) + eps) * norm_weight.float()
    products = [row @ weight.float().T for weight in weights]
    if gate is not None:
        products = [GATES[gate](products[0]) * products[1]]
    if residual is not None:
        products = [products[0] + residual.float()]
    return [product.to(x.dtype) for product in products]


def check_fused_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    norm_weight: Tensor | None,
    eps: float,
    gate: str | None,
    residual: Tensor | None,
) -> None:
    """Raise unless `fused_linear` supports the arguments."""
    check_linear_no_grad("fused_linear", x, weights, norm_weight=norm_weight, residual=residual)
    check_linear_operands(x, weights)
    in_features = x.shape[-1]
    if x.numel() != in_features:
        raise ValueError(f"`x` must have one row, got shape {tuple(x.shape)}")
    most = MOST_FEATURES if gate is None else MOST_GATED_FEATURES
    if not 1 <= in_features <= most:
        raise ValueError(
            f"`x` must have 1 to {most} features{'' if gate is None else ' with `gate`'}, got {in_features}"
        )
    if norm_weight is not None:
        _check_like(x, "norm_weight", norm_weight, (in_features,))
        if not eps >= 0:
            raise ValueError(f"`eps` must be at least 0, got {eps}")
    if gate is not None:
        if gate not in GATES:
            raise ValueError(f"`gate` must be one of {', '.join(GATES)}, got {gate!r}")
        if len(weights) != 2 or weights[0].shape != weights[1].shape:
            shapes = [tuple(weight.shape) for weight in weights]
            raise ValueError(f"`weights` must be two of one shape with `gate`, got shapes {shapes}")
    if residual is not None:
        if len(weights) != (1 if gate is None else 2):
            raise ValueError(f"`residual` must be None for several results, got one with {len(weights)} `weights`")
        _check_like(x, "residual", residual, (*x.shape[:-1], weights[0].shape[0]))


def _check_like(x: Tensor, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.device != x.device:
        raise ValueError(f"`{name}` must be on the device of `x`, {x.device}, got {tensor.device}")
    if tensor.dtype != x.dtype:
        raise TypeError(f"`{name}` must have the dtype of `x`, {x.dtype}, got {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"`{name}` must have shape {shape}, got {tuple(tensor.shape)}")


def fake_fused_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    gate: str | None = None,
    residual: Tensor | None = None,
    prefetch: bool = False,
) -> list[Tensor]:
    """Return tensors like the results of `fused_linear`, uninitialised: its fake implementation."""
    check_fused_linear(x, weights, norm_weight, eps, gate, residual)
    return [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights[: 1 if gate else None]]
