"""Private APIs that break for one module of tatten alone: the name is missing, the signature has changed, it raises."""

from __future__ import annotations

import builtins
import importlib
from typing import Any

import pytest

WAYS = ("missing", "signature", "raises")


class Broken:
    """Like `real`, but its attribute `path`, a dotted name, is broken."""

    def __init__(self, real: Any, path: str, way: str) -> None:
        self._real, self._path, self._way = real, path.split("."), way

    def __getattr__(self, name: str) -> Any:
        first, *rest = self._path
        if name != first:
            return getattr(self._real, name)
        if rest:
            return Broken(getattr(self._real, name), ".".join(rest), self._way)
        return broken(name, self._way)


def broken(name: str, way: str) -> Any:
    """The value of a broken attribute; raises AttributeError where it is missing."""
    if way == "missing":
        raise AttributeError(f"no {name!r}, on purpose")

    def changed() -> None:
        """Takes no arguments, has no attributes and no items."""

    def raising(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("on purpose")

    return changed if way == "signature" else raising


def break_global(monkeypatch: pytest.MonkeyPatch, module: str, name: str, path: str, way: str) -> None:
    """Break what a module reaches through its global `name`, such as "torch"."""
    holder = importlib.import_module(module)
    monkeypatch.setattr(holder, name, Broken(getattr(holder, name), path, way))


def break_import(monkeypatch: pytest.MonkeyPatch, module: str, imported: str, path: str, way: str) -> None:
    """Break what a function of a module imports by `from imported import ...`."""
    real = builtins.__import__

    def importing(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        found = real(name, globals, locals, fromlist, level)
        ours = name == imported and globals is not None and globals["__name__"] == module
        return Broken(found, path, way) if ours else found

    monkeypatch.setattr(builtins, "__import__", importing)
