"""Attention in float64, rounded once, and how far from it a result may be.

Let `u` be half of the eps of the dtype that scores and sums are kept in (float32, or float64 for float64), `t` the eps
of the tensors' dtype, `d` the head_dim, `n` the number of keys. A score is a sum of `d` products, scaled, with a bias:
in any order it is off by at most `e = (d + 3) u (|q| . |k| |scale|) + 2 u |score + bias|`. The weights are
off by a factor of `1 +- 2 e` then, and by `(n + 8) u` for exponentials, sum, and the merge of parts. In low precision
weights, the result of each part, and the result are rounded, each by half of `t` of at most `max |v|`. So

    |out - exact| <= max |v| (2 e + (n + 8) u + 1.5 t).

A bias of 1e8 and more is alike for all: what a score adds to it is less than half of its ulp, in any order.
How far results of attention that a program goes on with may bring other results from the exact ones is found by running
it with attention moved by that bound: up, down, and at random. What does not move does not depend on it, and has to
be equal in every bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def attention(move: Callable[[Tensor], Tensor] | None = None) -> Callable[..., Tensor]:
    """SDPA in float64, rounded; `move` makes of a bound what is added to it."""

    def exact(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        query, key, value, attn_mask = (_as_autocast(x) for x in (query, key, value, attn_mask))
        with torch.autocast("cpu", enabled=False):
            out, bound = _attend(query, key, value, attn_mask, is_causal, scale)
            return (out if move is None else out + move(bound)).to(query.dtype)

    return exact


def _as_autocast(x: Tensor | None) -> Tensor | None:
    if x is None or not torch.is_autocast_enabled("cpu") or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype("cpu"))


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The result in float64, and its bound for each query."""
    acc = torch.float64 if query.dtype == torch.float64 else torch.float32
    u, t = torch.finfo(acc).eps / 2, torch.finfo(query.dtype).eps
    n, d = key.shape[2], query.shape[3]
    q, k, v = (x.double() for x in (query, key, value))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    factor = d**-0.5 if scale is None else scale
    scores, size = q @ k.mT * factor, q.abs() @ k.abs().mT * abs(factor)
    seen = torch.ones(scores.shape, dtype=torch.bool)
    if is_causal:
        seen = seen.tril()
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        seen = seen & (mask != float("-inf"))
        scores = scores + mask.double()
    # A huge bias swallows the score in the accumulator's dtype, not in float64.
    scores = torch.where(seen, scores, float("-inf")).to(acc).double()
    top = scores.amax(-1, keepdim=True)
    weights = torch.where(seen, torch.exp(scores - torch.where(seen.any(-1, keepdim=True), top, 0.0)), 0.0)
    weights = weights / weights.sum(-1, keepdim=True).masked_fill(~seen.any(-1, keepdim=True), 1.0)
    counts = seen & ~(weights < 1e-30)
    # The key and value of one that is not seen may be NaN.
    out = torch.einsum("bhls,bhlsd->bhld", weights, torch.where(seen.unsqueeze(-1), v.unsqueeze(2), 0.0))
    huge = scores.abs() > 1e8
    off = (d + 3) * u * size + 2 * u * scores.abs()
    e = torch.where(counts & ~huge, off, 0.0).amax(-1, keepdim=True)
    most = torch.where(counts.unsqueeze(-1), v.abs().unsqueeze(2), 0.0).amax(3).amax(-1, keepdim=True)
    return out, most * (2 * e + (n + 8) * u + 1.5 * t)
