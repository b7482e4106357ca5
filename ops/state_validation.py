"""Checks of attention states. Each message names the argument, the expected and the actual value."""

from __future__ import annotations

from torch import Tensor

from tatten.ops.states import accumulator_dtype
from tatten.ops.validation import FLOAT_DTYPES, check_no_grad


def check_states(op: str, out: Tensor, lse: Tensor, out_name: str = "out", lse_name: str = "lse") -> None:
    """Raise unless `(out, lse)` is a state or a stack of states: `[..., head_dim]` and `[...]`."""
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
