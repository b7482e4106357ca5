"""Inductor lowerings of the ops: generated code launches the kernels that an op would launch.

An op's implementation runs once, when a graph is compiled, on fake tensors, and `tatten.ops.cuda.recording` records its
allocations and launches. Allocations become Inductor's buffers, and launches of Triton kernels become kernels in its
code: at run time there is no dispatcher, no plan to look up and no Python code of tatten. Inductor can't define kernels
in Gluon. `tatten.ops.cuda.prepared` launches them, with the plan written into the Python code. If neither is possible,
the generated code calls the op.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextvars import ContextVar
from enum import Enum
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from tatten.ops.cuda.bound_kernel import bind
from tatten.ops.cuda.prepared import prepare
from tatten.ops.cuda.recording import Gluon, NotRecordableError, Recorder, record
from tatten.ops.cuda.tuning import gpu_rates
from tatten.ops.inductor.check import check_interfaces
from tatten.ops.inductor.custom_pass import in_force
from tatten.ops.inductor.ir import (
    Boxes,
    ahead_of_time,
    allocate,
    are_static,
    boxes_of,
    call_in_python,
    check_aligned,
    check_options,
    dropped_options,
    fake_mode,
    fake_of,
    fallback,
    is_cpp,
    is_python,
    launch_kernels,
    realize,
    register,
)
from tatten.ops.library import cuda_implementations
from tatten.ops.moved import moved, text_of

log = logging.getLogger("tatten")


class Opaque(Enum):
    """The reason why a call of an op stays a call."""

    NOT_OURS = "not_ours"  # the graph was not compiled by backend="tatten"
    CPU = "cpu"
    SYMBOLIC = "symbolic"  # a size is not known when the graph is compiled
    TMA = "tma"  # it reads a large KV, which takes longer without TMA, and the code is neither Python nor C++
    NOT_RECORDABLE = "not_recordable"  # it does more than allocate, view and launch kernels that the code can launch
    FAILED = "failed"  # an error: a private interface of PyTorch or Triton has moved, or tatten has a bug


Count = Callable[[str], None]


# True if all ops stay opaque in the graph that is being compiled, because an earlier compilation failed.
opaque: ContextVar[bool] = ContextVar("tatten_opaque", default=False)


def lower(op: Any, implementation: Callable[..., Any], count: Count, *args: Any, **kwargs: Any) -> Any:
    """Lower a call of `op` with Inductor's boxes among its arguments; `implementation` is the op's on CUDA."""
    detail = ""
    try:
        args, kwargs = realize(args, kwargs)
        why = _why_opaque(args, kwargs)
        if why is None:
            lowered = _lower(implementation, args, kwargs)
            count("lowered")
            return lowered
    except _LargeKVError as error:
        why, detail = Opaque.TMA, str(error)
    except NotRecordableError as error:
        why, detail = Opaque.NOT_RECORDABLE, text_of(error.__cause__ or error)
    except Exception as error:  # the op itself may still compute this, or name the reason
        why, detail = Opaque.FAILED, text_of(error)
        failed(error)
    count(f"opaque_{why.value}")
    if why is not Opaque.FAILED:
        level = logging.WARNING if _is_package() else logging.INFO  # the package will need Python and tatten
        log.log(level, "%s stays opaque to Inductor [%s] %s", op, why.value, detail)
    return fallback(op)(*args, **kwargs)


def failed(error: Exception) -> None:
    """Log why ops stay opaque in a graph."""
    moved("torch._inductor", error, "Inductor calls the ops instead of launching their kernels")


def _is_package() -> bool:
    try:
        return ahead_of_time()
    except AttributeError:  # Inductor's interface has moved
        return False


def _why_opaque(args: Any, kwargs: Any) -> Opaque | None:
    if opaque.get():
        return Opaque.FAILED
    if not (in_force() or ahead_of_time()):
        return Opaque.NOT_OURS
    if any(box.get_device().type != "cuda" for box in boxes_of(args, kwargs)):
        return Opaque.CPU
    return None if are_static(args, kwargs) else Opaque.SYMBOLIC


class _LargeKVError(Exception):
    """Raised for keys and values so large that TMA reads them faster."""


def _needs_python(recording: Recorder) -> bool:
    """Return True if a kernel is in Gluon, which Inductor can't define, or reads tiles by TMA descriptors."""
    return recording.tma or any(launch.kernel.is_gluon() for launch, _ in recording.launches)


def _lower(implementation: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    boxes: dict[int, Any] = {}

    def fake(box: Any) -> Tensor:
        tensor = fake_of(box)
        boxes[id(tensor)] = box
        return tensor

    gluon = Gluon.AVOIDED if ahead_of_time() else Gluon.LAUNCHED if is_python() else Gluon.REFUSED
    with fake_mode():
        fake_args, fake_kwargs = tree_map_only(Boxes, fake, (args, kwargs))
        try:
            options: dict[str, Any] = {"gluon": gluon, "registers": True}
            recording, result = record(implementation, *fake_args, **options, **fake_kwargs)
            large = recording.without_tma > gpu_rates(recording.inputs[0].device).most_bytes_without_tma
            if large and is_python() and not ahead_of_time():
                recording, result = record(implementation, *fake_args, **options, tma=True, **fake_kwargs)
            elif not _needs_python(recording) and any(dropped_options(launch) for launch, _ in recording.launches):
                options["registers"] = False
                recording, result = record(implementation, *fake_args, **options, **fake_kwargs)
        except (ValueError, NotImplementedError) as error:  # calling the op raises it again
            raise NotRecordableError("it raises") from error
    if large and not (recording.tma or is_cpp()):
        raise _LargeKVError(f"{recording.without_tma / 1e6:.0f} MB")
    tensors, add = (_python_call if _needs_python(recording) else _bound_launches)(recording, boxes)
    results = tree_map_only(Tensor, recording.exact_base, result)
    for tensor in recording.allocated:
        boxes[id(tensor)] = allocate(tensor)
    used = {id(x) for x in tensors}
    add([boxes[id(x)] for x in recording.allocated if id(x) in used])
    return tree_map_only(Tensor, lambda base: boxes[id(base)], results)


Added = tuple[list[Tensor], Callable[[list[Any]], None]]


def _python_call(recording: Recorder, boxes: dict[int, Any]) -> Added:
    """Return the tensors of a call from Python, and a function from the boxes to write that adds it to the graph."""
    call, tensors = prepare(recording)
    check_aligned([boxes[id(x)] for x in tensors if id(x) in boxes])
    return tensors, lambda writes: call_in_python(call, [boxes[id(x)] for x in tensors], writes)


def _bound_launches(recording: Recorder, boxes: dict[int, Any]) -> Added:
    """Like `_python_call`, for launches by Inductor."""
    launches = [bind(recording, launch, tensors) for launch, tensors in recording.launches]
    for launch in launches:
        check_options(launch)

    def add(writes: list[Any]) -> None:
        by_name = [{name: boxes[id(x)] for name, x in launch.tensors.items()} for launch in launches]
        launch_kernels([*zip(launches, by_name, strict=True)], writes)

    return [x for launch in launches for x in launch.tensors.values()], add


def register_lowerings(count: Count) -> None:
    """Lower tatten's ops in graphs of AOTInductor, and of Inductor with the options of `custom_pass.with_lowerings`.

    Args:
        count: called with "lowered" or "opaque_*", named after `Opaque`, for each call of an op.

    Raises:
        AttributeError, TypeError: a private interface of Inductor's has moved.
    """
    check_interfaces()
    for op, implementation in cuda_implementations().items():
        register(op, functools.partial(lower, op, implementation, count))
