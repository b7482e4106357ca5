"""Attention to shared prefixes by groups of any size: samples of several prompts of which some were dropped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import tatten
from support.timing import as_graph, in_turns, microseconds

EXACT_AT_ONCE = 8  # sequences whose keys are repeated in float32 at a time


@dataclass(frozen=True)
class Sizes:
    """Samples of prompts, each with tokens of its own."""

    prompts: int = 8
    samples: int = 16
    prefix: int = 8192
    suffix: int = 256
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dropped: int = 13

    @property
    def batch(self) -> int:
        return self.prompts * self.samples


TINY = Sizes(prompts=4, samples=4, prefix=96, suffix=8, q_heads=8, kv_heads=2, head_dim=64, dropped=3)


def groups(s: Sizes) -> dict[str, list[int]]:
    """Return the prompt of each sequence, for each way in which samples were dropped."""
    regular = [i // s.samples for i in range(s.batch)]
    kept = torch.randperm(s.batch, generator=torch.Generator().manual_seed(1))[s.dropped :].sort().values.tolist()
    skewed = [0] * (s.batch - s.prompts + 1) + list(range(1, s.prompts))
    return {"regular": regular, "dropped": [regular[i] for i in kept], "skewed": skewed}


class Problem:
    """Random queries, prefixes and suffixes."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        torch.manual_seed(0)
        self.sizes, self.device = sizes, device
        s = sizes

        def randn(batch: int, heads: int, length: int) -> Tensor:
            return torch.randn(batch, heads, length, s.head_dim, device=device, dtype=torch.bfloat16)

        self.q = randn(s.batch, s.q_heads, 1)
        self.prefix = randn(s.prompts, s.kv_heads, s.prefix), randn(s.prompts, s.kv_heads, s.prefix)
        self.suffix = randn(s.batch, s.kv_heads, s.suffix), randn(s.batch, s.kv_heads, s.suffix)

    def rows(self, prompts: list[int]) -> Tensor:
        return torch.tensor(prompts, dtype=torch.int32, device=self.device)

    def segments(self, batch: int, rows: Tensor | None = None) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return the query, keys and values of the first sequences; with `rows`, prefixes are copied for each."""
        prefix = [x if rows is None else x.index_select(0, rows) for x in self.prefix]
        return self.q[:batch], *([p, s[:batch]] for p, s in zip(prefix, self.suffix, strict=True))

    def bytes(self, prompts: list[int]) -> int:
        """Return the bytes of prefixes, read once, of suffixes, queries and outputs."""
        s = self.sizes
        tokens = len(set(prompts)) * s.prefix + len(prompts) * s.suffix
        return 4 * s.head_dim * (tokens * s.kv_heads + len(prompts) * s.q_heads)

    def flops(self, prompts: list[int]) -> int:
        s = self.sizes
        return 4 * len(prompts) * s.q_heads * s.head_dim * (s.prefix + s.suffix)

    def error(self, prompts: list[int], out: Tensor) -> float:
        """Return the relative error of all sequences against float32."""
        s, wrong, size = self.sizes, 0.0, 0.0
        for sequences in torch.arange(len(prompts), device=self.device).split(EXACT_AT_ONCE):
            at = torch.tensor(prompts, device=self.device)[sequences]
            kv = zip(self.prefix, self.suffix, strict=True)
            keys, values = (torch.cat([p[at], suffix[sequences]], dim=2).float() for p, suffix in kv)
            q = self.q[sequences].float().view(len(sequences), s.kv_heads, -1, s.head_dim)
            exact = (q @ keys.transpose(2, 3) * s.head_dim**-0.5).softmax(-1) @ values
            wrong += (out[sequences].float().view_as(exact) - exact).square().sum().item()
            size += exact.square().sum().item()
        return math.sqrt(wrong / size)


def attend(query: Tensor, keys: list[Tensor], values: list[Tensor], row_groups: list[Tensor | None] | None) -> Tensor:
    """Call the op as a layer of a compiled model does: with groups that were found once for all layers."""
    none = [None] * len(keys)
    op = torch.ops.tatten.bifurcated_attention.default
    return op(query, keys, values, none, none, None, row_groups)[0]


def calls(p: Problem) -> Iterator[tuple[str, str, list[int], Callable[[], Tensor]]]:
    """Yield the name of the groups, the form in which they are passed, the prompts of the sequences, and the call."""
    s, prompts_by_name = p.sizes, groups(p.sizes)
    blocks = p.segments(s.batch)
    yield "regular", "blocks", prompts_by_name["regular"], lambda: attend(*blocks, None)
    for name, prompts in prompts_by_name.items():
        inputs, rows = p.segments(len(prompts)), p.rows(prompts)
        row_groups = torch.ops.tatten.row_groups.default(rows, s.prompts, s.q_heads // s.kv_heads)
        yield name, "groups", prompts, lambda x=inputs, y=row_groups: attend(*x, [y, None])
        yield name, "rows", prompts, lambda x=inputs, rows=rows: tatten.bifurcated_attention(*x, rows=[rows, None])
    dropped = prompts_by_name["dropped"]
    copied = p.segments(len(dropped), p.rows(dropped))
    yield "dropped", "copied", dropped, lambda: attend(*copied, None)


def checked(p: Problem, prompts: list[int], call: Callable[[], Tensor]) -> tuple[Callable[[], Tensor], float]:
    """Return the call, on a GPU as a graph, and its error; raise if it is wrong."""
    step = call
    if p.device == "cuda":
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        step = as_graph(call)
        step().fill_(math.nan)
    error = p.error(prompts, step())
    if not error < 1e-2:
        raise ArithmeticError(f"wrong: relative error {error:.1e}, allowed 1e-2")
    return step, error


def measure(sizes: Sizes, device: str, rates: tuple[float, float], rounds: int) -> list[dict[str, object]]:
    """Return a row for each call; `rates` are bytes and floating point operations per microsecond."""
    p = Problem(sizes, device)
    steps, rows = {}, []
    for groups_of, how, prompts, call in calls(p):
        step, error = checked(p, prompts, call)
        steps[f"{groups_of} {how}"] = step
        floor = max(p.bytes(prompts) / rates[0], p.flops(prompts) / rates[1])
        named = {"groups": groups_of, "given": how, "batch": len(prompts), "prompts": sizes.prompts}
        rows.append({**named, "prefix": sizes.prefix, "suffix": sizes.suffix, "error": error, "floor_us": floor})
    us = in_turns(steps, rounds, lambda _, step: microseconds(step, device, repeats=10 if device == "cuda" else 1))
    regular = us["regular blocks"]
    for row, x in zip(rows, us.values(), strict=True):
        row |= {"us": x, "over_regular": x / regular, "added_us": x - regular}
    return rows


def replay(sizes: Sizes, device: str, patterns: int = 6) -> float:
    """Return the largest error of one CUDA graph replayed over other rows, some of which no sequence reads."""
    p = Problem(sizes, device)
    inputs, rows = p.segments(sizes.batch), p.rows(groups(sizes)["regular"])

    def call() -> Tensor:
        return tatten.bifurcated_attention(*inputs, rows=[rows, None])

    step, _ = checked(p, rows.tolist(), call)
    rng, errors = torch.Generator().manual_seed(2), []
    for i in range(patterns):
        prompts = torch.randint(i % sizes.prompts + 1, (sizes.batch,), generator=rng, dtype=torch.int32)
        rows.copy_(prompts)
        errors.append(p.error(prompts.tolist(), step()))
    worst = max(errors, key=lambda x: (math.isnan(x), x))
    if not worst < 1e-2:
        raise ArithmeticError(f"a graph replayed over other rows is wrong: relative error {worst:.1e}, allowed 1e-2")
    return worst
