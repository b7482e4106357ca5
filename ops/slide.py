"""In-place step of a sliding window's cache by one slot.

A full `StaticSlidingWindowLayer` of transformers copies itself twice for each token, by `roll` and by `copy_`. That
moves four times its bytes, while attention reads them once. The step in place moves them twice.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tatten.ops.cuda.launcher import on_device_of
from tatten.ops.cuda.slide import slide_on_cuda_

BLOCK_BYTES = 1 << 21  # bytes that stay in a CPU cache between read and write


def slide_(cache: Tensor, new: Tensor) -> None:
    """Drop the first slot of each row of a cache and append a new one: `cache = cat((cache[:, :, 1:], new), 2)`.

    Args:
        cache: `[batch, heads, slots, head_dim]`, contiguous; it is written.
        new: `[batch, heads, 1, head_dim]` in the dtype of `cache`, any strides, in other memory.

    Raises:
        ValueError: an argument has another shape or layout, or the two differ in dtype or device.
    """
    check_slide(cache, new)
    if cache.device.type == "cpu":
        slide_on_cpu_(cache, new)
    else:
        on_device_of(cache, slide_on_cuda_, cache, new)


def slide_op(device: torch.device) -> Any:
    """Return the op for Inductor's graphs. On a GPU, Inductor looks into it and launches the kernel itself."""
    return torch.ops.tatten.slide_.default if device.type == "cpu" else _slide_on_cuda_op()


@functools.cache
def _slide_on_cuda_op() -> Any:
    torch.library.triton_op("tatten::slide_on_cuda_", slide_on_cuda_, mutates_args={"cache"})  # imports Triton
    return torch.ops.tatten.slide_on_cuda_.default


def check_slide(cache: Tensor, new: Tensor) -> None:
    """Raise ValueError unless `slide_` supports these tensors."""
    if cache.dim() != 4 or not cache.is_contiguous():
        raise ValueError(
            "`cache` must be [batch, heads, slots, head_dim] and contiguous, got shape "
            f"{tuple(cache.shape)} and strides {cache.stride()}"
        )
    batch, heads, _, head_dim = cache.shape
    if tuple(new.shape) != (batch, heads, 1, head_dim):
        raise ValueError(f"`new` must be {(batch, heads, 1, head_dim)} as `cache` is, got shape {tuple(new.shape)}")
    if (new.dtype, new.device) != (cache.dtype, cache.device):
        raise ValueError(
            f"`new` must be {cache.dtype} on {cache.device} as `cache` is, got {new.dtype} on {new.device}"
        )


def slide_on_cpu_(cache: Tensor, new: Tensor) -> None:
    """Move one block after the other, so that each stays in the cache between read and write."""
    last = cache.shape[2] - 1
    block = max(1, BLOCK_BYTES * (last + 1) // cache.nbytes)
    for start in range(0, last, block):
        end = min(start + block, last)
        cache[:, :, start:end] = cache[:, :, start + 1 : end + 1].clone()
    cache[:, :, last:] = new
