"""Whether bifurcation pays: small work is left alone (question 4 of the paper's appendix, arXiv 2403.08845)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """What a device takes, fitted to `benchmarks/shared_prefix.py --calibrate`."""

    bytes_per_us: float  # of keys and values that SDPA moves
    segment_us: float  # for each segment: a kernel, its share of the merge, and the calls


RATES = {"cpu": Rates(20e3, 80.0), "cuda": Rates(4e6, 4.0)}


@dataclass(frozen=True)
class Cost:
    """An estimate of what a rewrite saves, and what its extra kernels take, in microseconds."""

    moved: int  # bytes of K and V, by SDPA and by what repeats and concatenates them for it
    read: int  # bytes of K and V, each stored one once
    segments: int
    saved_us: float
    extra_us: float

    @property
    def pays(self) -> bool:
        return self.saved_us > self.extra_us

    def __str__(self) -> str:
        saved = f"about {self.saved_us:.0f} us saved by reading {self.read} instead of moving {self.moved} bytes"
        return f"{saved}, about {self.extra_us:.0f} us more for {self.segments} segments"


def bifurcated_cost(device: str, moved: int, read: int, segments: int) -> Cost:
    rates = RATES[device]
    return Cost(moved, read, segments, (moved - read) / rates.bytes_per_us, segments * rates.segment_us)
