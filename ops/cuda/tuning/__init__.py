"""Measurements of GPUs, one module for each: rates and thresholds, and the provider that decodes fastest."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from dataclasses import dataclass, field

import torch

from tatten.ops.cuda.gpu import Capability, capability, device_name
from tatten.ops.cuda.gpu_rates import GpuRates

DEFAULT = "NVIDIA H200"  # if several modules fit a GPU equally well


@dataclass(frozen=True)
class Tuning:
    """The measurements of one GPU.

    Attributes:
        device: the name of the GPU.
        capability: its compute capability.
        fastest: for powers of two of (sequence, kv head) pairs, the number of keys from which on a provider is the
            fastest, as measured by `benchmarks/calibrate.py`.
        rates: its rates and thresholds.
    """

    device: str
    capability: Capability
    fastest: dict[int, dict[int, str]]
    rates: GpuRates = field(default_factory=GpuRates)

    def provider(self, pairs: int, kv_len: int) -> str:
        """Return the fastest provider at the measured sizes that are nearest in ratio."""
        row = self.fastest[min(max(self.fastest), 1 << round_log2(pairs))]
        keys = max(min(row), 1 << round_log2(kv_len))
        return row[max(start for start in row if start <= keys)]


def round_log2(n: int) -> int:
    """Return the exponent of the power of two that is nearest to `n` in ratio; 0 for 0."""
    return max(0, (n * n).bit_length() // 2)


@functools.cache
def tunings() -> tuple[Tuning, ...]:
    """Return the measurements of all GPUs."""
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return tuple(Tuning(x.DEVICE, x.CAPABILITY, x.FASTEST, x.RATES) for x in modules)


@functools.cache
def tuning_of(device: str, capability: Capability) -> Tuning | None:
    """Return the measurements of a GPU, or else of the nearest GPU with the same major compute capability.

    The result is None if no GPU of that architecture was measured, as providers use other kernels on each architecture.
    """

    def distance(tuning: Tuning) -> tuple[bool, int, bool]:
        return tuning.device != device, abs(tuning.capability[1] - capability[1]), tuning.device != DEFAULT

    fitting = [tuning for tuning in tunings() if tuning.device == device or tuning.capability[0] == capability[0]]
    return min(fitting, key=distance, default=None)


@functools.cache
def gpu_rates(device: torch.device) -> GpuRates:
    """Return the rates of a device by `tuning_of`; those of an H200 if no GPU of its architecture was measured."""
    tuning = tuning_of(device_name(device), capability(device))
    return GpuRates() if tuning is None else tuning.rates


def module_name(device: str) -> str:
    """Return the name of the module for a GPU: `h100_80gb_hbm3` for NVIDIA H100 80GB HBM3."""
    words = "".join(x if x.isalnum() else " " for x in device.lower()).split()
    return "_".join(word for word in words if word != "nvidia")
