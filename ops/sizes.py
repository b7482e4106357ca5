"""Arithmetic for grids and tiles. Triton 3.9's functions for it take 5 us per call on the host."""

from __future__ import annotations


def ceil_div(a: int, b: int) -> int:
    """Return `a / b`, rounded up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least `n`; `n` is positive."""
    return 1 << (n - 1).bit_length()
