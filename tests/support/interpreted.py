"""Triton's interpreter, made faster, and its products independent of the BLAS below it."""

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


def multiply_in_float64(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter multiply matrices in float64 and round the result.

    It calls NumPy, whose BLAS sums in another order for another number of rows on some processors (AMD EPYC): so a
    sequence would have other bits in another batch, which no GPU does.
    """
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        product = a.data.astype(np.float64) @ b.data.astype(np.float64) + d.data
        return TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)

    patch.setattr(InterpreterBuilder, "create_dot", create_dot)
