"""Inductor's options, as given or from its config: no other file reads the config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch._inductor import config


def option(name: str, given: Mapping[str, Any] | None = None) -> Any:
    """Return the value of an option for a graph that is compiled with the options `given`."""
    named = {key.replace("-", "_"): value for key, value in (given or {}).items()}  # Inductor takes both
    return named.get(name, getattr(config, name))
