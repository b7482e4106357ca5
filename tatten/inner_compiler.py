"""The compiler of the rewritten graph. All use of private entry points of Dynamo and Inductor is in this file."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from tatten.lowered import Compiled, compile_lowered, lower_ops
from tatten.ops.moved import moved
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
        wrapper = _inductor(mode, options)
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


def _inductor(mode: str | None, options: dict[str, Any]) -> Any:
    """Inductor as `torch.compile` sets it up; raises RuntimeError for a mode or options that it doesn't take."""
    try:
        wrapper: Any = torch._TorchCompileInductorWrapper(mode, options, None)
        inspect.signature(wrapper).bind("a graph", "its inputs")
        _ = wrapper.config
        return wrapper
    except Exception as error:
        if isinstance(error, RuntimeError) and _takes_nothing():
            raise
        moved("torch._TorchCompileInductorWrapper", error, "the types of Inductor's options are not checked")
        return _PublicInductor(mode, options)


def _takes_nothing() -> bool:
    """Tell whether PyTorch's wrapper of Inductor works without mode and options, so that an error is about those."""
    try:
        torch._TorchCompileInductorWrapper(None, {}, None)
    except Exception:
        return False
    return True


class _PublicInductor:
    """Inductor by the functions that its documentation names, in place of PyTorch's own wrapper."""

    def __init__(self, mode: str | None, options: dict[str, Any]) -> None:
        from torch._inductor import list_mode_options, list_options

        unknown = options.keys() - {*list_options()}
        if unknown:
            raise RuntimeError(f"Unexpected optimization option {sorted(unknown)}")
        self.config = {**(list_mode_options(mode) if mode not in (None, "default") else {}), **options}

    def __call__(self, gm: GraphModule, inputs: list[Tensor]) -> Compiled:
        from torch._inductor import compile

        return compile(gm, [*inputs], self.config)  # type: ignore[no-any-return]


def named_compiler(name: str, mode: str | None, options: dict[str, Any]) -> Compiler:
    """A backend that Dynamo knows by name, given mode and options as `torch.compile` gives them.

    Raises:
        ValueError: Dynamo knows no such backend, or the backend would ignore or drop the mode or the options.
        ImportError: torch_tensorrt, which registers its backends, can't be imported.
        NotImplementedError: Dynamo's table of backends has moved.
    """
    compiler = _look_up(name)
    arguments: dict[str, Any] = {"mode": mode} if mode not in (None, "default") else {}
    if options:
        arguments["options"] = options
    if arguments and _is_dynamos(compiler):
        wanted = "`mode` and `options` must have none for the inner backend"
        raise ValueError(f"{wanted} {name!r}, which takes none, got {mode!r} and {sorted(options)}")
    _used[name] = compiler
    if name not in TENSORRT:
        return functools.partial(compiler, **arguments)
    if "mode" in arguments:
        raise ValueError(f"`mode` must be None or 'default' for the inner backend {name!r}, got {mode!r}")
    return functools.partial(_tensorrt, compiler, options)


def _look_up(name: str) -> Compiler:
    if name in TENSORRT:
        try:
            importlib.import_module("torch_tensorrt")  # registers its backends
        except ImportError as error:
            raise ImportError(
                f"option `inner` {name!r} needs torch_tensorrt, which can't be imported: {error}"
            ) from error
    try:
        from torch._dynamo.backends.registry import list_backends, lookup_backend
        from torch._dynamo.exc import InvalidBackend

        known = [other for other in list_backends(None) if other != "tatten"]
        if name in known:
            with contextlib.suppress(InvalidBackend):
                return lookup_backend(name)  # type: ignore[no-any-return]
    except Exception as error:
        note = moved("torch._dynamo.backends.registry", error, "Inductor is the only inner backend")
        raise NotImplementedError(f"option `inner` must be 'inductor', got {name!r}: {note}") from error
    raise ValueError(f"option `inner` must be one of {known}, got {name!r}")


def _is_dynamos(compiler: Compiler) -> bool:
    """Return True if a backend is one of PyTorch's own. None of them but Inductor takes a mode or options."""
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
        try:
            trees.reset_cudagraph_trees()
        except Exception as error:
            moved("torch._inductor.cudagraph_trees.reset_cudagraph_trees", error, "a reset keeps CUDA graphs")
    for compiler in _used.values():
        reset = getattr(compiler, "reset", None)
        if reset is not None:
            reset()
    _used.clear()


def uncompiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function or module that `torch.compile` wrapped; `fn` itself if it is not compiled."""
    return getattr(fn, "_torchdynamo_orig_callable", getattr(fn, "_orig_mod", fn))


@contextlib.contextmanager
def without_recompile_limit() -> Iterator[None]:
    """A context in which Dynamo never falls back to eager mode because a function has been recompiled too often."""
    limit = 1 << 16
    with contextlib.ExitStack() as stack:
        try:
            patched = torch._dynamo.config.patch(recompile_limit=limit, accumulated_recompile_limit=limit)
            stack.enter_context(patched)
        except Exception as error:
            moved("torch._dynamo.config.recompile_limit", error, "`explain` reports nothing beyond Dynamo's limit")
        yield
