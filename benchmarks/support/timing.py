"""Timing that the benchmarks share: CUDA graphs of steps, seconds on either device, medians of turns, and ceilings."""

from __future__ import annotations

import contextlib
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

Step = TypeVar("Step")


def clock(call: Callable[[], object], device: str) -> float:
    """Return the seconds of a call by wall clock, until the device has finished its work."""
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def more_tokens_ms(call: Callable[[int], object], few: int, many: int, device: str) -> float:
    """Return the milliseconds of one more token by wall clock, from a call for `few` tokens and one for `many`."""
    seconds = clock(lambda: call(few), device)
    return (clock(lambda: call(many), device) - seconds) / (many - few) * 1e3


class TookTooLong(BaseException):
    """Ends a block at its time limit; not an Exception, so that no handler in between catches it."""


@contextlib.contextmanager
def at_most(limit: float) -> Iterator[None]:
    """Raise `TookTooLong` in a block of the main thread after its limit of seconds."""

    def stop(*_: object) -> None:
        raise TookTooLong(f"took longer than {limit:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def as_graph(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Capture a step that was run before; return a function that replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay(inputs: Callable[[], Tensor] = step) -> Tensor:  # `step` keeps what the graph reads alive
        graph.replay()
        return out

    return replay


def seconds(step: Callable[[], object], device: str, repeats: int = 1) -> float:
    """Return the seconds of one step, in a row of `repeats`."""
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


def microseconds(step: Callable[[], object], device: str, calls: int = 1, repeats: int = 1) -> float:
    """Return the microseconds of one of a step's calls, after a step that keeps the GPU busy and the caches warm."""
    step()
    return seconds(step, device, repeats) / calls * 1e6


def in_turns(steps: Mapping[str, Step], rounds: int, measure: Callable[[str, Step], float]) -> dict[str, float]:
    """Return the median of each step's times; steps take turns, so that a slow moment of the machine affects all."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(measure(name, step))
    return {name: statistics.median(x) for name, x in times.items()}


def read_rate(device: str) -> float:
    """Return bytes per second: the best of a sum, a maximum, and a copy, which counts reads and writes."""
    x = torch.randn(1 << (28 if device == "cpu" else 30), device=device)
    runs = (x.sum, x.nbytes), (x.amax, x.nbytes), (x.clone, 2 * x.nbytes)
    return max(size * 1e6 / microseconds(run, device, repeats=3) for run, size in runs for _ in range(5))


def product_rate(device: str, dtype: torch.dtype) -> float:
    """Return floating point operations per second of a large matrix product."""
    n = 2048 if device == "cpu" else 8192
    x = torch.randn(n, n, device=device).to(dtype)
    return 2 * n**3 * 1e6 / min(microseconds(lambda: x @ x, device) for _ in range(5))
