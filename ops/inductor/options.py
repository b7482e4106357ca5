"""Inductor's options, as given or from its config: no other file reads the config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch._inductor import config


def option(name: str, options: Mapping[str, Any] | None = None) -> Any:
    """Return the value of an option for a graph that is compiled with `options`."""
    named = {key.replace("-", "_"): value for key, value in (options or {}).items()}  # Inductor takes both
    return named.get(name, getattr(config, name))
