"""The public functions that merge attention states. They work in eager mode and inside `torch.compile`."""

from __future__ import annotations

import torch
from torch import Tensor

import tatten.ops.library  # noqa: F401  (defines torch.ops.tatten)
from tatten.ops.states import merge
from tatten.ops.validation import check_stack, check_state_pair, check_tensors


def merge_states(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention states over disjoint sets of keys, stacked on dim 0.

    The sum runs in the order of dim 0, so the result is reproducible to the bit. A state whose lse is -inf, +inf or NaN
    is empty, whatever its `out` holds. In a compiled function this is plain PyTorch, which Inductor fuses with its
    neighbours. Formula: FlashInfer, arXiv 2501.01005, section 2.2.

    A weight is as exact as the lse that it comes from: relative to 1 it is off by up to `2^-23 * max(abs(lse))` in
    float32, half of it from each of two. That is rounding for ordinary scores, and everything where a query's keys all
    have a bias like -1e9: there `lse = bias + log(n)` no longer tells 3 keys from 1000. `decode_attention` and
    `bifurcated_attention` are exact for such queries, too, as they merge within one call by other means; `tree_merge`
    is not.

    Args:
        out: `[n, ..., head_dim]`.
        lse: `[n, ...]`, natural logarithm, float32 (float64 for float64 `out`).

    Returns:
        `out` `[..., head_dim]` in `out`'s dtype, and `lse` `[...]`.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices do not fit.
        NotImplementedError: gradients are wanted.
    """
    check_tensors(out=out, lse=lse)
    if torch.compiler.is_compiling():
        check_stack(out, lse)
        return merge(out, lse)
    merged_out, merged_lse = torch.ops.tatten.merge_states.default(out, lse)
    return merged_out, merged_lse


def merge_state(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two attention states over disjoint sets of keys: `merge_states` for two, commutative to the bit.

    Args:
        out_a, out_b: `[..., head_dim]`, of one shape and dtype.
        lse_a, lse_b: `[...]`.

    Returns, raises: as `merge_states`.
    """
    check_tensors(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    if torch.compiler.is_compiling():
        check_state_pair(out_a, lse_a, out_b, lse_b)
        return merge(torch.stack((out_a, out_b)), torch.stack((lse_a, lse_b)))
    out, lse = torch.ops.tatten.merge_state.default(out_a, lse_a, out_b, lse_b)
    return out, lse
