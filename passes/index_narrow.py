"""Find index keys that a program dequantises before it scores them, in 8 bits and with the scale of each key.

`(k8.float() * scale).to(dtype)` represents each key as the product. The op reads keys in 8 bits and multiplies by the
scale in float32, which rounds no more than the program's copy in `dtype`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from tatten.ops.cuda.gpu import has_float8
from tatten.ops.validation import NARROW_DTYPES
from tatten.passes.dequantised import Dequantised, dequantised_at
from tatten.passes.products import Factor, viewed
from tatten.passes.symbolic import FakeTensor, is_input_number, known_equal, known_tensor, number_in, tensor_of


@dataclass(frozen=True)
class StoredKeys:
    """Index keys as they are stored: in 8 bits with their scales, or in another dtype with `key` alone.

    Attributes:
        key: the tensor of keys, with the views of the op's keys.
        scale: a scale of keys, with views `[1 or batch, 1 or kv_length, 1]`; None without a tensor.
        number, factors: the factors of all keys: a number, and numbers that are inputs of the graph.
    """

    key: Factor
    scale: Factor | None = None
    number: float = 1.0
    factors: tuple[Node, ...] = ()


def narrow_keys(candidates: Iterable[Factor], widest: torch.dtype) -> StoredKeys | str | None:
    """Find the tensor in 8 bits that keys were dequantised from.

    Args:
        candidates: the keys at each step of the walk back, as `[batch, kv_length, dim]` with their views.
        widest: the dtype of the products, and the widest dtype of a scale.

    Returns:
        Keys in 8 bits, the reason why they can't be read, or None if keys were not dequantised.
    """
    reason: str | None = None
    for keys in candidates:
        dequantised = dequantised_at(keys.node)
        if dequantised is not None and dequantised.path:
            narrow = _read_narrow(keys, dequantised, widest)
            if not isinstance(narrow, str):
                return narrow
            reason = narrow  # the last candidate gives the reason: views stand between the others and the 8 bits
    return reason


def _read_narrow(keys: Factor, dequantised: Dequantised, widest: torch.dtype) -> StoredKeys | str:
    source = known_tensor(dequantised.source)
    kind = f"`{dequantised.source}` in {str(source.dtype)[6:]}"
    if source.dtype not in NARROW_DTYPES:
        return f"{kind}, where the op takes float8_e4m3fn and int8"
    if source.dtype == torch.float8_e4m3fn and source.device.type == "cuda" and not has_float8(source.device):
        return f"{kind}, which needs compute capability 8.9"
    if dequantised.obstacle:
        return f"{kind}, {dequantised.obstacle}"
    if len(dequantised.scales) > 1:
        return f"{kind}, times {len(dequantised.scales)} factors"
    narrow = StoredKeys(Factor(dequantised.source, keys.views, (*keys.path, *dequantised.path)))
    if not dequantised.scales:
        return narrow
    (factor,) = dequantised.scales
    number = number_in(factor)
    if number is not None:
        return dataclasses.replace(narrow, number=number)
    if is_input_number(factor):
        return dataclasses.replace(narrow, factors=(factor,))
    scale = _scale_of_keys(factor, narrow.key, widest)
    return f"{kind}, {scale}" if isinstance(scale, str) else dataclasses.replace(narrow, scale=scale)


def _scale_of_keys(factor: Any, key: Factor, widest: torch.dtype) -> Factor | str:
    """Return a tensor that multiplies keys as a factor `[1 or batch, 1 or kv_length, 1]`, or the reason if it isn't."""
    scale, source = tensor_of(factor), known_tensor(key.node)
    if not isinstance(scale, FakeTensor) or not isinstance(factor, Node):
        return f"times `{factor}`, which is not a tensor or a number"
    if scale.device != source.device or scale.dtype not in (torch.float16, torch.bfloat16, torch.float32, widest):
        return f"times a scale in {str(scale.dtype)[6:]} on {scale.device}"
    shown = f"times a scale of shape {list(scale.shape)}"
    if scale.dim() > source.dim():
        return f"{shown}, which repeats keys"
    views = (("unsqueeze", 0),) * (source.dim() - scale.dim()) + key.views
    viewed_scale, viewed_keys = viewed(Factor(factor, views)), viewed(key)
    if viewed_scale is None or viewed_keys is None:
        return f"{shown}, which has other dims than keys"
    if not known_equal(viewed_scale.shape[-1], 1):
        return f"{shown}, which differs along the dims of a key"
    for size, expected in zip(viewed_scale.shape[:-1], viewed_keys.shape[:-1], strict=True):
        if not known_equal(size, expected) and not known_equal(size, 1):
            return f"{shown}, which may or may not broadcast"
    return Factor(factor, views)
