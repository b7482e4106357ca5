"""Inductor's options, as given or from its config: no other file reads the config."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

from torch._inductor import config

from tatten.ops.moved import moved


def has_options(names: Iterable[str]) -> bool:
    """Return True if Inductor has all of the options."""
    missing = [name for name in names if not hasattr(config, name)]
    for name in missing:
        moved(f"torch._inductor.config.{name}", "it is missing", "decode steps are compiled without it")
    return not missing


def option(name: str, options: Mapping[str, Any] | None = None) -> Any:
    """Return the value of an option for a graph that is compiled with `options`."""
    named = {key.replace("-", "_"): value for key, value in (options or {}).items()}  # Inductor takes both
    return named.get(name, operator.attrgetter(name)(config))
