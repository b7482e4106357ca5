"""The backend of `torch.compile(model, backend="tatten")`: rewrite the Dynamo graph, report, and pass it on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from tatten.inner_compiler import Compiled, inductor_compiler, plain_compiler, reset_cudagraphs
from tatten.options import split_options
from tatten.passes import rewrite
from tatten.report import publish


def tatten(
    gm: GraphModule,
    example_inputs: list[Tensor],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """Compile a graph: Dynamo finds this function by name, through `tatten.entry_point`.

    Args:
        gm: a graph from Dynamo, which is rewritten in place.
        example_inputs: fake or real inputs of the graph.
        mode: a mode of `torch.compile`, passed on to Inductor.
        options: options of tatten (`tatten.options.Options`) and of Inductor, together.

    Raises:
        ValueError, TypeError: neither tatten nor Inductor has such a mode or option, or it has another type.
    """
    own, rest = split_options(options)
    if own.inner == "inductor":
        compiler = inductor_compiler(mode, rest)
    elif rest:
        raise ValueError(
            f"`options` must have none for Inductor if option `inner` is {own.inner!r}, got {sorted(rest)}"
        )
    else:
        compiler = plain_compiler(own.inner)
    publish(rewrite(gm, own.max_q_len))
    return compiler(gm, example_inputs)


tatten.reset = reset_cudagraphs  # type: ignore[attr-defined]
