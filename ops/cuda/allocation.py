"""Memory for the outputs of kernels. The allocator of Inductor's generated code takes a third of `new_empty`'s time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tatten.ops.cuda.recording import recorder
from tatten.ops.moved import moved


def _public(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


def _moved(error: Exception) -> Callable[..., Tensor]:
    moved(
        "torch._C._dynamo.guards._empty_strided_cuda", error, "memory comes from `torch.empty_strided`, which is slower"
    )
    return _public


def _find() -> Callable[..., Tensor]:
    """Return the allocator of Inductor's generated code, or the public function if the allocator has moved."""
    try:
        return torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined, no-any-return]
    except AttributeError as error:
        return _moved(error)


_empty_strided_cuda = _find()


class Dense(NamedTuple):
    """The layout of a contiguous tensor that a plan allocates at each call."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: torch.dtype) -> Dense:
        strides, n = [], 1
        for size in reversed(shape):
            strides.append(n)
            n *= max(1, size)
        return cls(shape, tuple(reversed(strides)), dtype)


def allocate(like: Tensor, *layouts: Dense) -> list[Tensor]:
    """Allocate uninitialised tensors on the device of `like`, which is the current one."""
    global _empty_strided_cuda
    if like.is_cuda and recorder.get() is None:
        try:
            return [_empty_strided_cuda(*x) for x in layouts]
        except TypeError as error:  # its arguments have changed
            _empty_strided_cuda = _moved(error)
            return [_public(*x) for x in layouts]
    return [torch.empty_strided(*x[:2], dtype=x.dtype, device=like.device) for x in layouts]
