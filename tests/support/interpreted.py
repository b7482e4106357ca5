"""Triton's interpreter, made faster."""

from __future__ import annotations

import inspect
from typing import Any

import pytest


def remember_builtins(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter find the functions of Triton's language once.

    It looks through all members of the language for functions to replace, at each call of a device function, though the
    kernel around it has replaced them: more than a quarter of its time.
    """
    from triton.runtime import interpreter

    found: dict[Any, list[tuple[str, Any]]] = {}

    def patch_builtin(pkg: Any, *rest: Any) -> None:
        if pkg not in found:
            found[pkg] = [
                (x, member) for x, member in inspect.getmembers(pkg) if interpreter.tl.core.is_builtin(member)
            ]
        for name, member in found[pkg]:
            if getattr(pkg, name) is member:
                interpreter._patch_attr(pkg, name, member, *rest)

    patch.setattr(interpreter, "_patch_builtin", patch_builtin)
