"""The keys with the largest scores: `top_picks`."""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.validation import check_no_grad


def top_picks(scores: Tensor, k: int) -> Tensor:
    """Return the indices of the `k` largest scores of each row, in ascending order of the indices.

    The result names the same keys as `scores.topk(k).indices`, where scores don't tie. NaN counts as the largest
    number. The key with the lowest index wins a tie, so that equal scores always give equal picks.

    Args:
        scores: `[..., n]`, float32, any strides.
        k: the number of indices, 1 to `n`.

    Returns:
        `[..., k]` in int32, contiguous.

    Raises:
        TypeError, ValueError: `scores` or `k` do not fit; the message names the argument.
        NotImplementedError: gradients are required.
    """
    check_top_picks(scores, k)
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :k].sort(dim=-1).values.to(torch.int32).contiguous()


def check_top_picks(scores: Tensor, k: int) -> None:
    """Raise unless `top_picks` supports the arguments."""
    check_no_grad("top_picks", scores=scores)
    if scores.dtype != torch.float32:
        raise TypeError(f"`scores` must be float32, got {scores.dtype}")
    if scores.dim() == 0:
        raise ValueError("`scores` must have at least one dimension, got none")
    n = scores.shape[-1]
    if not 1 <= k <= n:
        raise ValueError(f"`k` must be from 1 to the {n} scores of a row, got {k}")
    if n >= 1 << 31:
        raise ValueError(f"`scores` must have fewer than 2**31 in a row, got {n}")


def fake_top_picks(scores: Tensor, k: int) -> Tensor:
    """Return a tensor like the result of `top_picks`, uninitialised: its fake implementation."""
    check_top_picks(scores, k)
    return scores.new_empty((*scores.shape[:-1], k), dtype=torch.int32)
