"""Handing the rewritten graph on. All use of PyTorch's private compiler entry points is in this file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from tatten.options import valid_names

Compiled = Callable[..., Any]


def inductor_compiler(mode: str | None, options: dict[str, Any]) -> Callable[[GraphModule, list[Tensor]], Compiled]:
    """Inductor as `torch.compile` itself sets it up, which checks names and types of the options and expands modes.

    Raises ValueError or TypeError for what Inductor does not take.
    """
    try:
        wrapper: Any = torch._TorchCompileInductorWrapper(mode, options, None)
    except RuntimeError as error:
        if mode is not None and "mode" in str(error).lower() and not options:
            raise ValueError(f"`mode` must be one that torch.compile knows, got {mode!r}: {error}") from error
        unknown = "Unexpected optimization option" in str(error)
        raise (ValueError if unknown else TypeError)(
            f"`options` holds what neither tatten nor Inductor takes: {error}. tatten's own are: {valid_names()}"
        ) from error
    return wrapper  # type: ignore[no-any-return]


def plain_compiler(name: str) -> Callable[[GraphModule, list[Tensor]], Compiled]:
    """`eager` or `aot_eager`, as Dynamo registers them."""
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(name)


def reset_cudagraphs() -> None:
    """Drop CUDA graphs that Inductor recorded, as its own wrapper does on `torch._dynamo.reset()`."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()
