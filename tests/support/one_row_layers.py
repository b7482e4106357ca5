"""A decoder layer of one row, its graphs, and the groups of linear layers that the pass finds in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import capture, name_of
from torch import Tensor, nn
from torch.fx import GraphModule

from tatten.passes import skinny_linears
from tatten.passes.fused_linears import FusedGroup, apply_fused_group, find_fused_groups
from tatten.passes.mutation import movers
from tatten.passes.skinny_linears import apply_linear_group, find_skinny_linears

bf16 = torch.bfloat16
WIDTH, INNER, EPS = 32, 48, 1e-5


def take_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pass take layers of any size, on a CPU, as on a GPU of Hopper."""
    for name in ("LEAST_BYTES", "LEAST_BYTES_OF_ONE_ROW"):
        monkeypatch.setattr(skinny_linears, name, 1)
    monkeypatch.setattr(skinny_linears, "pays_on", lambda device: True)


def inputs(dtype: torch.dtype = bf16) -> tuple[Tensor, ...]:
    """A row, and parameters: the weights of two norms, four weights `[WIDTH, WIDTH]`, gate, up and down."""
    torch.manual_seed(0)
    x, g, h = torch.randn(1, 1, WIDTH), 1 + torch.randn(WIDTH) / 4, 1 + torch.randn(WIDTH) / 4
    square = [torch.randn(WIDTH, WIDTH) / 4 for _ in range(4)]
    gates = [torch.randn(INNER, WIDTH) / 4 for _ in range(2)]
    weights = g, h, *square, *gates, torch.randn(WIDTH, INNER) / 4
    return x.to(dtype), *(nn.Parameter(y.to(dtype), requires_grad=False) for y in weights)


def norm(x, weight):
    """As transformers writes it."""
    y = x.to(torch.float32)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * y.to(x.dtype)


def rounded_once(x, weight):
    y = x.float()
    return (weight * (torch.rsqrt(y.pow(2).mean(dim=(-1,), keepdim=True) + EPS) * y)).to(x.dtype)


def as_one_op(x, weight):
    return F.rms_norm(x, (WIDTH,), weight, EPS)


def launched(x):
    """A row that a kernel of the graph computes."""
    return F.embedding(torch.zeros(x.shape[:-1], dtype=torch.int64), x.flatten(0, -2))


def layer(x, g, h, a, b, c, d, gate, up, down, norm=norm):
    """A decoder layer. The query stands in for the result of attention."""
    x = launched(x)
    n = norm(x, g)
    q, k, v = F.linear(n, a), F.linear(n, b), F.linear(n, c)
    x = x + F.linear(torch.sin(q), d)
    n = norm(x, h)[:, slice(-1, None), :]
    return x + F.linear(F.silu(F.linear(n, gate)) * F.linear(n, up), down), k, v


def search(fn: Callable[..., Any], *args: Tensor, **options: Any) -> tuple[GraphModule, list[FusedGroup]]:
    gm = capture(fn, *(args or inputs()), **options)
    moving = movers(gm.graph)
    return gm, find_fused_groups(gm.graph, find_skinny_linears(gm.graph, moving), moving)


def kinds(groups: list[FusedGroup]) -> list[str]:
    """The ops around the layers of each group, and the number of layers."""
    names = ("norm", "gate", "residual")
    return ["+".join([*(x for x in names if getattr(y, x) is not None), str(len(y.layers))]) for y in groups]


def apply(gm: GraphModule, groups: list[FusedGroup]) -> None:
    fused = [x.group for x in groups]
    others = [x for x in find_skinny_linears(gm.graph, movers(gm.graph)) if x not in fused]
    for group in groups:
        apply_fused_group(group)
    for group in others:
        apply_linear_group(group)
    gm.graph.lint()
    gm.recompile()


def check_same(fn: Callable[..., Any], *args: Tensor) -> None:
    """The graph computes the same after the groups are replaced."""
    args = args or inputs()
    gm, groups = search(fn, *args)
    assert groups
    apply(gm, groups)
    named = dict(zip(names_of(fn), args, strict=False))
    assert not [x for x in gm.graph.nodes if x.target is F.linear]
    got = gm(*(named[name_of(x)].clone() for x in gm.graph.find_nodes(op="placeholder")))
    want = fn(*(x.clone() for x in args))
    for a, b in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
        assert (a - b).abs().max() <= 2**-5 * b.abs().max()
        assert (a.stride(), a.dtype) == (b.stride(), b.dtype)


def names_of(fn: Callable[..., Any]) -> tuple[str, ...]:
    return fn.__code__.co_varnames[: fn.__code__.co_argcount]


def arguments_of(fn: Callable[..., Any]) -> list[Tensor]:
    return [x for name, x in zip(names_of(layer), inputs(), strict=False) if name in names_of(fn)]
