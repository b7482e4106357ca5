"""Record the launches of an op without launching, for compilers that launch the kernels themselves.

The op's own implementation runs on fake tensors, so the record shows its real launches. It may only allocate, make
views and launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from tatten.ops.storage import all_of, same_storage
from tatten.ops.watch import Watch

aten = torch.ops.aten
_ALLOCATIONS = {aten.empty.memory_format, aten.new_empty.default, aten.empty_strided.default}
_HARMLESS = {torch.ops.prim.device.default}
recorder: ContextVar[Recorder | None] = ContextVar("tatten_recorder", default=None)


class NotRecordableError(Exception):
    """A call of an op can't become launches by generated code."""


class Gluon(Enum):
    """The treatment of kernels in Gluon, which Inductor can't define."""

    LAUNCHED = "launched"  # by generated Python code
    REFUSED = "refused"  # generated code in another language calls the op instead
    AVOIDED = "avoided"  # the op can't be called either, as in a package: it uses Triton kernels only


@dataclass
class Recorder:
    """A record of an op's launches and allocations, from a call with tensors that have no data.

    Attributes:
        inputs: the tensors that the op was called with, each with a storage of its own.
        launches: each `tatten.ops.cuda.launcher.Launch` with its tensors, or tuples of them, in order.
        allocated: the tensors that the op made.
        without_tma: bytes of keys and values that the op itself would read by TMA.
        tma: True if the recorded launches may use TMA.
        registers: True if the recorded launches may limit the registers of a thread.
        gluon: the treatment of kernels in Gluon.
    """

    inputs: list[Tensor]
    launches: list[tuple[Any, tuple[Any, ...]]] = field(default_factory=list)
    allocated: list[Tensor] = field(default_factory=list)
    without_tma: int = 0
    tma: bool = False
    registers: bool = False
    gluon: Gluon = Gluon.REFUSED

    def base(self, x: Tensor) -> Tensor:
        """Return the input or allocated tensor that `x` is, or is a view of from the first element on.

        Raises:
            NotRecordableError: there is none.
        """
        for base in (*self.inputs, *self.allocated):
            if same_storage(base, x):
                if base.storage_offset() != x.storage_offset():
                    raise NotRecordableError(f"takes a view that begins elsewhere, {tuple(x.shape)}")
                return base
        raise NotRecordableError(f"takes a tensor of unknown origin, {tuple(x.shape)}")

    def exact_base(self, x: Tensor) -> Tensor:
        """Return the input or allocated tensor that `x` is.

        Raises:
            NotRecordableError: there is none, or `x` is a view of it with another layout.
        """
        base = self.base(x)
        if (x.shape, x.stride(), x.dtype) != (base.shape, base.stride(), base.dtype):
            raise NotRecordableError(f"returns a view, {tuple(x.shape)} of {tuple(base.shape)}")
        return base

    def note_operator(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Note an operator that was called."""
        if func in _ALLOCATIONS:
            self.allocated.append(out)
        elif func not in _HARMLESS and not _is_view(func):
            raise NotRecordableError(f"calls {func}")


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def may_take_gluon(kernel: str) -> bool:
    """Return True if a kernel in Gluon may be chosen.

    Raises:
        NotRecordableError: the op is to be called instead.
    """
    recording = recorder.get()
    if recording is not None and recording.gluon is Gluon.REFUSED:
        raise NotRecordableError(f"launches the {kernel} kernel, which is in Gluon")
    return recording is None or recording.gluon is Gluon.LAUNCHED


def may_limit_registers() -> bool:
    """Return True if tiles may limit the registers of a thread. Kernels in Gluon need a limit in any case."""
    recording = recorder.get()
    return recording is None or recording.registers


def record(
    op: Callable[..., Any],
    *args: Any,
    gluon: Gluon = Gluon.REFUSED,
    tma: bool = False,
    registers: bool = False,
    **kwargs: Any,
) -> tuple[Recorder, Any]:
    """Record `op(*args, **kwargs)` without launching anything, and return the record and the result.

    Raises:
        NotRecordableError: the op does something other than allocate, view and launch.
    """
    recording = Recorder([*all_of(Tensor, [args, [*kwargs.values()]])], gluon=gluon, tma=tma, registers=registers)
    token = recorder.set(recording)
    try:
        with Watch(recording.note_operator):
            result = op(*args, **kwargs)
    finally:
        recorder.reset(token)
    return recording, result
