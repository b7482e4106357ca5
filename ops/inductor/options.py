"""Inductor's options, as they are given or as its config has them: no other file reads that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch._inductor import config


def option(name: str, given: Mapping[str, Any] | None = None) -> Any:
    """The value of an option for a graph that is compiled with those `given`."""
    named = {key.replace("-", "_"): value for key, value in (given or {}).items()}  # Inductor takes both
    return named.get(name, getattr(config, name))
