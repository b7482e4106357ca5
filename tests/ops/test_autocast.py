"""Ops on a CPU under autocast: the same to the bit as without it, in eager code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tatten


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1])).to(dtype)


def capped(dtype: torch.dtype) -> Tensor:
    return tatten.decode_attention(
        randn(2, 4, 1, 32, dtype=dtype), *(randn(2, 2, n, 32, dtype=dtype) for n in (90, 90)), softcap=3.0
    )


def biased_segments(dtype: torch.dtype) -> Tensor:
    keys = [randn(1, 2, 40, 32, dtype=dtype), randn(2, 2, 9, 32, dtype=dtype)]
    masks = [None, torch.tensor([1e9] + [0.0] * 8)]
    return tatten.bifurcated_attention(randn(2, 4, 1, 32, dtype=dtype), keys, keys, attn_masks=masks)


def latents(dtype: torch.dtype) -> Tensor:
    shapes = (2, 4, 1, 32), (2, 4, 1, 8), (2, 1, 90, 32), (2, 1, 90, 8)
    return tatten.latent_attention(*(randn(*shape, dtype=dtype) for shape in shapes), scale=0.2)


def merged(dtype: torch.dtype) -> Tensor:
    return tatten.merge_states(randn(3, 2, 4, 1, 32, dtype=dtype), randn(3, 2, 4, 1))[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", [capped, biased_segments, latents, merged])
def test_autocast_changes_nothing(op: Callable[[torch.dtype], Tensor], dtype: torch.dtype) -> None:
    want = op(dtype)
    for low in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=low):
            got = op(dtype)
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
