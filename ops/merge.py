"""The public functions that merge attention states. They work in eager mode and inside `torch.compile`."""

from __future__ import annotations

import torch
from torch import Tensor

import tatten.ops.library  # noqa: F401  (defines torch.ops.tatten)
from tatten.ops.state_validation import check_stack, check_state_pair
from tatten.ops.states import merge
from tatten.ops.validation import check_no_grad, check_tensors


def merge_states(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention states over disjoint sets of keys, stacked on dim 0.

    The sum runs in the order of dim 0, so the result is reproducible to the bit. A state whose lse is -inf, +inf or NaN
    is empty, whatever its `out` holds. In a compiled function this is plain PyTorch, which Inductor fuses with its
    neighbours. Formula: FlashInfer, arXiv 2501.01005, section 2.2.

    A weight is only as exact as the lse that it is computed from: in float32 it is off by up to
    `2^-23 * max(abs(lse))`, relative to 1. With ordinary scores that is rounding. If all keys of a query have a bias
    like -1e9, nothing exact is left: `lse = bias + log(n)` no longer tells 3 keys from 1000. `decode_attention` and
    `bifurcated_attention` are exact there, too, because they merge by other means within a call; `tree_merge` is not.

    Args:
        out: `[n, ..., head_dim]`.
        lse: `[n, ...]`, natural logarithm, float32 (float64 for float64 `out`).

    Returns:
        `out` `[..., head_dim]` in `out`'s dtype, and `lse` `[...]`.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices are invalid.
        NotImplementedError: gradients are required.

    Examples:
        >>> import torch, tatten
        >>> query, (key, value) = torch.randn(1, 8, 1, 64), torch.randn(2, 1, 2, 300, 64)
        >>> parts = [slice(0, 100), slice(100, 120), slice(120, 300)]
        >>> states = [tatten.decode_attention(query, key[:, :, i], value[:, :, i], return_lse=True) for i in parts]
        >>> out, lse = tatten.merge_states(*map(torch.stack, zip(*states)))
        >>> torch.allclose(out, tatten.decode_attention(query, key, value), atol=1e-5)
        True
    """
    check_tensors(out=out, lse=lse)
    if torch.compiler.is_compiling():
        check_stack(out, lse)
        return merge(out, lse)
    check_no_grad("merge_states", out=out, lse=lse)
    merged_out, merged_lse = torch.ops.tatten.merge_states.default(out, lse)
    return merged_out, merged_lse


def merge_state(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two attention states over disjoint sets of keys: `merge_states` for two, commutative to the bit.

    Args:
        out_a: `[..., head_dim]`.
        lse_a: `[...]`, as in `merge_states`.
        out_b: like `out_a`, in shape and dtype.
        lse_b: like `lse_a`.

    Returns:
        `(out, lse)`, as in `merge_states`. Errors are the same, too.

    Examples:
        >>> import torch, tatten
        >>> query, (key, value) = torch.randn(1, 8, 1, 64), torch.randn(2, 1, 2, 300, 64)
        >>> state = tatten.decode_attention(query, key[:, :, :250], value[:, :, :250], return_lse=True)
        >>> other = tatten.decode_attention(query, key[:, :, 250:], value[:, :, 250:], return_lse=True)
        >>> out, lse = tatten.merge_state(*state, *other)
        >>> torch.allclose(out, tatten.decode_attention(query, key, value), atol=1e-5)
        True
    """
    check_tensors(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    check_state_pair(out_a, lse_a, out_b, lse_b)
    return merge_states(torch.stack((out_a, out_b)), torch.stack((lse_a, lse_b)))
