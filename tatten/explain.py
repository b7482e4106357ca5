"""`tatten.explain`: report what the backend does to a function, without waiting for Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tatten.inner_compiler import uncompiled, without_recompile_limit
from tatten.report import Report, recording


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Run `fn(*args, **kwargs)` once through the backend, with an eager inner compiler, and return the report.

    `fn` really runs: it writes to a cache among its arguments. If it is compiled already, the function that it wraps is
    run. The report includes what `fn` compiles itself, as `generate` does with a `CompileConfig`, unless it is cached.

    Returns:
        A printable report: each SDPA call with its source line, what it became and the bytes of K and V before and
        after, or why it was left unchanged and what would help; and attention that is no SDPA call.
    """

    # A new backend for each call: Dynamo would reuse the graphs of a backend that it has seen, and nothing be reported.
    def backend(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        from tatten.backend import tatten

        return tatten(gm, example_inputs, options={"inner": "eager"})

    with recording() as report, without_recompile_limit():
        torch.compile(uncompiled(fn), backend=backend)(*args, **kwargs)
    return report
