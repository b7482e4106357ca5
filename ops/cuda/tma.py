"""What Hopper's tensor memory accelerator, which copies tiles, asks of a tensor, and how it is told of one."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def takes_tma(x: Tensor) -> bool:
    """Whether it can fetch tiles of `x`, all of whose elements may be read."""
    aligned = x.data_ptr() % 16 == 0 and all(stride * x.element_size() % 16 == 0 for stride in tma_strides(x)[:3])
    return x.element_size() <= 2 and aligned and x.stride(3) == 1 and min(x.shape) > 0


def tma_strides(x: Tensor) -> list[int]:
    """The strides of a 4-D tensor for its descriptor: that of a dimension of one element may be anything."""
    strides = [stride if n != 1 else 16 for n, stride in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return [*strides, x.stride(3)]


class Tiling:
    """Makes descriptors of tiles of tensors that are laid out as `x`, for which Triton's checks were made once."""

    def __init__(self, kind: type, x: Tensor, block: list[int], *layout: object) -> None:
        self.kind = kind
        self.fields = {**vars(kind(x, list(x.shape), tma_strides(x), block, *layout)), "base": None}

    def __call__(self, x: Tensor) -> Any:
        descriptor: Any = object.__new__(self.kind)
        vars(descriptor).update(self.fields, base=x)
        return descriptor
