"""Relative errors of candidates, and the reasons why some can't be measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from support.command_line import first_line

T = TypeVar("T")


def relative_error(out: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference over the norm of `exact`; NaN if any number of `out` is."""
    return ((out - exact).norm() / exact.norm()).item()


def attempt(make: Callable[[], T]) -> T | str:
    """Return the result of `make`, or its exception in one line: a kernel of others may raise any."""
    try:
        return make()
    except Exception as error:
        return first_line(error)
