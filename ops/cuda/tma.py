"""Requirements and descriptors of TMA, Hopper's tensor memory accelerator, which copies tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tatten.ops.cuda.recording import recorder
from tatten.ops.moved import moved


def takes_tma(x: Tensor) -> bool:
    """Return True if TMA can fetch tiles of `x`. It reads whole tiles, so all elements must be readable."""
    starts_aligned = recorder.get() is not None or x.data_ptr() % 16 == 0  # a tensor without data counts as aligned
    aligned = starts_aligned and all(stride * x.element_size() % 16 == 0 for stride in tma_strides(x)[:3])
    return x.element_size() <= 2 and aligned and x.stride(3) == 1 and min(x.shape) > 0


def tma_strides(x: Tensor) -> list[int]:
    """Return the strides of a 4-D tensor for its descriptor. That of a dim of size 1 has no effect and becomes 16."""
    strides = [stride if n != 1 else 16 for n, stride in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return [*strides, x.stride(3)]


@dataclass(frozen=True)
class _Aligned:
    """Stands for a tensor without data where Triton asks for its address."""

    dtype: torch.dtype

    def data_ptr(self) -> int:
        return 0


# The fields of Triton's descriptors. Any other field may depend on the tensor's address.
FIELDS = {"base", "shape", "strides", "block_shape", "padding", "round_f32_to_tf32", "layout"}


class Tiling:
    """Makes TMA descriptors for tensors with the layout of `x`. Triton's checks run once.

    If Triton's descriptors have other fields than `FIELDS`, Triton makes each of them.
    """

    def __init__(self, kind: type, x: Tensor, block: list[int], *layout: object) -> None:
        self.kind, self.layout = kind, (list(x.shape), tma_strides(x), block, *layout)
        base = x if recorder.get() is None else _Aligned(x.dtype)
        fields = getattr(kind(base, *self.layout), "__dict__", {})
        known = "base" in fields and fields.keys() <= FIELDS
        self.fields = {**fields, "base": None} if known else None
        if not known:
            moved(kind.__name__, f"has {sorted(fields)}", "Triton makes each descriptor, which is slower")

    def __call__(self, x: Tensor) -> Any:
        if self.fields is None:
            return self.kind(x, *self.layout)
        descriptor: Any = object.__new__(self.kind)
        vars(descriptor).update(self.fields, base=x)
        return descriptor


def tile_block(keys: int, columns: int, heads_last: bool) -> list[int]:
    """Return the shape of a tile of keys `[batch, heads, length, d]`, or of pages `[pages, page, heads, d]`."""
    return [1, keys, 1, columns] if heads_last else [1, 1, keys, columns]


def key_tiling(x: Tensor, block_n: int, columns: int, heads_last: bool = False) -> Tiling:
    """Make descriptors of tiles of `block_n` keys for kernels in Triton."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return Tiling(TensorDescriptor, x, tile_block(block_n, columns, heads_last))


def are_tiles_of(descriptor: Any, x: Tensor) -> bool:
    """Return True if `key_tiling` of `x` makes a descriptor like this one."""
    layout = descriptor.shape, descriptor.strides, descriptor.base.dtype
    same: bool = layout == (list(x.shape), tma_strides(x), x.dtype)
    _, first, second, columns = descriptor.block_shape
    block = tile_block(first * second, columns, first > 1)
    return same and descriptor.block_shape == block and descriptor.padding == "zero"
