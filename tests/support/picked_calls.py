"""Random calls with `indices`, each as a call with a dense mask that has the same answer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from latent_calls import LatentCall, draw_latent_call
from op_calls import Call, draw_call, for_each_sequence, together
from op_masks import NEG_INF, Choose, laid_out
from torch import Tensor

import tatten
from tatten.ops.cpu import thresholds

ANYWHERE = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class Picks:
    """The picks of one segment.

    Attributes:
        share: how many of the blocks of keys are picked, about; 2.0 stands for all of them, in a longer list.
        per_head: whether the queries of each kv head have picks of their own.
        distinct: whether no block is listed twice.
        layout: "one_batch" is stride 0, and others as in `op_masks.laid_out`.
        wide: whether entries are int64.
        seed: that of the picks.
    """

    share: float = 0.5
    per_head: bool = False
    distinct: bool = True
    layout: str = "dense"
    wide: bool = False
    seed: int = 0

    def make(self, batch: int, kv_heads: int, q_len: int, n: int) -> Tensor:
        """Return indices among `n` blocks of keys, and some out of range on both sides."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (1 if self.layout == "one_batch" else batch, kv_heads if self.per_head else 1, q_len)
        k = round(self.share * n) + (5 if self.share > 1 else self.share > 0)
        far = [2**32, 2**32 + 1, -(2**63)] if self.wide else []  # 0, 1 and 0 in 32 bits
        outside = torch.tensor([-1, -ANYWHERE - 1, n, n + 1, ANYWHERE, *far])
        if self.distinct:
            order = torch.argsort(torch.rand(*shape, n + len(outside), generator=generator), dim=-1)
        else:
            order = torch.randint(0, n + len(outside), (*shape, k), generator=generator)
        entries = torch.cat((torch.arange(n), outside))[order[..., :k]].to(torch.int64 if self.wide else torch.int32)
        if self.layout == "one_batch":
            return entries.expand(batch, *shape[1:], -1)
        return entries.mT.contiguous().mT if self.layout == "transposed" else entries


def picked_keys(indices: Tensor, kv_len: int, index_block: int) -> Tensor:
    """Return the keys that are picked, bool `[batch, 1 or kv_heads, q_len, kv_len]`, in the plainest way."""
    picked = torch.zeros((*indices.shape[:3], kv_len), dtype=torch.bool)
    for at in torch.cartesian_prod(*(torch.arange(n) for n in indices.shape[:3])).tolist() if indices.numel() else ():
        for entry in indices[tuple(at)].tolist():
            if entry >= 0:
                picked[tuple(at)][entry * index_block : (entry + 1) * index_block] = True
    return picked


