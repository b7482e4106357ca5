"""What plans of the Gluon kernels for Hopper share: descriptors of tiles of keys, and strides of queries."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tatten.ops.cuda.tma import Tiling

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def key_tiling(x: Tensor, block_n: int, columns: int) -> Tiling:
    """Descriptors of tiles of `block_n` keys, as wgmma reads them from shared memory."""
    block = [1, 1, block_n, columns]
    return Tiling(TensorDescriptor, x, block, gl.NVMMASharedLayout.get_default_for(block, DTYPES[x.dtype]))


def strides_in_units(*queries: Tensor) -> tuple[int, list[list[int]]]:
    """The elements of a unit, and each tensor's strides over batch, heads and length in such units."""
    strides = [
        [0 if size == 1 else stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)] for x in queries
    ]
    unit = 8 if all(stride % 8 == 0 for of_one in strides for stride in of_one) else 1
    return unit, [[stride // unit for stride in of_one] for of_one in strides]
