"""Masks of random calls: what they say, how they broadcast, and how they lie in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NEG_INF = float("-inf")
Choose = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Mask:
    """The meaning of a mask for each key, and its form.

    Attributes:
        dtype: bool or additive.
        pattern: which keys it lets through: "all", "padding", "holes", "causal", "rows" (all or none), "nothing".
        floor: the additive value of the others; `float("-inf")` or finite, "min" for the least of the dtype.
        bias: that of those let through: "zero", "noise" or "alibi".
        plus_inf: whether +inf stands in a few places.
        dims: which of batch, heads, queries and keys it has, as letters of "bhqk"; in the others its size is 1.
        short: whether leading dimensions of size 1 are left away.
        layout: that of memory, see `laid_out`; "expanded" is stride 0 where it broadcasts.
    """

    dtype: torch.dtype = torch.bool
    pattern: str = "all"
    floor: float | str = NEG_INF
    bias: str = "zero"
    plus_inf: bool = False
    dims: str = "bhqk"
    short: bool = False
    layout: str = "dense"

    @property
    def lowest(self) -> float:
        """`floor` as a number of the dtype."""
        if self.dtype == torch.bool:
            return NEG_INF
        return torch.tensor(torch.finfo(self.dtype).min if self.floor == "min" else self.floor).to(self.dtype).item()

    def make(self, sizes: tuple[int, int, int, int], rows: int, generator: torch.Generator) -> Tensor:
        """The mask without its layout; `sizes` of the scores. With other than batch rows it has `rows` of them."""
        full = (rows, *sizes[1:])
        shape = [n if letter in self.dims else 1 for n, letter in zip(full, "bhqk", strict=True)]
        visible = self._visible(shape, sizes, generator)
        if self.dtype == torch.bool:
            return visible
        bias = torch.zeros(shape)
        if self.bias == "noise":
            bias = torch.randn(shape, generator=generator)
        elif self.bias == "alibi":
            slopes = 2.0 ** -torch.arange(1.0, shape[1] + 1)[:, None, None]
            bias = bias + slopes * (torch.arange(shape[3]) - shape[3] + 1)
        if self.plus_inf:
            bias = bias.masked_fill(torch.rand(shape, generator=generator) < 0.02, float("inf"))
        return torch.where(visible, bias.to(self.dtype), torch.tensor(self.lowest, dtype=self.dtype))

    def _visible(self, shape: list[int], sizes: tuple[int, int, int, int], generator: torch.Generator) -> Tensor:
        batch, _, q_len, kv_len = shape
        places = torch.arange(kv_len)
        if self.pattern == "padding":  # on either side, other for each sequence, and nothing else in some
            edges = torch.randint(0, kv_len + 1, (2, batch, 1, 1, 1), generator=generator)
            nothing = torch.rand(batch, 1, 1, 1, generator=generator) < 0.3
            start, stop = torch.where(nothing, kv_len, edges.amin(dim=0)), edges.amax(dim=0)
            return ((places >= start) & (places < stop)).expand(shape).contiguous()
        if self.pattern == "causal":
            return (places <= kv_len - q_len + torch.arange(q_len)[:, None]).expand(shape).contiguous()
        if self.pattern == "holes":
            return torch.rand(shape, generator=generator) < 0.6
        if self.pattern == "rows":
            return (torch.rand(*shape[:3], 1, generator=generator) < 0.5).expand(shape).contiguous()
        return torch.full(shape, self.pattern == "all")

    def lay_out(self, mask: Tensor, sizes: tuple[int, int, int, int]) -> Tensor:
        """`mask` in the layout and rank that it is given to the op with."""
        if self.layout == "expanded":
            return mask.expand(mask.shape[0] if mask.shape[0] > 1 else sizes[0], *sizes[1:])
        mask = laid_out(mask, self.layout)
        while self.short and mask.dim() > 1 and mask.shape[0] == 1:
            mask = mask[0]
        return mask


def draw_mask(choose: Choose, dtype: torch.dtype, floors: Sequence[float | str], plus_inf: Sequence[bool]) -> Mask:
    """A mask for queries in `dtype`."""
    kind = choose([torch.bool, torch.float32, dtype])
    pattern = choose(["all", "padding", "holes", "causal", "rows", "nothing"])
    dims = choose(["bhqk", "bk", "bk", "bk", "qk", "k", "hk", "bqk", "hqk", "bhk", "bq", ""])
    layout = choose(["dense", "expanded", "transposed", "sliced", "stepped"])
    short = choose([False, True])
    if kind == torch.bool:
        return Mask(kind, pattern, dims=dims, short=short, layout=layout)
    bias = choose(["zero", "noise", "alibi"])
    return Mask(kind, pattern, choose(floors), bias, choose(plus_inf), dims, short, layout)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """`x` with other strides, and poison where memory does not belong to it."""
    match layout:
        case "dense":
            return x
        case "heads_inside":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        case "transposed":
            return x.mT.contiguous().mT
        case "length_first":
            return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        case "sliced":
            place = tuple(slice(1, 1 + n) for n in x.shape)
            return _within([n + 3 for n in x.shape], place, x)
        case "stepped":
            return _within([2 * n for n in x.shape], (slice(None, None, 2),) * x.dim(), x)
        case "one_batch":
            return x[:1].expand_as(x)
        case "one_head":
            return x[:, :1].expand_as(x)
    raise ValueError(layout)


def _within(shape: list[int], place: tuple[slice, ...], x: Tensor) -> Tensor:
    whole = torch.full(shape, float("nan"), device=x.device).to(x.dtype)
    whole[place].copy_(x)
    return whole[place]
