"""A backend that rewrites graphs as those for Inductor are rewritten, and runs them as they are then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from tatten.passes import rewrite
from tatten.report import publish


def as_for_inductor(gm: GraphModule, _: list[Tensor]) -> Callable[..., Any]:
    """Every pass takes part, which `options={"inner": "eager"}` would not have, and nothing is compiled for seconds."""
    publish(rewrite(gm, fuses=True))
    return gm.forward
