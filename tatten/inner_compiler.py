"""The compiler of the rewritten graph. All use of private entry points of Dynamo and Inductor is in this file."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from tatten.lowered import Compiled, compile_lowered, lower_ops
from tatten.options import valid_names
from tatten.passes.mutation import writes

Compiler = Callable[..., Compiled]  # of a graph and its inputs

TENSORRT = ("torch_tensorrt", "tensorrt", "aot_torch_tensorrt_aten")  # the names that torch_tensorrt registers
_used: dict[str, Compiler] = {}


def inductor_compiler(mode: str | None, options: dict[str, Any]) -> Compiler:
    """Inductor as `torch.compile` sets it up, with modes expanded and the names and types of options checked.

    Raises:
        ValueError, TypeError: Inductor has no such mode or option, or it has another type.
    """
    try:
        wrapper: Any = torch._TorchCompileInductorWrapper(mode, options, None)
    except RuntimeError as error:
        if mode is not None and "mode" in str(error).lower() and not options:
            raise ValueError(f"`mode` must be one that torch.compile knows, got {mode!r}: {error}") from error
        unknown = "Unexpected optimization option" in str(error)
        raise (ValueError if unknown else TypeError)(
            f"`options` must be of tatten ({valid_names()}) or of Inductor, which says: {error}"
        ) from error

    def compiler(gm: GraphModule, inputs: list[Tensor]) -> Compiled:
        if lower_ops(inputs):
            return compile_lowered(wrapper, gm, inputs)
        return wrapper(gm, inputs)  # type: ignore[no-any-return]

    return compiler


def named_compiler(name: str, mode: str | None, options: dict[str, Any]) -> Compiler:
    """A backend that Dynamo knows by name, given mode and options as `torch.compile` gives them.

    Raises:
        ValueError: Dynamo knows no such backend, or the backend would ignore or drop the mode or the options.
        ImportError: torch_tensorrt, which registers its backends, can't be imported.
    """
    compiler = _look_up(name)
    given: dict[str, Any] = {"mode": mode} if mode not in (None, "default") else {}
    if options:
        given["options"] = options
    if given and _is_dynamos(compiler):
        wanted = "`mode` and `options` must have none for the inner backend"
        raise ValueError(f"{wanted} {name!r}, which takes none, got {mode!r} and {sorted(options)}")
    _used[name] = compiler
    if name not in TENSORRT:
        return functools.partial(compiler, **given)
    if "mode" in given:
        raise ValueError(f"`mode` must be None or 'default' for the inner backend {name!r}, got {mode!r}")
    return functools.partial(_tensorrt, compiler, options)


def _look_up(name: str) -> Compiler:
    from torch._dynamo.backends.registry import list_backends, lookup_backend
    from torch._dynamo.exc import InvalidBackend

    if name in TENSORRT:
        try:
            importlib.import_module("torch_tensorrt")  # registers its backends
        except ImportError as error:
            raise ImportError(
                f"option `inner` {name!r} needs torch_tensorrt, which can't be imported: {error}"
            ) from error
    known = [other for other in list_backends(None) if other != "tatten"]
    if name in known:
        try:
            return lookup_backend(name)  # type: ignore[no-any-return]
        except InvalidBackend:
            pass
    raise ValueError(f"option `inner` must be one of {known}, got {name!r}")


def _is_dynamos(compiler: Compiler) -> bool:
    """Whether a backend is one of PyTorch's own, of which none but Inductor takes a mode or options."""
    return (getattr(getattr(compiler, "func", compiler), "__module__", None) or "").startswith("torch._dynamo.")


def _tensorrt(compiler: Compiler, options: dict[str, Any], gm: GraphModule, inputs: list[Tensor]) -> Compiled:
    """Call torch_tensorrt, which takes options but no mode.

    Its plain trace copies the inputs, so that writes to them, as to a static cache, are lost. The other trace, named
    after its first use, goes through AOTAutograd, which makes writes outputs.

    Raises:
        ValueError: `options` ask for the plain trace of a graph that writes.
    """
    if any(writes(node) for node in gm.graph.nodes):
        options = {"use_distributed_mode_trace": True, **options}
        trace = options["use_distributed_mode_trace"]
        if not trace:
            raise ValueError(
                "option `use_distributed_mode_trace` must be True or left out for a graph that writes to its inputs, "
                f"as to a static cache, for torch_tensorrt would lose the writes, got {trace!r}"
            )
    return compiler(gm, inputs, **({"options": options} if options else {}))


def inner_compiler(name: str, mode: str | None, options: dict[str, Any]) -> Compiler:
    """The compiler of the rewritten graph; raises the errors of `inductor_compiler` and `named_compiler`."""
    return inductor_compiler(mode, options) if name == "inductor" else named_compiler(name, mode, options)


def reset_inner() -> None:
    """Do what `torch._dynamo.reset()` does for the inner backends that were used.

    For Inductor that is to drop the CUDA graphs that it recorded, as its own wrapper does.
    """
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()
    for compiler in _used.values():
        reset = getattr(compiler, "reset", None)
        if reset is not None:
            reset()
    _used.clear()


def uncompiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function or module that `torch.compile` wrapped; `fn` itself if it is not compiled."""
    return getattr(fn, "_torchdynamo_orig_callable", getattr(fn, "_orig_mod", fn))


def without_recompile_limit() -> AbstractContextManager[None]:
    """A context in which Dynamo never falls back to eager mode because a function has been recompiled too often."""
    limit = 1 << 16
    patched: AbstractContextManager[None] = torch._dynamo.config.patch(
        recompile_limit=limit, accumulated_recompile_limit=limit
    )
    return patched
