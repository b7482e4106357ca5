"""Random data of one of `shared_prefix.py`'s shapes, and what computes its attention."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import tatten
from support.command_line import first_line
from support.errors import relative_error
from support.prefix_cases import Row
from support.prefix_compositions import aten_flash, cascade, compiled, fa3_cudnn, flash_cudnn, paged
from support.timing import as_graph

MAX_EXPANDED = 60e9  # bytes of KV


def attention(q: Tensor, prefix_k: Tensor, prefix_v: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run SDPA as a shared-prefix cache calls it."""
    keys = torch.cat([prefix_k.expand(q.shape[0], -1, -1, -1), k], dim=2)
    values = torch.cat([prefix_v.expand(q.shape[0], -1, -1, -1), v], dim=2)
    return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)


GRAPHS = {
    "inductor": (attention, "inductor"),
    "tatten": (attention, "tatten"),
    "aten": (aten_flash, "inductor"),
    "flash": (flash_cudnn, "inductor"),
}
PLANNED = {"fa3": fa3_cudnn, "paged": paged, "cascade": cascade}


class Problem:
    """Random data of a row, and the candidates that compute its attention."""

    def __init__(self, row: Row, device: str) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()  # compiled for this row alone
        self.row, self.device, self.finding = row, device, None

        def randn(batch: int, heads: int, length: int) -> Tensor:
            return torch.randn(batch, heads, length, row.head_dim, device=device, dtype=getattr(torch, row.dtype))

        self.q = randn(row.batch, row.q_heads, 1)
        self.prefix = randn(1, row.kv_heads, row.prefix), randn(1, row.kv_heads, row.prefix)
        self.suffix = randn(row.batch, row.kv_heads, row.suffix), randn(row.batch, row.kv_heads, row.suffix)
        self.args = self.q, *self.prefix, *self.suffix

    def candidate(self, name: str) -> Callable[[], Tensor] | None:
        """Return a function without arguments; None if it is unavailable, or would need a KV too large to expand."""
        row, args = self.row, self.args
        expanded_bytes = 2 * self.suffix[0].nbytes // row.suffix * (row.prefix + row.suffix)
        if name in ("expanded", "inductor") and self.device == "cuda" and expanded_bytes > MAX_EXPANDED:
            return None
        if name == "expanded":
            kv = zip(self.prefix, self.suffix, strict=True)
            keys, values = (torch.cat([p.expand(row.batch, -1, -1, -1), s], 2) for p, s in kv)
            attend = functools.partial(F.scaled_dot_product_attention, enable_gqa=True)
            sdpa = compiled(attend, "inductor") if self.device == "cpu" else attend  # in a CUDA graph they are the same
            return lambda: sdpa(self.q, keys, values)
        if name in ("op", "invariant"):
            keys, values = zip(self.prefix, self.suffix, strict=True)
            return lambda: tatten.bifurcated_attention(self.q, keys, values, batch_invariant=name == "invariant")
        if name in PLANNED:
            return PLANNED[name](row, *args)
        fn, backend = GRAPHS[name]
        graph = compiled(fn, backend)
        with tatten.recording() as report:
            graph(*args)
        if name == "tatten":
            (self.finding,) = report.rewritten or report.declined
        return lambda: graph(*args)

    def error(self, out: Tensor) -> float:
        """Return the larger relative error of the first and the last sequence; NaN if any number of `out` is."""
        if out.isnan().any():
            return math.nan
        errors = []
        for b in {0, self.row.batch - 1}:
            kv = zip(self.prefix, self.suffix, strict=True)
            keys, values = (torch.cat([p[0], s[b]], 1).float() for p, s in kv)
            q = self.q[b].float().view(self.row.kv_heads, -1, self.row.head_dim)
            exact = (q @ keys.transpose(1, 2) * self.row.head_dim**-0.5).softmax(-1) @ values
            errors.append(relative_error(out[b].float().view_as(exact), exact))
        return max(errors)


def prepare(problem: Problem, name: str) -> Callable[[], Tensor] | None:
    """Return the step to time, or None. Print errors of a peer; raise our own."""
    try:
        step = problem.candidate(name)
        if step is not None and problem.device == "cuda":
            for _ in range(3):
                step()
            step = as_graph(step)
            step().fill_(math.nan)
        return step
    except Exception as e:
        if name in ("tatten", "op", "invariant"):
            raise
        print(f"{name} is left out: {first_line(e)}")
        return None
