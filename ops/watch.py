"""A mode that is told of each operator that PyTorch calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """A context in which `called(func, args, kwargs, out)` follows each call of an operator.

    `func` is its overload.
    """

    def __init__(self, called: Callable[[Any, Sequence[Any], Mapping[str, Any], Any], None]) -> None:
        super().__init__()
        self.called = called

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.called(func, args, kwargs, out)
        return out