@dataclass(frozen=True)
class PickedCall:
    """A call with picks in each segment, or None for all of its keys.

    Attributes:
        rest: whether the bias of other keys is given: the least number of the mask's dtype.
        block_keys: about as many keys are in a tile.
    """

    call: Call | LatentCall
    picks: tuple[Picks | None, ...]
    index_block: int = 1
    rest: bool = False
    block_keys: int = 1000

    @property
    def expanded(self) -> Call:
        return self.call.expanded if isinstance(self.call, LatentCall) else self.call

    @property
    def parts(self) -> int:
        return sum(2 + segment.kv_len // self.block_keys for segment in self.expanded.segments)

    def inputs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments of the op, and those of `decode_attention` with the same answer."""
        latents = isinstance(self.call, LatentCall)
        given, expanded = self.call.inputs() if isinstance(self.call, LatentCall) else (self.call.inputs(),) * 2
        call, query = self.expanded, expanded["query"]
        dense = together(dict(expanded))
        indices: list[Tensor | None] = []
        rows = [None] if "key" in expanded else expanded["rows"]
        masks = [expanded["attn_mask"]] if "key" in expanded else expanded["attn_masks"]
        wholes = []
        for i, (segment, picks, mask, its_rows) in enumerate(zip(call.segments, self.picks, masks, rows, strict=True)):
            shape = (call.batch, call.q_heads, call.q_len, segment.kv_len)
            if picks is None:
                indices.append(None)
                wholes.append(torch.ones(shape, dtype=torch.bool))
                continue
            n = -(-segment.kv_len // self.index_block)
            indices.append(picks.make(call.batch, call.kv_heads, call.q_len, n))
            picked = picked_keys(indices[-1], segment.kv_len, self.index_block)
            picked = picked.repeat_interleave(call.q_heads // picked.shape[1], dim=1)
            wholes.append(picked)
            if call.poison and not {"one_batch", "one_head"} & set(segment.layouts):
                visible = True if mask is None else mask if mask.dtype == torch.bool else mask != NEG_INF
                if isinstance(visible, Tensor):
                    visible = for_each_sequence(visible, call.batch, its_rows)
                used = (picked & visible).unflatten(1, (call.kv_heads, -1)).any(dim=2).any(dim=2)
                read = torch.arange(call.batch) * segment.rows // call.batch if its_rows is None else its_rows
                counts = torch.zeros(segment.rows, *used.shape[1:]).index_add(0, read, used.float())
                self._poison(given if latents else expanded, dense, i, counts == 0)
        given = dict(given if latents else expanded)
        whole = torch.cat(wholes, dim=3)
        mask = dense["attn_mask"]
        exact = torch.promote_types(query.dtype, torch.float32)
        bias = torch.zeros((), dtype=exact) if mask is None else mask
        bias = torch.where(bias, 0.0, NEG_INF) if bias.dtype == torch.bool else bias
        rest = NEG_INF
        if self.rest:
            wide = mask is None or mask.dtype == torch.float16  # whose least number excludes nothing
            rest = torch.finfo(exact if wide else mask.dtype).min
            given["rest_bias"] = rest
        dense["attn_mask"] = torch.where(whole, bias.to(exact), rest)
        given |= {"indices": indices if "keys" in given else indices[0], "index_block": self.index_block}
        given["distinct_indices"] = all(x is None or x.distinct for x in self.picks)
        for name in ("rest_bias", "window"):
            if given.get(name) is None:
                given.pop(name, None)
                dense.pop(name, None)
        return given, {name: x for name, x in dense.items() if name != "rows"}

    def _poison(self, given: dict[str, Any], dense: dict[str, Any], i: int, unused: Tensor) -> None:
        """Put NaN where no query reads a key of segment `i`: in the arguments of the op."""

        def poisoned(x: Tensor, layout: str) -> Tensor:
            heads = unused if x.shape[1] == unused.shape[1] else unused.all(dim=1, keepdim=True)
            return laid_out(x.double().masked_fill(heads.unsqueeze(-1), float("nan")).to(x.dtype), layout)

        layouts = self.expanded.segments[i].layouts
        names = ("latent", "key_rope") if "latent" in given else ("key", "value")
        for name, layout in zip(names, layouts, strict=True):
            if "keys" in given:
                given[f"{name}s"][i] = poisoned(given[f"{name}s"][i], layout)
            elif given[name] is not None:
                given[name] = poisoned(given[name], layout)

    def run(self, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The op's answer."""
        if "latent" in inputs:
            return tatten.latent_attention(**inputs, return_lse=True)
        op = tatten.bifurcated_attention if "keys" in inputs else tatten.decode_attention
        return op(**inputs, return_lse=True)

    @contextlib.contextmanager
    def small_tiles(self) -> Iterator[None]:
        item = 8 if self.expanded.dtype == torch.float64 else 4
        call = self.expanded
        with pytest.MonkeyPatch.context() as patch:
            row = call.kv_heads * (call.head_dim + call.value_dim) * item
            patch.setattr(thresholds.CPU, "block_bytes", self.block_keys * row // torch.get_num_threads())
            yield


def draw_picked_call(choose: Choose, latents: bool, tiny: bool = False) -> PickedCall:
    """A call with picks; `tiny` is for an interpreter."""
    if latents:
        latent = draw_latent_call(choose)
        if tiny:
            (segment,) = latent.expanded.segments
            segment = replace(segment, rows=1, mask_rows=1, kv_len=min(segment.kv_len, 40))
            one = replace(latent.expanded, batch=1, q_len=min(latent.expanded.q_len, 2), segments=(segment,))
            latent = replace(latent, expanded=one)
        call: Call | LatentCall = replace(latent, expanded=replace(latent.expanded, window=None, found=False))
        segments = latent.expanded.segments
    else:
        call = replace(draw_call(choose, tiny), window=None, found=False)
        segments = call.segments
    index_block = choose([1, 1, 1, 3, 16])

    def picks() -> Picks | None:
        if len(segments) > 1 and choose([False, False, True]):
            return None
        share, layouts = choose([0.5, 0.1, 0.0, 2.0]), ["dense", "one_batch", "transposed"]
        flags = (choose([False, True]) for _ in range(2))
        return Picks(
            share, not latents and next(flags), choose([True, False]), choose(layouts), next(flags), choose(range(99))
        )

    drawn = tuple(picks() for _ in segments)
    if not any(drawn):
        drawn = (Picks(), *drawn[1:])
    mask = segments[0].mask
    rest = (latents or call.is_decode) and (mask is None or mask.dtype != torch.bool) and choose([False, True])
    if rest:  # then every key counts for some rows
        number = replace(call.expanded if latents else call, poison=False)
        call = replace(call, expanded=number) if latents else number
    return PickedCall(call, drawn, index_block, rest, choose([1000, 1, 5, 32]))
