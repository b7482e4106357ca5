"""Random calls of `latent_attention`, each as a call of `decode_attention` with the same answer: one kv head, whose
keys begin with their values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from op_calls import KV_LENS, LAYOUTS, TINY_KV_LENS, Call, Segment
from op_masks import Choose, draw_mask
from torch import Tensor

import tatten
from tatten.ops.cpu import thresholds

FLOORS = (float("-inf"), -1e4, -1e9, "min")
SHARED = ("query", "attn_mask", "kv_lens", "scale", "window", "softcap", "sinks")


@dataclass(frozen=True)
class LatentCall:
    """One call.

    Attributes:
        expanded: the call of `decode_attention`: `value_dim` is the rank, and the rest of `head_dim` has rope.
        joined: whether latents and their rope are views of one cache.
        wide: whether out is asked for in the dtype of sums.
        unrounded: whether queries are in float32, with numbers that bfloat16 hasn't, if that is the dtype.
        block_keys: keys in a block of a CPU.
    """

    expanded: Call
    joined: bool = False
    wide: bool = False
    unrounded: bool = False
    block_keys: int | None = None

    @property
    def blocks(self) -> int:
        """Number of blocks at most."""
        kv_len = self.expanded.segments[0].kv_len
        return 2 + kv_len // (self.block_keys or kv_len)

    def inputs(self, device: str = "cpu") -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments of `latent_attention`, and those of `decode_attention` with the same answer."""
        return self.of_latents(self.expanded.inputs(device))

    def of_latents(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """`inputs` of `decode_attention` as arguments of `latent_attention`, and as those with the same answer."""
        rank = self.expanded.value_dim
        expanded = {name: x for name, x in inputs.items() if name in (*SHARED, "key")}
        given = {name: x for name, x in expanded.items() if name in SHARED}
        expanded["value"] = expanded["key"][..., :rank]
        for name, first, rest in (("query", "query", "query_rope"), ("key", "latent", "key_rope")):
            parts = expanded[name].split((rank, expanded[name].shape[3] - rank), dim=3)
            given[first], given[rest] = parts if self.joined else map(torch.clone, parts)
        if self.unrounded and self.expanded.dtype == torch.bfloat16:
            noise = torch.linspace(-(2**-9), 2**-9, rank, device=given["query"].device)
            given["query"] = given["query"].float() * (1 + noise)
            expanded["query"] = torch.cat((given["query"], given["query_rope"]), dim=3)
        if self.expanded.head_dim == rank and not self.joined:
            given["query_rope"] = given["key_rope"] = None
        return given, expanded

    def run(self, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The op's answer."""
        mask, latent = given["attn_mask"], given["latent"]
        wide = torch.promote_types(latent.dtype, torch.float32) if self.wide else latent.dtype
        found = None
        if self.expanded.found and mask is not None and mask.shape[-1] == latent.shape[2]:
            found = tatten.block_mask(mask, kv_batch=latent.shape[0])
        with self._small_blocks():
            return tatten.latent_attention(**given, block_mask=found, out_dtype=wide, return_lse=True)

    @contextlib.contextmanager
    def _small_blocks(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            if self.block_keys is not None:
                item = 8 if self.expanded.dtype == torch.float64 else 4
                block_bytes = self.block_keys * self.expanded.head_dim * item // torch.get_num_threads()
                patch.setattr(thresholds.CPU, "block_bytes", block_bytes)
                patch.setattr(thresholds.CPU, "run_bytes", 0)
            yield


def draw_latent_call(choose: Choose, tiny: bool = False) -> LatentCall:
    """A call; `tiny` is for an interpreter."""
    dtype = choose([torch.float32, torch.float16, torch.bfloat16, *([] if tiny else [torch.float64])])
    batch, rank = choose([1, 2] if tiny else [1, 2, 3, 5]), choose([16, 7, 24] if tiny else [16, 1, 7, 24, 64, 130])
    mask = draw_mask(choose, dtype, FLOORS, [False, False, True]) if choose([False, True, True]) else None
    kv_len = choose([n for n in (TINY_KV_LENS if tiny else KV_LENS) if n])
    segment = Segment(batch, kv_len, mask, choose([1, batch]), (choose(LAYOUTS), "dense"))
    expanded = Call(
        dtype,
        q_heads=choose([1, 3] if tiny else [1, 2, 3, 16]),
        kv_heads=1,
        segments=(segment,),
        batch=batch,
        q_len=choose([1, 2] if tiny else range(1, 17)),
        head_dim=rank + choose([0, 5, 8] if tiny else [0, 1, 5, 8, 64]),
        value_dim=rank,
        scale=choose([0.1, 0.3, 2.0, -1.0, 0.0]),
        layout=choose(LAYOUTS),
        lens=choose([None, torch.int64, torch.int32]),
        window=choose([None, 1, 5, 40]),
        softcap=choose([None, None, 1.5, 30.0]),
        sinks=choose(["", "", "random", "some"]),
        sinks_dtype=choose([torch.float32, dtype]),
        found=choose([False, True]),
        factors=(choose([1.0, 8.0]), 1.0),
        poison=choose([True, False]),
        seed=choose(range(1000)),
    )
    flags = (choose([False, True]) for _ in range(3))
    return LatentCall(expanded, *flags, block_keys=choose([None, 1, 5, 32]))
