"""Keys and values in 8 bits, with a scale for each token and head, in plain PyTorch.

`backend="tatten"` reads what `dequantise` makes of them in 8 bits; eager PyTorch makes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # the largest number of each dtype that is used


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round `[..., head_dim]` to 8 bits. Returns them and their scale `[..., 1]` in float32; NaN and inf become NaN."""
    x, largest = x.float(), LARGEST[dtype]
    scale = (x.abs().amax(dim=-1, keepdim=True) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    x = (x / scale).clamp(-largest, largest)
    return (x if dtype.is_floating_point else x.round()).to(dtype), scale


def dequantise(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values that 8 bits and their scale represent, rounded once."""
    return (x.float() * scale).to(dtype)
