"""In-place step of a sliding window's cache by one slot, on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.sizes import ceil_div, power_of_2

CHUNK_BYTES, WARPS = 32768, 8  # per program


def slide_on_cuda_(cache: Tensor, new: Tensor) -> None:
    """Launch the kernel; see `tatten.ops.slide`."""
    from tatten.ops.cuda.kernels.slide import _slide_kernel

    batch, heads, slots, dim = cache.shape
    block_d = power_of_2(dim)
    block_s = min(power_of_2(slots), max(1, CHUNK_BYTES // (block_d * cache.element_size())))
    chunks = ceil_div(slots, block_s)
    # The last slot of a chunk takes the first slot of the next chunk, which another program overwrites.
    edges = cache[:, :, block_s::block_s].clone(memory_format=torch.contiguous_format) if chunks > 1 else new
    torch.library.wrap_triton(_slide_kernel)[(batch * heads * chunks,)](
        cache,
        edges,
        new,
        new.stride(0),
        new.stride(1),
        new.stride(3),
        HEADS=heads,
        SLOTS=slots,
        DIM=dim,
        CHUNKS=chunks,
        BLOCK_S=block_s,
        BLOCK_D=block_d,
        num_warps=WARPS,
    )
