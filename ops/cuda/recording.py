"""Recording what an op launches, without launching it: for compilers that launch the kernels themselves.

The op's own implementation runs on fake tensors, so what is recorded is what it would do. Everything that it does must
be an allocation, a view or a launch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tatten.ops.watch import Watch

aten = torch.ops.aten
_ALLOCATIONS = {aten.empty.memory_format, aten.new_empty.default, aten.empty_strided.default}
recorder: ContextVar[Recorder | None] = ContextVar("tatten_recorder", default=None)


class NotRecordableError(Exception):
    """An op does something else than to allocate, to view and to launch."""


@dataclass
class Recorder:
    """What an op does with fake tensors.

    Attributes:
        launches: each `tatten.ops.cuda.launcher.Launch` with its tensors, or tuples of them, in order.
        allocated: the tensors that the op made.
        without_tma: bytes of keys and values that the op itself would read by TMA.
    """

    launches: list[tuple[Any, tuple[Any, ...]]] = field(default_factory=list)
    allocated: list[Tensor] = field(default_factory=list)
    without_tma: int = 0
    _bases: dict[int, Tensor] = field(default_factory=dict)
    _alive: list[Tensor] = field(default_factory=list)  # so that no id is used twice

    def base(self, x: Tensor) -> Tensor:
        """The input or allocated tensor of which `x` is a view."""
        return self._bases.get(id(x), x)

    def saw(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Note an operator that was called."""
        if func in _ALLOCATIONS:
            self.allocated.append(out)
        elif _is_view(func) and isinstance(out, Tensor):
            base = self.base(args[0])
            if out.storage_offset() != base.storage_offset():
                raise NotRecordableError(f"a view that begins elsewhere, of {func}")
            self._bases[id(out)] = base
            self._alive.append(out)
        elif isinstance(out, Tensor):
            raise NotRecordableError(f"calls {func}")


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Record launches instead of doing them, for calls with fake tensors.

    Raises:
        NotRecordableError: from within, as soon as an op does what can't be recorded.
    """
    found = Recorder()
    token = recorder.set(found)
    try:
        with Watch(found.saw):
            yield found
    finally:
        recorder.reset(token)


def record(op: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Recorder, Any]:
    """Record `op(*args, **kwargs)`, for an op that returns a tensor or a tuple of them; also returns its result."""
    with recording() as found:
        result = op(*args, **kwargs)
    return found, result
