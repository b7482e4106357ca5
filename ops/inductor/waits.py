"""Let each kernel of Inductor wait until the kernel before it has ended, before it reads or writes anything.

With `triton.enable_pdl`, Inductor (PyTorch 2.11 to 2.15) lets a kernel wait only if it uses what the kernel before it
has written. It misses tensors that were written in place, so that the kernel may read them too early. A kernel that
reads nothing doesn't wait at all, and ends before an earlier one whose results the next kernel then reads.
"""

from __future__ import annotations

from typing import Any

from tatten.ops.inductor.options import option

OPTION = "_post_fusion_custom_pass"


class WaitFirst:
    """A pass over Inductor's schedule that lets kernels wait first. The user's own pass runs before it."""

    def __init__(self, before: Any = None) -> None:
        self.before = before

    def __call__(self, nodes: list[Any]) -> list[Any]:
        nodes = nodes if self.before is None else self.before(nodes)
        if nodes:
            _wait_first(nodes[0].scheduler)
        return nodes


def _wait_first(scheduler: Any) -> None:
    """Hide the kernel before each kernel: Inductor waits if it does not know it, as after kernels of others."""
    if "previous_node" not in vars(scheduler):
        raise AttributeError("torch._inductor.scheduler.Scheduler has no attribute `previous_node`")
    kind = type(scheduler)
    hidden = property(lambda self: None, lambda self, node: None)
    scheduler.__class__ = type(kind.__name__, (kind,), {"previous_node": hidden})


def with_waits(options: dict[str, Any]) -> dict[str, Any]:
    """Return Inductor's options with the pass added if kernels are launched early."""
    before = option(OPTION, options)
    if not option("triton.enable_pdl", options) or isinstance(before, WaitFirst):
        return options
    return {**options, OPTION: WaitFirst(before)}
