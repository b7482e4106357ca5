"""Implementations on a CPU compute in the dtypes of their tensors, whatever autocast would make of their products."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def without_autocast(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """`implementation`, run with autocast off: on, it would round what is summed in float32."""

    @functools.wraps(implementation)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return implementation(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return implementation(*args, **kwargs)

    return run
