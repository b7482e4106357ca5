"""Implementations on a CPU compute in the dtypes of their tensors, whether autocast is on or not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def without_autocast(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Return `implementation`, run with autocast off: autocast would round values that are summed in float32."""

    @functools.wraps(implementation)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return implementation(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return implementation(*args, **kwargs)

    return run
