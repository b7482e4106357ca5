"""`tatten.explain`: what the backend would do to a function, without waiting for Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tatten.report import Report, recording


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Run `fn(*args, **kwargs)` once through the backend, with an eager inner compiler, and return the report.

    `fn` really runs: a cache among the arguments is written to. If it was compiled already, what it wraps is used; what
    it compiles itself on the way (such as `generate` with a `CompileConfig`) is in the report too, unless it is warm.

    Returns:
        A report that prints well: each SDPA call with the user's line, what it became and the bytes of K and V before
        and after, or why it was left and what would help; so, too, attention that is no SDPA call.
    """
    fn = getattr(fn, "_torchdynamo_orig_callable", getattr(fn, "_orig_mod", fn))

    # A backend of its own for each call: Dynamo reuses graphs of a backend that it has seen, and they would not report.
    def backend(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        from tatten.backend import tatten

        return tatten(gm, example_inputs, options={"inner": "eager"})

    with (
        recording() as report,
        torch._dynamo.config.patch(recompile_limit=1 << 16, accumulated_recompile_limit=1 << 16),
    ):
        torch.compile(fn, backend=backend)(*args, **kwargs)
    return report
