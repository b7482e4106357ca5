"""Timing that the benchmarks share: a CUDA graph of a step, and the seconds that steps take on either device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor


def as_graph(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Capture a step that was run before; what it returns replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay(inputs: Callable[[], Tensor] = step) -> Tensor:  # `step` keeps what the graph reads alive
        graph.replay()
        return out

    return replay


def seconds(step: Callable[[], object], device: str, repeats: int = 1) -> float:
    """Of one step, in a row of `repeats`."""
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        return (time.perf_counter() - start) / repeats
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats
