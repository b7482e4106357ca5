"""Tensors with static addresses. All use of Dynamo's private mark for them is in this file."""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.moved import moved


def mark_static(*tensors: Tensor) -> None:
    """Mark tensors whose addresses never change, so that CUDA graphs read them in place.

    A graph copies its other inputs before each replay. For keys and values, that would double the memory traffic.
    """
    try:
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor)
    except Exception as error:
        moved("torch._dynamo.mark_static_address", error, "CUDA graphs copy keys and values before each replay")
