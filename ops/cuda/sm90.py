"""Helpers for the plans of the Gluon kernels for Hopper: descriptors of tiles of keys, and strides of queries."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tatten.ops.cuda.tma import Tiling, tile_block, tma_strides

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def key_tiling(x: Tensor, block_n: int, columns: int, heads_last: bool = False) -> Tiling:
    """Make descriptors of tiles of `block_n` keys, as wgmma reads them from shared memory."""
    return Tiling(TensorDescriptor, x, *_tile(x.dtype, block_n, columns, heads_last))


def are_tiles_of(descriptor: TensorDescriptor, x: Tensor) -> bool:
    """Return True if `key_tiling` of `x` makes a descriptor like this one."""
    _, first, second, columns = descriptor.block_shape
    tile = first * second, columns, first > 1
    block, layout = _tile(x.dtype, *tile) if x.dtype in DTYPES else (None, None)
    same = descriptor.shape == list(x.shape) and descriptor.strides == tma_strides(x)
    return same and descriptor.base.dtype == x.dtype and (descriptor.block_shape, descriptor.layout) == (block, layout)


def _tile(
    dtype: torch.dtype, block_n: int, columns: int, heads_last: bool = False
) -> tuple[list[int], gl.NVMMASharedLayout]:
    """Return the block of a tile, and its layout in shared memory."""
    block = tile_block(block_n, columns, heads_last)
    return block, gl.NVMMASharedLayout.get_default_for(block, DTYPES[dtype])


def strides_in_units(*queries: Tensor) -> tuple[int, list[list[int]]]:
    """Return the elements of a unit, and each tensor's strides over batch, heads and length in this unit."""
    strides = [
        [0 if size == 1 else stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)] for x in queries
    ]
    unit = 8 if all(stride % 8 == 0 for tensor_strides in strides for stride in tensor_strides) else 1
    return unit, [[stride // unit for stride in tensor_strides] for tensor_strides in strides]
