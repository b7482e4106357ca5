"""What makes Inductor's caches depend on the ops: code that was generated for other kernels is never run."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

OPTION = "post_grad_custom_post_pass"


@functools.cache
def source_hash(folder: Path = Path(__file__).parents[1]) -> str:
    """A hash of all Python source in a folder, by default of all ops."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()


class LaunchesKernels(CustomGraphPass):  # type: ignore[misc]
    """Runs the pass that was there before, if any. Its presence lets ops be lowered, and its id is in cache keys."""

    def __init__(self, before: Any = None) -> None:
        self.before = before

    def __call__(self, graph: Graph) -> None:
        if self.before is not None:
            self.before(graph)

    def uuid(self) -> Any:
        if self.before is None:
            return source_hash()
        before = self.before.uuid() if isinstance(self.before, CustomGraphPass) else None
        return None if before is None else (source_hash(), before)  # None: Inductor caches nothing


def in_force() -> bool:
    """Whether the graph that Inductor compiles now is one whose ops are to be lowered."""
    return isinstance(getattr(config, OPTION), LaunchesKernels)


def with_lowerings(options: dict[str, Any]) -> dict[str, Any]:
    """Inductor's options with which ops are lowered; a pass of the user's stays."""
    before = options.get(OPTION, getattr(config, OPTION))
    return {**options, OPTION: before if isinstance(before, LaunchesKernels) else LaunchesKernels(before)}
