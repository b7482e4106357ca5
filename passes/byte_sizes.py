"""Sizes in bytes as people read them."""

from __future__ import annotations


def shown_bytes(size: int) -> str:
    """Return a number of bytes in B, KiB, MiB or GiB, with four digits."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} GiB"
