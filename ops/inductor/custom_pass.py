"""A pass that makes Inductor's cache keys depend on the ops, so that code for other kernels is never run."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from tatten.ops.inductor.options import option
from tatten.ops.inductor.waits import with_waits

OPTION = "post_grad_custom_post_pass"
# From PyTorch 2.13 on, a pass may learn whether the graph is for inference, and there may be several passes.
_Pass: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)


@functools.cache
def source_hash(folder: Path = Path(__file__).parents[1]) -> str:
    """Return a hash of all Python source in a folder; default: of all ops."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


class LaunchesKernels(_Pass):  # type: ignore[misc, valid-type]
    """A pass that runs the earlier passes. Its presence enables the lowerings, and its id is in cache keys."""

    def __init__(self, before: Any = None) -> None:
        self.before = [] if before is None else before if isinstance(before, (list, tuple)) else [before]

    def __call__(self, graph: Graph, **arguments: Any) -> None:
        for run in self.before:
            run(graph, **(arguments if isinstance(run, _Pass) else {}))

    def uuid(self) -> Any:
        before = [x.uuid() if isinstance(x, CustomGraphPass) else None for x in self.before]
        return None if None in before else (source_hash(), *before)  # None: Inductor caches nothing


def in_force() -> bool:
    """Return True if the ops of the graph that Inductor is compiling are to be lowered."""
    return isinstance(option(OPTION), LaunchesKernels)


def with_lowerings(options: dict[str, Any]) -> dict[str, Any]:
    """Return Inductor's options with the lowerings enabled, and with waits; passes of the user are kept."""
    before = option(OPTION, options)
    lowering = before if isinstance(before, LaunchesKernels) else LaunchesKernels(before)
    return {**with_waits(options), OPTION: lowering}
