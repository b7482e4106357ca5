"""Tensors whose addresses stay: all use of Dynamo's private mark for them is in this file."""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.moved import moved


def mark_static(*tensors: Tensor) -> None:
    """Promise that these tensors stay where they are: CUDA graphs then read them in place.

    A graph copies its other inputs before each replay, which for keys and values would double their traffic.
    """
    try:
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor)
    except Exception as error:
        moved("torch._dynamo.mark_static_address", error, "CUDA graphs copy keys and values before each replay")
