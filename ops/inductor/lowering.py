"""Inductor lowerings of the ops: its generated code launches the Triton kernels that an op would launch.

An op's implementation runs once, when a graph is compiled, on fake tensors; `tatten.ops.cuda.recording` takes down what
it allocates and launches. Allocations become buffers of Inductor's, and launches kernels in its code: at run time there
is no dispatcher, no plan to look up and no Python of ours. Where that can't be done the op is called as before.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from tatten.ops.cuda.bound_kernel import bind
from tatten.ops.cuda.recording import NotRecordableError, record
from tatten.ops.inductor.ir import (
    Boxes,
    allocate,
    fake_mode,
    fake_of,
    fallback,
    is_static,
    launch_kernels,
    needs_no_python,
    realize,
    register,
    values_of,
)
from tatten.ops.inductor.version import in_force
from tatten.ops.library import cuda_implementations

log = logging.getLogger("tatten")

# Keys and values that are read by TMA where the op is called: 64 x 2048 tokens took 139 us without it and 125 with it,
# 16 x 8192 tokens 127.0 and 126.2, smaller ones no longer (H200). From here on the GPU keeps the host waiting anyway.
MOST_BYTES_WITHOUT_TMA = 500e6


def lower(op: Any, implementation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Lower a call of `op`, whose implementation on CUDA is given, with Inductor's boxes among its arguments."""
    args, kwargs = realize(args, kwargs)
    reason = _why_opaque(values_of(args, kwargs))
    if reason is None:
        try:
            return _lower(implementation, args, kwargs)
        except NotRecordableError as error:
            reason = f"it {error}"
    log.info("%s stays opaque to Inductor: %s", op, reason)
    return fallback(op)(*args, **kwargs)


def _why_opaque(values: Sequence[Any]) -> str | None:
    if not in_force():
        return "the graph was not compiled by backend='tatten'"
    if any(x.get_device().type != "cuda" for x in values if isinstance(x, Boxes)):
        return "it runs on a CPU"
    if not all(is_static(x) for x in values):
        return "a size is not known when the graph is compiled"
    return None


def _lower(implementation: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    boxes: dict[int, Any] = {}

    def fake(box: Any) -> Tensor:
        tensor = fake_of(box)
        boxes[id(tensor)] = box
        return tensor

    with fake_mode():
        fake_args, fake_kwargs = tree_map_only(Boxes, fake, (args, kwargs))
        found, result = record(implementation, *fake_args, **fake_kwargs)
    if found.without_tma > MOST_BYTES_WITHOUT_TMA and not needs_no_python():
        raise NotRecordableError(f"reads {found.without_tma / 1e6:.0f} MB of keys and values by TMA")
    launches = [bind(found, launch, tensors) for launch, tensors in found.launches]
    results = tree_map_only(Tensor, found.base, result)
    for tensor in found.allocated:
        boxes[id(tensor)] = allocate(tensor)
    used = {id(x) for launch in launches for x in launch.tensors.values()}
    launch_kernels(
        [(launch, {name: boxes[id(x)] for name, x in launch.tensors.items()}) for launch in launches],
        [boxes[id(x)] for x in found.allocated if id(x) in used],
    )
    return tree_map_only(Tensor, lambda base: boxes[id(base)], results)


def register_lowerings() -> None:
    """Lower tatten's ops in graphs that are compiled with `tatten.ops.inductor.version.with_lowerings`."""
    for op, implementation in cuda_implementations().items():
        register(op, functools.partial(lower, op, implementation))
