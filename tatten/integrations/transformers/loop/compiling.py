"""The arguments of `torch.compile` for a decode step."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CompileConfig

from tatten.inner_compiler import inner_compiler
from tatten.options import split_options

# A loop captures its step itself, so modes that let Inductor capture CUDA graphs are replaced by modes without graphs.
WITHOUT_GRAPHS = {"reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs"}


def compile_arguments(config: CompileConfig | None, device: torch.device) -> dict[str, Any]:
    """Return the backend, mode and options of a step.

    Without a config, the backend is tatten. On a GPU, tatten in its default mode gets the option `decode`, unless the
    user sets it.

    Raises:
        TypeError, ValueError: tatten or its inner backend lacks the mode or an option, or does not allow its value. An
            error that is raised while a step compiles would count as a step that can't be compiled.
    """
    backend = "tatten" if config is None else config.backend
    mode = None if config is None else WITHOUT_GRAPHS.get(config.mode, config.mode)
    options = dict((config.options if config is not None else None) or {})
    if backend == "tatten":
        tatten_options, inner_options = split_options(options)
        inner_compiler(tatten_options.inner, mode, inner_options)
        if tatten_options.inner == "inductor" and device.type == "cuda" and mode in (None, "default"):
            options = {"decode": not tatten_options.batch_invariant, **options}
    return {"backend": backend, "mode": mode, "options": options or None}


def uses_cudagraph_trees(arguments: dict[str, Any]) -> bool:
    """Return True if the options ask for Inductor's CUDA graphs, which can't be part of another capture."""
    return bool((arguments["options"] or {}).get("triton.cudagraphs", False))
