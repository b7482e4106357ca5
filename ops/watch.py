"""A dispatch mode that reports each operator that PyTorch calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tatten.ops.moved import moved

_MODE = "torch.utils._python_dispatch.TorchDispatchMode"
_INSTEAD = "a call of an unknown function counts as a write to all of its arguments"
try:
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError as error:
    moved(_MODE, error, _INSTEAD)
    TorchDispatchMode = object  # type: ignore[assignment, misc]


class Watch(TorchDispatchMode):
    """A context that calls `called(func, args, kwargs, out)` after each call of an operator.

    `func` is the overload of the operator.

    Raises:
        NotImplementedError: PyTorch's modes have moved.
    """

    def __init__(self, called: Callable[[Any, Sequence[Any], Mapping[str, Any], Any], None]) -> None:
        try:
            super().__init__()
            _ = self.__enter__
        except Exception as error:
            raise NotImplementedError(moved(_MODE, error, _INSTEAD)) from error
        self.called = called

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.called(func, args, kwargs, out)
        return out
