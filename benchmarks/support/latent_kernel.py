"""The kernels of latent attention side by side, a section of `latent.py`: each checked against float64, then timed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from support import peers
from support.decode_cases import L2
from support.errors import attempt, relative_error
from support.timing import as_graph, in_turns, microseconds
from tatten.ops.latent_validation import FEW_QUERIES_ON_CUDA

RANK, ROPE = 512, 64
SCALE = (128 + 64) ** -0.5  # of DeepSeek-V3's keys
OURS = ("tatten", "unrounded")
PEERS = ("fa3", "flash_mla")
Attention = Callable[..., Tensor]  # of query, query_rope, latent and key_rope, or of the result of `inputs_of` for them
Prepared = tuple[Callable[[], list[Tensor]], int, float]  # a step, the number of its calls, and its error


@dataclass(frozen=True)
class Shape:
    heads: int
    batch: int
    length: int

    @property
    def bytes(self) -> int:
        """The bytes of the latents and their rope, in bfloat16."""
        return 2 * self.batch * self.length * (RANK + ROPE)

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.heads * self.length * (2 * RANK + ROPE)


def shapes(device: str) -> list[Shape]:
    k = 1024
    if device == "cpu":
        return [Shape(16, 2, 256), Shape(16, 1, k)]
    sizes = [(1, 8 * k), (1, 128 * k), (8, 16 * k), (64, 4 * k), (128, 4 * k)]
    return [Shape(heads, *size) for heads in (128, 16) for size in sizes]


def inputs_of(name: str, s: Shape, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the inputs of a candidate, in the layout in which a model would have them for it."""
    query, query_rope, latent, key_rope = inputs
    if name == "unrounded" and s.heads <= FEW_QUERIES_ON_CUDA:
        return query.float(), query_rope, latent, key_rope
    if name == "flash_mla":
        pages = torch.cat((latent, key_rope), -1).view(-1, peers.PAGE_OF_FLASH_MLA, 1, RANK + ROPE)
        return torch.cat((query, query_rope), -1).transpose(1, 2).contiguous(), pages
    return inputs


def candidates(s: Shape, device: str) -> dict[str, Callable[[], Attention | None]]:
    lengths = torch.full((s.batch,), s.length, dtype=torch.int32, device=device)
    op = torch.ops.tatten.latent_attention.default

    def fa3() -> Attention | None:
        kernel = peers.fa3_latent()
        return kernel and (lambda *tensors: kernel(*tensors, lengths, SCALE))

    def flash_mla() -> Attention | None:
        kernel = peers.flash_mla(lengths, s.length // peers.PAGE_OF_FLASH_MLA, SCALE)
        return kernel and (lambda *tensors: kernel(*tensors).transpose(1, 2))

    return {
        "tatten": lambda: lambda *tensors: op(*tensors, scale=SCALE)[0],
        "unrounded": lambda: lambda *tensors: op(*tensors, scale=SCALE, out_dtype=torch.float32)[0],
        "fa3": fa3,
        "flash_mla": flash_mla,
    }


def copies(s: Shape, device: str) -> list[tuple[Tensor, ...]]:
    """Return random queries, latents and their ropes, in enough copies that none is still cached."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(s.batch, *shape, device=device, dtype=torch.bfloat16)

    query, keys = (s.heads, 1), (1, s.length)
    widths = (*query, RANK), (*query, ROPE), (*keys, RANK), (*keys, ROPE)
    return [tuple(randn(*shape) for shape in widths) for _ in range(-(-L2[device] // s.bytes))]


def exact(inputs: Sequence[Tensor], sequence: int) -> Tensor:
    """Return attention of one sequence in float64, `[heads, rank]`."""
    query, query_rope, latent, key_rope = (x[sequence].flatten(0, 1).double() for x in inputs)
    return ((query @ latent.T + query_rope @ key_rope.T) * SCALE).softmax(-1) @ latent


def error(inputs: Sequence[Tensor], out: Tensor) -> float:
    """Return the larger relative error of the first and the last sequence; NaN if any number of `out` is."""
    if out.isnan().any():
        return math.nan
    wanted = {b: exact(inputs, b) for b in (0, len(out) - 1)}
    return max(relative_error(out[b, :, 0].double(), x) for b, x in wanted.items())


def prepare(
    name: str, s: Shape, make: Callable[[], Attention | None], inputs: Sequence[tuple[Tensor, ...]]
) -> Prepared:
    """Return a step to time, the number of its calls, and its error; raise if it does not run, or is wrong."""
    attention = make()
    if attention is None:
        raise RuntimeError("not installed, or not for this device")
    # A short step has many calls.
    turns = [inputs_of(name, s, tensors) for tensors in inputs] * max(1, 8 // len(inputs))

    def step() -> list[Tensor]:
        return [attention(*tensors) for tensors in turns]

    if inputs[0][0].is_cuda:
        for _ in range(2):
            attention(*turns[0])
        torch.cuda.synchronize()
        step = as_graph(step)
        for out in step():
            out.fill_(math.nan)
    outs, last = step(), len(inputs) - 1
    largest = max((error(inputs[i], outs[i]) for i in (0, last)), key=lambda x: (math.isnan(x), x))
    if not largest < 1e-2:
        raise ArithmeticError(f"wrong: relative error {largest:.1e}, allowed 1e-2")
    return step, len(turns), largest


def measure(s: Shape, device: str, rates: tuple[float, float], rounds: int) -> dict[str, object]:
    """Return a row of the results; `rates` are bytes and floating point operations per second."""
    inputs = copies(s, device)
    makers = candidates(s, device)
    tried = {name: attempt(functools.partial(prepare, name, s, make, inputs)) for name, make in makers.items()}
    ready = {name: x for name, x in tried.items() if not isinstance(x, str)}
    once = {name: microseconds(step, device) for name, (step, _, _) in ready.items()}

    def timed(name: str, prepared: Prepared) -> float:
        step, calls, _ = prepared
        return microseconds(step, device, calls, max(1, min(50, int(2e4 / once[name]))))

    us = in_turns(ready, rounds, timed)
    return {
        "section": "kernel",
        **asdict(s),
        "us": us,
        "ratio": us["tatten"] / us["fa3"] if {"tatten", "fa3"} <= us.keys() else None,
        "bytes_us": s.bytes / rates[0] * 1e6,
        "flops_us": s.flops / rates[1] * 1e6,
        "errors": {name: e for name, (_, _, e) in ready.items()},
        "left_out": {name: x for name, x in tried.items() if isinstance(x, str)},
    }
