"""Fresh memory that shows when it is read before it is written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tatten.ops.cuda import allocation


@contextlib.contextmanager
def fresh_memory_is_poison() -> Iterator[None]:
    """Inside, what is read before it is written, or never written, shows: as NaN, or as a key that is not listed."""

    def poisoned(allocate):
        def empty(*args, **kwargs) -> Tensor:
            x = allocate(*args, **kwargs)
            if x.is_floating_point():
                x.fill_(float("nan"))
            elif x.dtype == torch.int64:
                x.fill_(1 << 62)
            return x

        return empty

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
        patch.setattr(torch, "empty", poisoned(torch.empty))
        patch.setattr(torch, "empty_like", poisoned(torch.empty_like))
        patch.setattr(torch, "empty_strided", poisoned(torch.empty_strided))
        patch.setattr(allocation, "_empty_strided_cuda", poisoned(allocation._empty_strided_cuda))
        yield
