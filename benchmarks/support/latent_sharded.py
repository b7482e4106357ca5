"""Latents sharded over ranks beside all of them on one, a section of `latent.py`: attention, `W_uv` and the merge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import tatten
from support.errors import relative_error
from support.latent_kernel import RANK, ROPE, SCALE
from support.timing import as_graph, in_turns, seconds
from support.together import Ranks

VALUE = 128
MOST_OVER_SHARE = 8.0  # us


@dataclass(frozen=True)
class Shape:
    heads: int
    length: int


def shapes(device: str) -> list[Shape]:
    return [Shape(4, 64)] if device == "cpu" else [Shape(heads, 262144) for heads in (128, 16)]


def attend(inputs: tuple[Tensor, ...], weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state of one query, with an output as wide as values, by the ops that the pass inserts on CUDA."""
    sums, lse = torch.ops.tatten.latent_attention.default(*inputs, scale=SCALE, out_dtype=torch.float32)
    return torch.ops.tatten.project_heads.default(sums, weight), lse


def exact(inputs: tuple[Tensor, ...], weight: Tensor) -> Tensor:
    query, query_rope, latent, key_rope = (x[0].double() for x in inputs)
    scores = query[:, 0] @ latent[0].T + query_rope[:, 0] @ key_rope[0].T
    return ((scores * SCALE).softmax(-1) @ latent[0]).unsqueeze(1) @ weight.mT.double()


def measure(s: Shape, ranks: Ranks, rounds: int, repeats: int = 20) -> dict[str, object]:
    """Return a row of the results: microseconds of the slowest rank, and relative errors."""
    rng = torch.Generator(ranks.device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, device=ranks.device).to(torch.bfloat16)

    query, keys = (1, s.heads, 1), (1, 1, s.length)
    inputs = randn(*query, RANK), randn(*query, ROPE), randn(*keys, RANK), randn(*keys, ROPE)
    weight = randn(s.heads, VALUE, RANK)
    shard = *inputs[:2], *(x[:, :, ranks.rank :: ranks.size].contiguous() for x in inputs[2:])
    arms: dict[str, Callable[[], Tensor]] = {
        "local": lambda: attend(inputs, weight)[0],
        "sharded": lambda: tatten.tree_merge(*attend(shard, weight), ranks.group)[0],
    }
    wanted, steps, errors = exact(inputs, weight), {}, {}
    for name, step in arms.items():
        step()
        if ranks.device == "cuda":
            step()
            torch.cuda.synchronize()
            step = as_graph(step)
        errors[name] = relative_error(step()[0].double(), wanted)
        if not ranks.largest(errors[name]) < 2e-2:
            raise ArithmeticError(f"{name} is wrong: relative error {errors[name]:.1e}, allowed 2e-2")
        steps[name] = step

    def slowest(name: str, step: Callable[[], Tensor]) -> float:
        torch.distributed.barrier(ranks.group)
        step()  # after the barrier: the GPU is busy while the host launches the timed step
        return ranks.largest(seconds(step, ranks.device, repeats) * 1e6)

    us = in_turns(steps, rounds, slowest)
    over = us["sharded"] - us["local"] / ranks.size
    row = {"section": "sharded", "ranks": ranks.size, "heads": s.heads, "length": s.length}
    return {**row, "us": us, "over_share_us": over, "errors": errors}
