"""`tatten.explain`: report what the backend does to a function, without waiting for Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tatten.inner_compiler import uncompiled, without_recompile_limit
from tatten.passes import rewrite
from tatten.report import Report, publish, recording


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Run `fn(*args, **kwargs)` once through the passes of the backend, in eager mode, and return the report.

    `fn` really runs: it writes to a cache among its arguments. If `fn` is compiled, the function that it wraps runs.
    The report includes graphs that `fn` itself compiles, as `generate` does with a `CompileConfig`, unless they are
    cached.

    Raises:
        TypeError: `fn` is not callable.

    Returns:
        A printable report of each SDPA call and of attention that is not an SDPA call, with its source line. For a
        rewritten call it shows the new op and the bytes of K and V before and after. For one that was left unchanged it
        shows the reason and what would help.

    Examples:
        >>> import torch, tatten
        >>> import torch.nn.functional as F
        >>> def attend(query, key, value, mask):
        ...     return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
        >>> query, (key, value) = torch.randn(1, 8, 1, 64), torch.randn(2, 1, 2, 16384, 64)
        >>> report = tatten.explain(attend, query, key, value, torch.arange(16384)[None] < 100)
        >>> print(report)
        graph 0: 1 of 1 attention calls rewritten in ... ms
          call: tatten.decode_attention.default
              line  ...:2  return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
              with  q float32[1, 8, 1, 64] k float32[1, 2, 16384, 64] v float32[1, 2, 16384, 64] mask bool[1, 16384]
              KV    64 MiB moved per step before, at most 16 MiB read now
        total: 1 of 1 attention calls rewritten in 1 graph
    """
    if not callable(fn):
        raise TypeError(f"`fn` must be callable, got {type(fn).__name__}")

    # A new function for each call: Dynamo reuses the graphs of a backend that it knows, without a report.
    def backend(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        publish(rewrite(gm, fuses=True))  # as for Inductor, but nothing is compiled
        return gm.forward

    with recording() as report, without_recompile_limit():
        torch.compile(uncompiled(fn), backend=backend)(*args, **kwargs)
    return report
