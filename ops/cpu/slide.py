"""In-place step of a sliding window's cache by one slot, on a CPU."""

from __future__ import annotations

from torch import Tensor

BLOCK_BYTES = 1 << 21  # bytes that stay in a CPU cache between read and write


def slide_on_cpu_(cache: Tensor, new: Tensor) -> None:
    """Move block after block; see `tatten.ops.slide`."""
    last = cache.shape[2] - 1
    block = max(1, BLOCK_BYTES * (last + 1) // cache.nbytes)
    for start in range(0, last, block):
        end = min(start + block, last)
        cache[:, :, start:end] = cache[:, :, start + 1 : end + 1].clone()
    cache[:, :, last:] = new
