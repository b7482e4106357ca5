"""Sizes of grids and tiles. Triton's own functions of these take five microseconds a call on the host (3.9)."""

from __future__ import annotations


def ceil_div(a: int, b: int) -> int:
    """How many times `b` fits into `a`, rounded up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`, which is positive."""
    return 1 << (n - 1).bit_length()
