"""Attention in float64, rounded once, and how far from it a result may be.

Let `u` be half of the eps of the dtype that scores and sums are kept in (float32, or float64 for float64), `t` the eps
of the tensors' dtype, `d` the head_dim, `n` the number of keys. A score is a sum of `d` products, scaled, with a bias:
in any order it is off by at most `e = (d + 3) u (|q| . |k| |scale|) + 2 u |score + bias|`. The weights are
off by a factor of `1 +- 2 e` then, and by `(n + 8) u` for exponentials, sum, and the merge of parts. In low precision
weights, the result of each part, and the result are rounded, each by half of `t` of at most `max |v|`. So

    |out - exact| <= max |v| (2 e + (n + 8) u + 1.5 t).

A soft cap moves scores no further apart, and is off by a few `u` of itself.
A bias of 1e8 and more is alike for all: what a score adds to it is less than half of its ulp, in any order.
How far results of attention that a program goes on with may bring other results from the exact ones is found by running
it with attention moved by that bound: up, down, and at random. What does not move does not depend on it, and has to
be equal in every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from programs import forms

Move = Callable[[Tensor], Tensor]


def attention(move: Move | None = None) -> dict[str, Callable[..., Any]]:
    """The functions of programs by name, in float64 and rounded; `move` makes of a bound what is added to a result."""
    written_out = _written_out(move)

    def with_scores(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return written_out(*args, **kwargs), forms.attend_with_scores(*args, **kwargs)[1]

    functions: dict[str, Callable[..., Any]] = {name: written_out for name in vars(forms) if name.startswith("attend_")}
    functions |= {"attend_with_scores": with_scores, "attend_flex": _flex(move), "vmap": _each}
    return functions | dict.fromkeys(("sdpa", "aten_sdpa"), _sdpa(move))


def _sdpa(move: Move | None) -> Callable[..., Tensor]:
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
            return _moved(move, query, *_attend(query, key, value, attn_mask, is_causal, scale))

    return exact


def _written_out(move: Move | None) -> Callable[..., Tensor]:
    def exact(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
        fill: float = -torch.inf,
        p: float = 0.0,
    ) -> Tensor:
        return _moved(move, query, *_attend(query, key, value, mask, False, scale, softcap, fill))

    return exact


def _flex(move: Move | None) -> Callable[..., Tensor]:
    def exact(
        query: Tensor, key: Tensor, value: Tensor, blocks: Any = None, score: Any = None, scale: float | None = None
    ) -> Tensor:
        places = [torch.arange(n) for n in (*query.shape[:3], key.shape[2])]
        mask = None if blocks is None else _over_places(blocks.mask_mod, [], places)
        change = None if score is None else lambda scores: _over_places(score, [scores], places)
        return _moved(move, query, *_attend(query, key, value, mask, False, scale, change=change))

    return exact


def _over_places(function: Callable[..., Tensor], scores: list[Tensor], places: list[Tensor]) -> Tensor:
    """A function of scalars at all places of the scores, a row of keys at a time."""
    over_keys = torch.vmap(function, (*(0 for _ in scores), None, None, None, 0))
    batch, heads, q_len, keys = places
    rows = [over_keys(*(x[b, h, i] for x in scores), b, h, i, keys) for b in batch for h in heads for i in q_len]
    return torch.stack(rows).view(*(len(x) for x in places))


def _each(function: Callable[..., Any], in_dims: Any = 0, out_dims: int = 0) -> Callable[..., Any]:
    """`torch.vmap` as a loop."""

    def run(*args: Any) -> Any:
        dims = in_dims if isinstance(in_dims, Sequence) else [in_dims] * len(args)
        n = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
        pairs = list(zip(args, dims, strict=True))
        outs = [function(*(x if dim is None else x.select(dim, i) for x, dim in pairs)) for i in range(n)]
        if isinstance(outs[0], tuple):
            return tuple(torch.stack(x, out_dims) for x in zip(*outs, strict=True))
        return torch.stack(outs, out_dims)

    return run


def _moved(move: Move | None, query: Tensor, out: Tensor, bound: Tensor) -> Tensor:
    out, bound = (x.reshape(*query.shape[:-1], x.shape[-1]) for x in (out, bound))
    return (out if move is None else out + move(bound)).to(query.dtype)


def _as_autocast(x: Tensor | None) -> Tensor | None:
    if x is None or not torch.is_autocast_enabled("cpu") or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype("cpu"))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    softcap: float | None = None,
    fill: float = -torch.inf,
    change: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The result in float64, and its bound for each query; tensors have four dims, or fewer inside `vmap`.

    `change` makes other scores of scores, none of which it moves further apart.
    """
    query, key, value = (x[(None,) * (4 - x.dim())] for x in (query, key, value))
    acc = torch.float64 if query.dtype == torch.float64 else torch.float32
    u, t = torch.finfo(acc).eps / 2, torch.finfo(query.dtype).eps
    n, d = key.shape[2], query.shape[3]
    q, k, v = (x.double() for x in (query, key, value))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    factor = d**-0.5 if scale is None else scale
    scores, size = q @ k.mT * factor, q.abs() @ k.abs().mT * abs(factor)
    off = (d + 3) * u * size
    if softcap is not None:
        scores, off = softcap * torch.tanh(scores / softcap), off + 8 * u * abs(softcap)
    if change is not None:
        scores = change(scores)
        off = off + 8 * u * scores.abs()
    seen = torch.ones(scores.shape, dtype=torch.bool)
    if is_causal:
        seen = seen.tril()
    if mask is not None and mask.dtype == torch.bool and fill > -torch.inf:
        scores = torch.where(mask, scores, fill)
    elif mask is not None and mask.dtype == torch.bool:
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
    off = off + 2 * u * scores.abs()
    e = torch.where(counts & ~huge, off, 0.0).amax(-1, keepdim=True)
    most = torch.where(counts.unsqueeze(-1), v.abs().unsqueeze(2), 0.0).amax(3).amax(-1, keepdim=True)
    return out, most * (2 * e + (n + 8) * u + 1.5 * t)
