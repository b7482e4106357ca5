"""Compiled graphs in files: loading a graph that calls ops of tatten imports tatten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any


@dataclass(frozen=True)
class _Saved:
    """A wrapper of an object to pickle. Unpickling it imports this module, and with it the ops, first."""

    content: Any

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _content, (self.content,)


def _content(content: Any) -> Any:
    return content


def save_with_ops(compiled: Callable[..., Any]) -> None:
    """Let a process that hasn't imported tatten load a compiled graph that `aot_compile` saved.

    The functions that Inductor and "aot_eager" return have an attribute `serialize`, which makes the object that
    `save_compiled_function` pickles. PyTorch raises an error for a function without it.
    """
    serialize = getattr(compiled, "serialize", None) if isinstance(compiled, FunctionType) else None
    if callable(serialize):
        compiled.serialize = lambda: _Saved(serialize())  # type: ignore[attr-defined]
