"""The pages kernel on a CPU, where its code runs, and the comparison of its results."""

from __future__ import annotations

import pytest
import torch
from gluon_interpreted import Interpreted
from torch import Tensor


def install_pages_kernel(patch: pytest.MonkeyPatch, seed: int, long_part: int | None = None) -> None:
    """Let plans take the kernel on a CPU.

    The seed draws the order of its partitions. Work tiles have margins if a program has `long_part` tiles.
    """
    import triton.language as tl

    from tatten.ops.cuda import pages_sm90
    from tatten.ops.cuda.kernels import page_blocks, page_loads, page_softmax, query_blocks
    from tatten.ops.cuda.kernels import pages_sm90 as kernel

    modules = kernel, page_softmax, page_loads, page_blocks
    patch.setattr(pages_sm90, "_pages_kernel", Interpreted(patch, seed, "_pages_kernel", *modules))
    patch.setattr(pages_sm90, "takes_pages_kernel", lambda *_: True)
    if long_part is not None:
        patch.setattr(query_blocks, "_LONG_PART", tl.constexpr(long_part))


def assert_same_in_16_bits(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    """Compare outputs and lse with those of float64."""
    torch.testing.assert_close(got[0].double(), want[0], rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-4, atol=1e-3)
