"""A decorator that raises an error with the name of the argument that must be passed by keyword."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def names_keywords(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function whose first keyword-only argument is often passed by position, as SDPA takes its mask.

    Python's own error says how many arguments there are, not which one must be named.
    """
    parameters = inspect.signature(function).parameters.values()
    positional = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    keyword = next(x.name for x in parameters if x.kind is x.KEYWORD_ONLY)

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if len(args) > len(positional):
            raise TypeError(
                f"`{keyword}` must be passed by keyword, as `{keyword}=...`; only {', '.join(positional)} are taken by "
                f"position, got {len(args)} arguments"
            )
        return function(*args, **kwargs)

    return checked
