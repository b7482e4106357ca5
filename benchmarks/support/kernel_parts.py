"""The kernels of a step by what they compute: the indexer, its top-k, attention, projections, and all else.

A profile of a call without a CUDA graph tells which op, or which kernel of Inductor's, launched each kernel, and the
shapes of its tensors. The cache's length marks the indexer and attention, and the widths next to it tell them apart.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

PARTS = ("indexer", "top-k", "attention", "projections", "other")
PRODUCTS = ("mm", "bmm", "addmm", "gemm", "gemv", "nvjet", "cutlass", "splitk", "splitkreduce", "project")
ATTENTION = ("attention", "picked", "latent", "combine", "fmha", "flash")
Shapes = list[tuple[int, ...]]


@dataclass(frozen=True)
class Widths:
    """Sizes of one layer's tensors. `keys` are the widths of what attention stores or computes for each key."""

    batch: int
    length: int
    keys: frozenset[int]
    index_heads: int
    index_dim: int

    def are_keys(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor has keys, values or latents of all slots; an indexer's have three dimensions."""
        rows = (self.length, self.batch * self.length)
        of_all_slots = len(shape) > 1 and shape[-2] in rows and shape[-1] in self.keys
        return of_all_slots and not self.are_index_keys(shape)

    def are_index_keys(self, shape: tuple[int, ...]) -> bool:
        keys = (self.batch, self.length, self.index_dim), (self.batch * self.length, self.index_dim)
        return shape in (*keys, (self.batch, 1, *keys[0][1:]), (self.batch, 1, self.index_dim, self.length))

    def are_scores(self, shape: tuple[int, ...]) -> bool:
        return len(shape) > 2 and shape[-2:] == (self.index_heads, self.length)

    def are_long(self, shape: tuple[int, ...]) -> bool:
        return self.length in shape or self.batch * self.length in shape


def part_of(kernel: str, launched_by: list[str], shapes: Shapes, w: Widths, picked: bool) -> str:
    """Return the part of a kernel that `launched_by` names, innermost first, called with tensors of these shapes.

    `picked` tells whether the top-k came before.
    """
    names = [name.lower() for name in (kernel, *launched_by)]
    words = {word for name in names[:2] for word in name.replace("::", "_").split("_")}
    if any(x in name for x in ("topk", "top_k", "count_scores", "write_picks") for name in names):
        return "top-k"
    if any(w.are_keys(shape) for shape in shapes):
        return "attention"
    if any(w.are_index_keys(shape) or w.are_scores(shape) for shape in shapes) or "index_scores" in names[0]:
        return "indexer"
    if any(w.are_long(shape) for shape in shapes):
        return "attention" if picked else "indexer"
    if words & {"project", "heads"} == {"project", "heads"}:
        return "projections"
    if any(word in name for word in ATTENTION for name in names[:2]):
        return "attention"
    if words & set(PRODUCTS) or any(name in names[0] for name in ("gemm", "gemv", "nvjet", "cutlass", "splitk")):
        return "projections"
    return "other"


def launched(events: list[FunctionEvent]) -> Iterator[tuple[str, float, list[str], Shapes]]:
    """Yield the name and microseconds of each kernel in the order of launches, what launched it, and the shapes."""
    for event in sorted(events, key=lambda e: e.time_range.start):
        if event.device_type != DeviceType.CPU or not event.kernels:
            continue
        names, parent = [event.name], event.cpu_parent
        while parent is not None:
            names.append(parent.name)
            parent = parent.cpu_parent
        shapes = [tuple(x) for x in event.input_shapes or () if x and all(isinstance(n, int) for n in x)]
        for kernel in event.kernels:
            yield kernel.name, kernel.duration, names, shapes


def profiled(step: Callable[[], object], w: Widths, repeats: int = 3) -> tuple[dict[str, float], list[dict]]:
    """Return the microseconds of each part of a step, medians, and all its kernels with their parts."""
    us_of_runs: list[dict[str, float]] = []
    kernels: list[dict] = []
    for _ in range(repeats):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as run:
            step()
            torch.cuda.synchronize()
        picked, us, kernels = False, dict.fromkeys(PARTS, 0.0), []
        for name, duration, launched_by, shapes in launched(run.events()):
            part = part_of(name, launched_by, shapes, w, picked)
            picked |= part == "top-k"
            us[part] += duration
            kernels.append({"kernel": name[:120], "op": launched_by[0][:120], "part": part, "us": duration})
        us_of_runs.append(us)
    return {part: statistics.median(us[part] for us in us_of_runs) for part in PARTS}, kernels
