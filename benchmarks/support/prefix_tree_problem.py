"""Random data of a published tree, and its candidates: each checked against float32, then timed side by side."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

import tatten
from support.errors import attempt, relative_error
from support.prefix_tree_cases import Tree
from support.prefix_tree_peers import LEVELS, cascade, compose, pages_of
from support.timing import as_graph, in_turns, microseconds

OURS = "tatten"
Calls = Callable[[int], Tensor]  # attention over one of the copies
Step = Callable[[], list[Tensor]]


class Problem:
    """Random queries, and `copies` of the keys and values of all levels."""

    def __init__(self, tree: Tree, device: str) -> None:
        torch.manual_seed(0)
        self.tree, self.device, self.copies = tree, device, tree.copies(device)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16)

        self.q = randn(self.copies, tree.batch, tree.q_heads, 1, tree.head_dim)
        levels = [
            randn(self.copies, 2, nodes, tree.kv_heads, length, tree.head_dim)
            for nodes, length in zip(tree.nodes, tree.lengths, strict=True)
        ]
        self.keys, self.values = ([[x[copy, i] for x in levels] for copy in range(self.copies)] for i in range(2))
        self.sample = torch.tensor(sorted({0, tree.batch // 3, tree.batch - 1}), device=device)
        self.exact = {copy: self._exact(copy) for copy in {0, self.copies - 1}}

    def _exact(self, copy: int) -> Tensor:
        """Return attention of the sampled sequences in float32."""
        tree = self.tree

        def path(levels: list[Tensor]) -> Tensor:
            return torch.cat([x[self.sample * len(x) // tree.batch] for x in levels], dim=2).float()

        q = self.q[copy, self.sample].float().view(len(self.sample), tree.kv_heads, -1, tree.head_dim)
        scores = q @ path(self.keys[copy]).transpose(2, 3) * tree.head_dim**-0.5
        return (scores.softmax(-1) @ path(self.values[copy])).flatten(1, 2)

    def error(self, copy: int, out: Tensor) -> float:
        """Return the relative error of the sampled sequences; NaN if any number of `out` is."""
        if out.isnan().any():
            return math.nan
        exact = self.exact[copy]
        return relative_error(out[self.sample].float().view_as(exact), exact)

    def step(self, call: Calls) -> Step:
        """Return a step with a call for each copy, on a GPU as a graph."""

        def step() -> list[Tensor]:
            return [call(copy) for copy in range(self.copies)]

        if self.device == "cpu":
            return step
        for _ in range(2):
            call(0)
        torch.cuda.synchronize()
        return as_graph(step)

    def checked(self, call: Calls) -> tuple[Step, float]:
        """Return the step and its error; raise if it is wrong."""
        step = self.step(call)
        if self.device == "cuda":
            for out in step():
                out.fill_(math.nan)
        outs = step()
        error = max((self.error(copy, outs[copy]) for copy in self.exact), key=lambda x: (math.isnan(x), x))
        if not error < 1e-2:
            raise ArithmeticError(f"wrong: relative error {error:.1e}, allowed 1e-2")
        return step, error

    def microseconds(self, step: Step, repeats: int = 1) -> float:
        return microseconds(step, self.device, self.copies, repeats)


def ours(p: Problem) -> Calls:
    return lambda copy: tatten.bifurcated_attention(p.q[copy], p.keys[copy], p.values[copy])


def composed(p: Problem, kernels: tuple[str, ...]) -> Calls:
    """Return a composition of these kernels, one for each level."""
    levels = [LEVELS[name](p.tree, i, p.device) for i, name in enumerate(kernels)]
    missing = {name for name, level in zip(kernels, levels, strict=True) if level is None}
    if missing:
        raise RuntimeError(f"{' and '.join(sorted(missing))} not installed")
    attention = compose(levels)
    return lambda copy: attention(p.q[copy], p.keys[copy], p.values[copy])


def cascaded(p: Problem) -> Calls:
    attention = cascade(p.tree, p.device)
    if attention is None:
        raise RuntimeError("not installed")
    pages = [pages_of(p.tree, keys, values) for keys, values in zip(p.keys, p.values, strict=True)]
    return lambda copy: attention(p.q[copy], pages[copy])


def alone(p: Problem, level: int, name: str) -> float:
    """Return the microseconds of one kernel at one level; infinite if it is unavailable or fails."""
    try:
        attend = LEVELS[name](p.tree, level, p.device)
        if attend is None:
            return math.inf
        step = p.step(lambda copy: attend(p.q[copy], p.keys[copy][level], p.values[copy][level])[0])
        return min(p.microseconds(step) for _ in range(3))
    except Exception:
        return math.inf


def fastest(p: Problem, kernels: Sequence[str]) -> tuple[str, ...]:
    """Return the one of these kernels that is fastest alone, for each level."""
    return tuple(min(kernels, key=functools.partial(alone, p, level)) for level in range(p.tree.levels))


def candidates(p: Problem, names: Sequence[str]) -> dict[str, Callable[[], Calls]]:
    """Return a function that makes each of these candidates. `picked` has the fastest kernel at each level."""
    kernels = [name for name in LEVELS if name in names]
    uniform = {name: (lambda name=name: composed(p, (name,) * p.tree.levels)) for name in LEVELS}
    picked = lambda: composed(p, fastest(p, kernels))
    makers = {OURS: lambda: ours(p), **uniform, "picked": picked, "cascade": lambda: cascaded(p)}
    return {name: make for name, make in makers.items() if name in names}


def measure(tree: Tree, device: str, names: list[str], rounds: int) -> dict[str, object]:
    """Return microseconds and errors of each candidate, and why others are left out. Raise an error of ours."""
    p = Problem(tree, device)
    makers = candidates(p, names)
    checks = {name: lambda make=make: p.checked(make()) for name, make in makers.items()}
    tried = {name: check() if name == OURS else attempt(check) for name, check in checks.items()}
    left_out = {name: x for name, x in tried.items() if isinstance(x, str)}
    steps = {name: x[0] for name, x in tried.items() if not isinstance(x, str)}
    errors = {name: x[1] for name, x in tried.items() if not isinstance(x, str)}
    once = {name: p.microseconds(step) * p.copies for name, step in steps.items()}
    us = in_turns(steps, rounds, lambda name, step: p.microseconds(step, max(1, min(20, int(2e3 / once[name])))))
    others = {name: x for name, x in us.items() if name != OURS}
    best = min(others, key=others.__getitem__, default=None)
    ratio = None if best is None else us[OURS] / us[best]
    figures = {"us": us, "best": best, "ratio": ratio, "errors": errors, "left_out": left_out}
    return {**asdict(tree), "name": tree.name, "copies": p.copies, **figures}
