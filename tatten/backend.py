"""`torch.compile(model, backend="tatten")`: rewrite the Dynamo graph, report, and hand it on."""

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
    """The backend, found by name through `tatten.entry_point`.

    Args:
        gm: a graph from Dynamo; rewritten in place.
        example_inputs: fake or real inputs of the graph.
        mode: one of `torch.compile`'s modes; for Inductor.
        options: tatten's own (`tatten.options.Options`) and Inductor's, together.

    Raises:
        ValueError, TypeError: neither tatten nor Inductor takes a mode or option; the message lists the valid ones.
    """
    own, rest = split_options(options)
    if own.inner == "inductor":
        compiler = inductor_compiler(mode, rest)
    elif rest:
        raise ValueError(f"`options` {sorted(rest)} are for Inductor, but option `inner` is {own.inner!r}")
    else:
        compiler = plain_compiler(own.inner)
    publish(rewrite(gm, own.max_q_len))
    return compiler(gm, example_inputs)


tatten.reset = reset_cudagraphs  # type: ignore[attr-defined]
