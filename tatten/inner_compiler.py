"""The compiler of the rewritten graph. All use of private entry points of Dynamo and Inductor is in this file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from tatten.options import valid_names

Compiled = Callable[..., Any]


def inductor_compiler(mode: str | None, options: dict[str, Any]) -> Callable[[GraphModule, list[Tensor]], Compiled]:
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
    return wrapper  # type: ignore[no-any-return]


def plain_compiler(name: str) -> Callable[[GraphModule, list[Tensor]], Compiled]:
    """The backend "eager" or "aot_eager" of Dynamo."""
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(name)


def reset_cudagraphs() -> None:
    """Drop the CUDA graphs that Inductor recorded, as its own wrapper does on `torch._dynamo.reset()`."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()


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
