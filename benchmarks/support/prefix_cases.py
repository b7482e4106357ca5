"""The shapes that `shared_prefix.py` measures: one prefix for the whole batch, and a suffix for each sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A shape; head_dim is 128."""

    batch: int
    q_heads: int
    kv_heads: int
    prefix: int
    suffix: int
    dtype: str = "bfloat16"
    head_dim: int = 128


def cpu_rows() -> list[Row]:
    dtypes, heads = ("float32", "bfloat16"), ((8, 2), (8, 8), (32, 8), (32, 32))
    bars = [Row(b, *h, 4096, 64, dtype) for dtype in dtypes for b in (16, 64) for h in heads]
    grid = [
        Row(b, 16, kv, p, s, dtype)
        for dtype in dtypes
        for kv in (4, 16)
        for b in (1, 2, 8, 32)
        for p in (64, 512, 4096)
        for s in (16, 256)
    ]
    return bars + grid


def small_rows() -> list[Row]:
    """Return shapes where bifurcation may not pay."""
    return [Row(b, 16, kv, p, s) for kv in (4, 16) for b in (2, 4, 8) for p in (64, 256, 1024) for s in (16, 64)]


def cuda_rows() -> list[Row]:
    shapes = [
        (4, 32, 8, 4096, 256),
        (16, 32, 8, 8192, 256),
        (64, 32, 8, 32768, 256),
        (256, 32, 8, 8192, 256),
        (8, 32, 8, 65536, 256),
        (32, 32, 8, 131072, 512),
        (16, 64, 8, 32768, 1024),
        (128, 20, 20, 10240, 256),
        (64, 32, 32, 8192, 256),
    ]
    return [Row(*shape) for shape in shapes]
