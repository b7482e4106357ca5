"""Stand-ins for the packages of FlashAttention 2, 3 and 4: their arguments by name, their layouts, and their results.

They compute in float64 what the docstrings of the packages say, with nothing of tatten's, and keep what they are given.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

PACKAGES = ("fa2", "fa3", "fa4")
MODULES = {
    "fa2": ["flash_attn"],
    "fa3": ["flash_attn_interface", "flash_attn_3.flash_attn_interface"],
    "fa4": ["flash_attn.cute"],
}


class StandIn:
    """The functions, and `given`: the arguments of the last call that were not left out."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def fa2(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> tuple[Tensor, Tensor]:
        self._keep(self.fa2, locals())
        assert return_softmax_lse
        left, right = window_size
        return _attention(q, k_cache, v_cache, softmax_scale, cache_seqlens, left, right, softcap, None, torch.inf)

    def fa3(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> tuple[Tensor, Tensor, None, None]:
        self._keep(self.fa3, locals())
        assert return_softmax_lse
        left, right = window_size
        state = _attention(q, k_cache, v_cache, softmax_scale, cache_seqlens, left, right, softcap, None, -torch.inf)
        return (*state, None, None)  # and the partials

    def fa4(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seqused_k: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None),
        learnable_sink: Tensor | None = None,
        softcap: float = 0.0,
        num_splits: int = 1,
        return_lse: bool = False,
    ) -> tuple[Tensor, Tensor]:
        self._keep(self.fa4, locals())
        assert return_lse
        left, right = (-1 if x is None else x for x in window_size)
        return _attention(q, k, v, softmax_scale, seqused_k, left, right, softcap, learnable_sink, -torch.inf)

    def _keep(self, function: Callable[..., Any], given: dict[str, Any]) -> None:
        parameters = inspect.signature(function).parameters.values()
        self.given = {x.name: given[x.name] for x in parameters if given[x.name] is not x.default}


def install(patch: pytest.MonkeyPatch, provider: str, module: str | None = None) -> StandIn:
    """Make the package of `provider` importable, under one of its modules; no other FlashAttention is then."""
    uninstall(patch)
    stand_in = StandIn()
    found = ModuleType("stand-in")
    name = "flash_attn_varlen_func" if provider == "fa4" else "flash_attn_with_kvcache"
    setattr(found, name, getattr(stand_in, provider))
    path = module or MODULES[provider][0]
    if "." in path:
        patch.setitem(sys.modules, path.split(".")[0], ModuleType("a package"))
    patch.setitem(sys.modules, path, found)
    return stand_in


def uninstall(patch: pytest.MonkeyPatch) -> None:
    """Make every FlashAttention fail to import."""
    for module in {name for names in MODULES.values() for name in names}:
        patch.setitem(sys.modules, module, None)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    lengths: Tensor | None,
    left: int,
    right: int,
    softcap: float,
    sinks: Tensor | None,
    empty_lse: float,
) -> tuple[Tensor, Tensor]:
    """Attention of `[batch, length, heads, head_dim]`: the query at i sees i + n - queries - left to ... + right."""
    assert scale is not None
    assert q.stride(3) == k.stride(3) == v.stride(3) == 1
    (batch, queries, heads, _), keys = q.shape, k.shape[1]
    if lengths is None:
        lengths = torch.full((batch,), keys, dtype=torch.int32)
    assert lengths.dtype == torch.int32
    assert lengths.is_contiguous()
    assert lengths.ge(0).all()
    assert lengths.le(keys).all()
    k, v = (x.double().repeat_interleave(heads // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    n = lengths[:, None, None].long()
    own, j = torch.arange(queries)[:, None] + n - queries, torch.arange(keys)
    seen = j < n
    if left >= 0:
        seen = seen & (j >= own - left)
    if right >= 0:
        seen = seen & (j <= own + right)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(batch, heads, queries, 1)], 3)
    lse = scores.logsumexp(3)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)[..., :keys]
    out = torch.einsum("bhij,bjhd->bihd", weights, v.nan_to_num(0.0))
    return out.to(q.dtype), lse.masked_fill(lse == -torch.inf, empty_lse).float()
