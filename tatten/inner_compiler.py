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

from tatten.lowered import Compiled, compile_lowered, compile_plainly, lower_ops, on_gpu
from tatten.ops.moved import moved
from tatten.options import valid_names
from tatten.passes.mutation import writes

Compiler = Callable[..., Compiled]  # of a graph and its inputs

TENSORRT = ("torch_tensorrt", "tensorrt", "aot_torch_tensorrt_aten")  # the names that torch_tensorrt registers
_used: dict[str, Compiler] = {}


def inductor_compiler(mode: str | None, options: dict[str, Any]) -> Compiler:
    """Return Inductor as `torch.compile` sets it up: the mode is expanded, names and types of options are checked.

    Raises:
        ValueError: Inductor has no such mode or option.
        TypeError: an option has the wrong type.
    """
    try:
        wrapper = _inductor(mode, options)
    except RuntimeError as error:
        if mode is not None and "mode" in str(error).lower() and not options:
            raise ValueError(f"`mode` must be one that torch.compile knows, got {mode!r}: {error}") from error
        unknown = "Unexpected optimization option" in str(error)
        raise (ValueError if unknown else TypeError)(
            f"`options` must be options of tatten ({valid_names()}) or of Inductor, which rejects them: {error}"
        ) from error

    def compiler(gm: GraphModule, inputs: list[Tensor]) -> Compiled:
        if lower_ops(inputs):
            return compile_lowered(wrapper, gm, inputs)
        return compile_plainly(wrapper, gm, inputs) if on_gpu(inputs) else wrapper(gm, inputs)

    return compiler


def _inductor(mode: str | None, options: dict[str, Any]) -> Any:
    """Return the wrapper in which `torch.compile` calls Inductor. Raise RuntimeError for a bad mode or option."""
    try:
        wrapper: Any = torch._TorchCompileInductorWrapper(mode, options, None)
        inspect.signature(wrapper).bind("a graph", "its inputs")
        _ = wrapper.config
        return wrapper
    except Exception as error:
        if isinstance(error, RuntimeError) and _works_without_options():
            raise
        moved("torch._TorchCompileInductorWrapper", error, "the types of Inductor's options are not checked")
        return _PublicInductor(mode, options)


def _works_without_options() -> bool:
    """Return True if PyTorch's wrapper of Inductor works without mode and options, so that they caused an error."""
    try:
        torch._TorchCompileInductorWrapper(None, {}, None)
    except Exception:
        return False
    return True


class _PublicInductor:
    """Inductor through its documented functions, in place of PyTorch's private wrapper."""

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
    """Return a backend that Dynamo knows by name. It gets mode and options as from `torch.compile`.

    Raises:
        ValueError: Dynamo knows no such backend, or the backend would ignore the mode or the options.
        ImportError: torch_tensorrt, which registers its backends, can't be imported.
        NotImplementedError: Dynamo's table of backends has moved.
    """
    compiler = _look_up(name)
    arguments: dict[str, Any] = {"mode": mode} if mode not in (None, "default") else {}
    if options:
        arguments["options"] = options
    if arguments and _is_pytorch_backend(compiler):
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


def _is_pytorch_backend(compiler: Compiler) -> bool:
    """Return True if PyTorch itself has the backend. Only Inductor among these takes a mode or options."""
    return (getattr(getattr(compiler, "func", compiler), "__module__", None) or "").startswith("torch._dynamo.")


def _tensorrt(compiler: Compiler, options: dict[str, Any], gm: GraphModule, inputs: list[Tensor]) -> Compiled:
    """Call torch_tensorrt, which takes options but no mode.

    Its default trace copies the inputs, so that writes to them, as to a static cache, are lost. With
    `use_distributed_mode_trace` it traces through AOTAutograd, which turns writes into outputs.

    Raises:
        ValueError: `options` ask for the default trace of a graph that writes to its inputs.
    """
    if any(writes(node) for node in gm.graph.nodes):
        options = {"use_distributed_mode_trace": True, **options}
        trace = options["use_distributed_mode_trace"]
        if not trace:
            raise ValueError(
                "option `use_distributed_mode_trace` must be True or left out for a graph that writes to its inputs, "
                f"as to a static cache: torch_tensorrt would lose the writes, got {trace!r}"
            )
    return compiler(gm, inputs, **({"options": options} if options else {}))


def inner_compiler(name: str, mode: str | None, options: dict[str, Any]) -> Compiler:
    """Return the compiler of the rewritten graph. Raises the errors of `inductor_compiler` and `named_compiler`."""
    return inductor_compiler(mode, options) if name == "inductor" else named_compiler(name, mode, options)


def reset_inner() -> None:
    """Reset the inner backends that were used, when `torch._dynamo.reset()` resets tatten.

    Inductor drops the CUDA graphs that it recorded, as the reset of PyTorch's wrapper does.
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
    """Return the function or module that `torch.compile` wrapped, or `fn` itself if it is not compiled."""
    return getattr(fn, "_torchdynamo_orig_callable", getattr(fn, "_orig_mod", fn))


@contextlib.contextmanager
def without_recompile_limit() -> Iterator[None]:
    """Keep Dynamo from falling back to eager mode after many recompilations of a function."""
    limit = 1 << 16
    with contextlib.ExitStack() as stack:
        try:
            patched = torch._dynamo.config.patch(recompile_limit=limit, accumulated_recompile_limit=limit)
            stack.enter_context(patched)
        except Exception as error:
            moved("torch._dynamo.config.recompile_limit", error, "`explain` reports nothing beyond Dynamo's limit")
        yield
