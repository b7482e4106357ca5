"""Functions compiled as one graph, which can tell whether a CUDA graph of them would serve another call."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from tatten.ops.moved import moved


class CompiledFunction:
    """A function compiled as one graph for static shapes.

    It has a code object of its own, because Dynamo limits recompilations for each code object.

    Args:
        function: a function of positional arguments, without a closure.
        compiling: the arguments of `torch.compile`.
    """

    def __init__(self, function: Callable[..., None], compiling: dict[str, Any]):
        self._code = function.__code__.replace()
        function = types.FunctionType(self._code, function.__globals__, function.__name__)
        self._compiled = torch.compile(function, fullgraph=True, dynamic=False, **compiling)
        self._captured: object = None

    def __call__(self, *args: Any) -> None:
        self._compiled(*args)

    def would_compile(self, args: tuple[Any, ...]) -> bool:
        """Return True if no code that was compiled would run a call with these arguments.

        Return False if that is unknown or, as under `torch.compiler.set_stance("force_eager")`, nothing was compiled.
        """
        return self._accepting(args) == []

    def note_captured(self, args: tuple[Any, ...]) -> None:
        """Remember the code that Dynamo runs for a call, which a CUDA graph has captured."""
        self._captured = next(iter(self._accepting(args) or ()), None)

    def still_captured(self, args: tuple[Any, ...]) -> bool:
        """Return True if the code that was captured would also run a call with these arguments.

        Dynamo's guards compare everything that the code was compiled for: numbers in closures, globals and objects of
        any class. A replay of a CUDA graph evaluates no guards.
        """
        return self._captured is not None and any(code is self._captured for code in self._accepting(args) or ())

    def _accepting(self, args: tuple[Any, ...]) -> list[object] | None:
        """Return the code objects whose guards accept a call, of which Dynamo runs the first.

        The result is None if Dynamo can't be asked, or has compiled nothing.
        """
        names = self._code.co_varnames[: self._code.co_argcount]
        arguments = dict(zip(names, args, strict=True))
        try:
            from torch._dynamo.eval_frame import _debug_get_cache_entry_list

            entries = _debug_get_cache_entry_list(self._code)
            return [entry.code for entry in entries if entry.guard_manager.check(arguments)] if entries else None
        except Exception as error:  # of any kind: it's private API
            moved("torch._dynamo.eval_frame", error, "each call of `generate` captures its CUDA graph anew")
            return None


def in_dispatch_mode() -> bool:
    """Return True under a `TorchDispatchMode`, where PyTorch (2.13) compiles nothing. Return False if that is unknown.

    A compiled call would raise an error there, and leave the setting `automatic_dynamic_shapes` of Dynamo off.
    """
    try:
        from torch.utils._python_dispatch import is_in_torch_dispatch_mode

        return is_in_torch_dispatch_mode(include_infra_modes=False)
    except Exception as error:  # of any kind: it's private API
        moved("torch.utils._python_dispatch.is_in_torch_dispatch_mode", error, "the decode loop runs under any mode")
        return False


Calls = list[tuple[CompiledFunction, tuple[Any, ...]]]  # functions, each with its arguments
