"""Triton's interpreter, made faster, and its products independent of the BLAS below it."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest


def make_fast(patch: pytest.MonkeyPatch) -> None:
    """Spare the interpreter work that changes nothing: it takes half of the time."""
    from triton.runtime import interpreter

    _patch_once(patch, interpreter)
    _remember_dtypes(patch, interpreter)
    # An overflow is computed, but reported only with the option `debug`.
    assert not interpreter.interpreter_builder.options.debug
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    patch.setattr(interpreter.interpreter_builder, "options", options)


def _patch_once(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Look once for the functions of Triton's language that are replaced, and replace them once for each launch.

    The interpreter does both at each call of a device function, though the kernel around it has replaced them.
    """
    tl, patch_lang = interpreter.tl, interpreter._patch_lang
    found: dict[Any, list[tuple[str, Any]]] = {}

    def patch_launch(fn: Any) -> Any:
        languages = [x for x in fn.__globals__.values() if x is tl or x is tl.core]
        if any(tl.core.is_builtin(x.load) for x in languages):
            return patch_lang(fn)
        return interpreter._LangPatchScope()

    def patch_builtin(pkg: Any, *rest: Any) -> None:
        if pkg not in found:
            found[pkg] = [(x, member) for x, member in inspect.getmembers(pkg) if tl.core.is_builtin(member)]
        for name, member in found[pkg]:
            if getattr(pkg, name) is member:
                interpreter._patch_attr(pkg, name, member, *rest)

    patch.setattr(interpreter, "_patch_lang", patch_launch)
    patch.setattr(interpreter, "_patch_builtin", patch_builtin)


def _remember_dtypes(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """The interpreter makes a table of all dtypes to look one of them up."""
    get_np_dtype = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def remembered(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = get_np_dtype(dtype)
        return known[dtype.name]

    patch.setattr(interpreter, "_get_np_dtype", remembered)


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
