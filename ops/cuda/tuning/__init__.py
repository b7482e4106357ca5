"""Tuning tables: the provider that was measured to decode fastest, one module for each GPU that was measured."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from dataclasses import dataclass

DEFAULT = "NVIDIA H200"  # if several tables fit a GPU equally well

Capability = tuple[int, int]


@dataclass(frozen=True)
class Table:
    """The fastest provider by sizes, as `benchmarks/calibrate.py` measured it on one GPU.

    Attributes:
        device: the name of the GPU.
        capability: its compute capability.
        fastest: for powers of two of (sequence, kv head) pairs, the number of keys from which on a provider is the
            fastest.
    """

    device: str
    capability: Capability
    fastest: dict[int, dict[int, str]]

    def provider(self, pairs: int, kv_len: int) -> str:
        """The fastest provider at the measured sizes that are nearest in ratio."""
        row = self.fastest[min(max(self.fastest), 1 << round_log2(pairs))]
        keys = max(min(row), 1 << round_log2(kv_len))
        return row[max(start for start in row if start <= keys)]


def round_log2(n: int) -> int:
    """The exponent of the power of two that is nearest to `n` in ratio; 0 for 0."""
    return max(0, (n * n).bit_length() // 2)


@functools.cache
def tables() -> tuple[Table, ...]:
    """Return all tables."""
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return tuple(Table(x.DEVICE, x.CAPABILITY, x.FASTEST) for x in modules)


@functools.cache
def table_of(device: str, capability: Capability) -> Table | None:
    """Return the table of a GPU, or else that of the nearest GPU with the same major compute capability.

    The result is None if no GPU of that architecture was measured: another one has other kernels under the same names.
    """

    def distance(table: Table) -> tuple[bool, int, bool]:
        return table.device != device, abs(table.capability[1] - capability[1]), table.device != DEFAULT

    fitting = [table for table in tables() if table.device == device or table.capability[0] == capability[0]]
    return min(fitting, key=distance, default=None)


def module_name(device: str) -> str:
    """The name of the module for a GPU's table: `h100_80gb_hbm3` for NVIDIA H100 80GB HBM3."""
    words = "".join(x if x.isalnum() else " " for x in device.lower()).split()
    return "_".join(word for word in words if word != "nvidia")
