"""Tell whether a step runs now, or is recorded to run later."""

from __future__ import annotations

import torch
from torch import Tensor


def is_captured(length: Tensor) -> bool:
    """Return True if a graph is traced or captured, so that the length cannot be read."""
    return torch.compiler.is_compiling() or (length.is_cuda and torch.cuda.is_current_stream_capturing())
