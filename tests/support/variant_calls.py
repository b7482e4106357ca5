"""Calls with a soft cap and sinks in graphs of SDPA, which has neither: for the passes that hand them on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.fx import GraphModule, Node

from tatten.passes import Declined, Rewritten, attention
from tatten.passes.rewrite import rewrite
from tatten.passes.sdpa import SdpaCall, bind_sdpa

Found = list[tuple[str, str]]  # op and note, or reason and detail


def compiled(fn: Callable[..., Any], *args: Any, softcap: float | None = None) -> Any:
    """Compile and run `fn` as if its calls had these, and as sinks its argument of that name, if it has one.

    Returns the result and what was found.
    """
    found: Found = []

    def bind(node: Node) -> SdpaCall:
        sinks = next((x for x in node.graph.nodes if x.op == "placeholder" and "sinks" in x.name), None)
        return dataclasses.replace(bind_sdpa(node), softcap=softcap, sinks=sinks)

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        with mock.patch.object(attention, "bind_sdpa", bind):
            for x in rewrite(gm).findings:
                if isinstance(x, Rewritten):
                    found.append((x.op.split(".")[1], x.note))
                else:
                    assert isinstance(x, Declined)
                    found.append((x.decline.reason.value, x.decline.detail))
        gm.graph.lint()
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(fn, backend=backend, fullgraph=True)(*args), found
