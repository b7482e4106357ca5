"""The backend of `torch.compile(model, backend="tatten")`: rewrite the Dynamo graph, report, and pass it on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from tatten.inner_compiler import Compiled, inner_compiler, reset_inner
from tatten.ops.inductor.options import option
from tatten.options import decode_options, split_options
from tatten.passes import rewrite
from tatten.passes.calls import calls_ops
from tatten.passes.large_results import has_large_results
from tatten.passes.one_row_products import has_one_row_products
from tatten.report import publish
from tatten.saved import save_with_ops


def tatten(
    gm: GraphModule, example_inputs: list[Tensor], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Compiled:
    """Compile a graph that Dynamo captured. Dynamo finds this function by name, through `tatten.entry_point`.

    Args:
        gm: a graph from Dynamo, which is rewritten in place.
        example_inputs: fake or real inputs of the graph.
        mode: a mode of `torch.compile`, passed on to the inner backend.
        options: options of tatten (`tatten.options.Options`) and of the inner backend, together.

    Raises:
        ValueError: the inner backend, the mode or an option is unknown, or an option has a value that is not allowed.
        TypeError: an option has the wrong type.
        ImportError: the inner backend needs a package that is not installed.
    """
    tatten_options, inner_options = split_options(options)
    compiler = inner_compiler(tatten_options.inner, mode, inner_options)
    report = rewrite(
        gm,
        tatten_options.max_q_len,
        fuses=tatten_options.inner == "inductor",
        batch_invariant=tatten_options.batch_invariant,
        linears=tatten_options.decode and not option("max_autotune", inner_options),  # the user's choice of kernels
        counters=tatten_options.decode,
    )
    needs_ops = calls_ops(gm)  # before compilation, which may change the graph
    if tatten_options.decode and needs_ops:
        device = next((x.device for x in example_inputs if isinstance(x, Tensor) and x.is_cuda), torch.device("cpu"))
        tuning = {"coordinate_descent_tuning": has_one_row_products(gm), **inner_options}
        tunes = option("coordinate_descent_tuning", tuning)
        # Combined kernels were measured without tuning, which may choose blocks that `has_large_results` rules out.
        step_options = decode_options(device, tunes=tunes, combines=not (tunes or has_large_results(gm)))
        compiler = inner_compiler("inductor", mode, {**step_options, **inner_options})
    compiled = compiler(gm, example_inputs)  # raises if Dynamo has to trace again
    if needs_ops:
        save_with_ops(compiled)
    publish(report)
    return compiled


tatten.reset = reset_inner  # type: ignore[attr-defined]
