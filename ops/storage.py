"""Find the tensors in an argument, and tell whether they share memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from tatten.ops.moved import moved

T = TypeVar("T")


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors, fake ones included, share a storage, so that a write to one may change the other."""
    try:
        return bool(torch._C._is_alias_of(a, b))  # type: ignore[attr-defined]
    except Exception as error:
        moved("torch._C._is_alias_of", error, "storages are compared as Python objects")
    try:
        return a.untyped_storage() is b.untyped_storage()
    except NotImplementedError:  # one has no storage, such as a sparse tensor
        return a is b


def unwrapped(tensor: Tensor) -> Tensor | None:
    """Return the tensor inside one that a transform of `torch.func` wraps; None for any other, and if unknown."""
    try:
        functorch = torch._C._functorch
        return functorch.get_unwrapped(tensor) if functorch.is_functorch_wrapped_tensor(tensor) else None
    except Exception as error:
        moved("torch._C._functorch.get_unwrapped", error, "writes inside transforms count as writes to all tensors")
        return None


def all_of(kind: type[T], value: Any) -> Iterator[T]:
    """Yield the values of a kind, such as tensors or nodes, in an argument, however they are nested."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (list, tuple, Iterator)):
        for x in value:
            yield from all_of(kind, x)
