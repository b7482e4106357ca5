"""Calls of `index_scores`, some of them random, and the bound that holds each result to float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from op_masks import Choose
from torch import Tensor

from tatten.ops.reference import index_scores_reference

NAN, INF = float("nan"), float("inf")
ORDER = "query", "key", "weights", "attn_mask", "key_scale"


@dataclass(frozen=True)
class IndexCall:
    """A call with random numbers.

    Attributes:
        mask: "bool"; "prefix", the first keys, as in a static cache; "none left", a prefix of no key for the first
            sequence; "bias"; or None.
        mask_shared: whether the batch and the queries of the mask are 1.
        layout: "dense"; "strided", a view of larger tensors that hold NaN elsewhere; or "transposed", whose last dim is
            not the innermost.
    """

    batch: int = 2
    q_len: int = 1
    heads: int = 16
    dim: int = 64
    kv_len: int = 300
    dtype: torch.dtype = torch.float32
    key_dtype: torch.dtype | None = None
    weights_dtype: torch.dtype = torch.float32
    mask: str | None = None
    mask_shared: bool = False
    scaled: bool = False
    layout: str = "dense"
    seed: int = 0

    def make(self, device: str = "cpu") -> dict[str, Any]:
        """Return the arguments. Keys that a bool mask excludes for all queries hold NaN and inf, if they can."""
        generator = torch.Generator().manual_seed(self.seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        query, key = randn(self.batch, self.q_len, self.heads, self.dim), randn(self.batch, self.kv_len, self.dim)
        weights, factors = randn(self.batch, self.q_len, self.heads), randn(self.batch, self.kv_len, 1)
        mask = self.make_mask(generator)
        if mask is not None and mask.dtype == torch.bool:
            excluded = ~mask.any(1).expand(self.batch, -1)
            key[excluded] = torch.tensor([NAN, INF]).repeat(self.dim)[: self.dim]
            factors[excluded] = NAN
        key_dtype = self.key_dtype or self.dtype
        key = (
            (key * 30).nan_to_num(0, 100, -100).round().to(key_dtype) if key_dtype == torch.int8 else key.to(key_dtype)
        )
        tensors = [query.to(self.dtype), key, weights.to(self.weights_dtype)]
        laid = [None if x is None else self.laid_out(x.to(device)) for x in (*tensors, mask)]
        if self.scaled:
            laid.append(factors.to(device))
        return {**dict(zip(ORDER, laid, strict=False)), "scale": self.dim**-0.5}

    def make_mask(self, generator: torch.Generator) -> Tensor | None:
        shape = (1, 1) if self.mask_shared else (self.batch, self.q_len)
        if self.mask is None:
            return None
        if self.mask == "bias":
            bias = torch.randn(*shape, self.kv_len, generator=generator)
            return bias.masked_fill(torch.rand(bias.shape, generator=generator) < 0.2, -INF)
        if self.mask == "bool":
            return torch.rand(*shape, self.kv_len, generator=generator) < 0.5
        lens = torch.randint(self.kv_len + 1, (*shape, 1), generator=generator)
        if self.mask == "none left":
            lens[0] = 0
        return torch.arange(self.kv_len) < lens

    def laid_out(self, x: Tensor) -> Tensor:
        if self.layout == "strided":
            around = torch.zeros([2 * n + 2 for n in x.shape], device=x.device).to(x.dtype)
            if x.dtype.is_floating_point:
                around = torch.full(around.shape, NAN, device=x.device).to(x.dtype)
            inside = around[tuple(slice(1, n + 1) for n in x.shape)]
        elif self.layout == "transposed":
            inside = torch.empty(x.mT.shape, dtype=x.dtype, device=x.device).mT
        else:
            return x
        return inside.copy_(x)


def draw_index_call(choose: Choose) -> IndexCall:
    dtype = choose([torch.float32, torch.bfloat16, torch.float16])
    key_dtype = choose([None, None, torch.int8, torch.float8_e4m3fn])
    return IndexCall(
        batch=choose([1, 2, 3]),
        q_len=choose([1, 1, 2, 3, 5]),
        heads=choose([1, 3, 4, 16, 20, 64]),
        dim=choose([1, 8, 20, 64, 77, 128]),
        kv_len=choose([1, 2, 31, 128, 129, 300]),
        dtype=dtype,
        key_dtype=key_dtype,
        weights_dtype=choose([torch.float32, torch.bfloat16, torch.float16]),
        mask=choose([None, "bool", "prefix", "none left", "bias"]),
        mask_shared=choose([False, True]),
        scaled=key_dtype is not None and choose([True, False]),
        layout=choose(["dense", "dense", "strided", "transposed"]),
        seed=choose(range(1000)),
    )


def assert_close_to_float64(scores: Tensor, call: dict[str, Any]) -> None:
    """Hold scores to float64: each of `dim + heads` sums and products may round once, relative to all terms."""
    want = index_scores_reference(**call)
    query, weights, mask = call["query"], call["weights"], call.get("attn_mask")
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    assert (scores.shape, scores.dtype, scores.device) == (want.shape, wide, query.device)
    assert scores.is_contiguous()
    positive = {name: x.double().abs() for name, x in call.items() if name in ("query", "key", "weights", "key_scale")}
    if mask is not None and mask.dtype != torch.bool:
        positive["attn_mask"] = mask.double().abs()
    terms = index_scores_reference(**positive, scale=abs(call["scale"]))
    within = terms * torch.finfo(wide).eps * (query.shape[3] + weights.shape[2] + 4)
    infinite = want.isinf()
    assert torch.equal(scores.isinf(), infinite)
    assert torch.equal(scores[infinite].double(), want[infinite])
    off = torch.where(infinite, 0.0, (scores.double() - want).abs())
    assert (off <= within.nan_to_num(INF))[~infinite].all(), (off / within)[~infinite].max()
