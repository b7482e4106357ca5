"""A decorator of public functions: its errors name the argument, where those of Python and of PyTorch do not."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from tatten.ops.validation import check_no_grad

_P = ParamSpec("_P")
_R = TypeVar("_R")


# The start of the dispatcher's error for an argument of another type than the schema of the op has.
_OTHER_TYPE = re.compile(r"Expected a value of type '([^']+)' for argument '(\w+)' but instead found type '([^']+)'")
_TYPES = {"Tensor": "a Tensor", "int": "an int", "float": "a float", "bool": "a bool", "str": "a str"}


def names_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a public function whose op has the same name and whose options are keyword-only.

    Raises:
        TypeError: an argument that must be passed by keyword is not, or has another type than the op takes.
        NotImplementedError: a tensor requires grad, or has a tangent, while gradients are enabled. Inside
            `torch.func.grad` and `jvp` the op does not see this, and its result would have no gradient. In compiled
            code, `torch.func.grad` hides it from this function as well, before PyTorch 2.15.
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
        if torch.is_grad_enabled():
            for name, x in (*zip(positional, args, strict=False), *kwargs.items()):
                if isinstance(x, Tensor):
                    check_no_grad(function.__name__, **{name: x})
                elif isinstance(x, list | tuple):
                    tensors = {f"{name}[{i}]": part for i, part in enumerate(x) if isinstance(part, Tensor)}
                    check_no_grad(function.__name__, **tensors)
        if torch.compiler.is_compiling():  # Dynamo can't resume a function after a graph break inside a `try`
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if (mismatch := _OTHER_TYPE.search(str(error))) is None:
                raise
            expected, name, got = mismatch.groups()
            wanted = _TYPES.get(expected.removeprefix("Optional[").removesuffix("]"), expected)
            if name.endswith("dtype"):  # an int to the dispatcher
                wanted = "a torch.dtype"
            optional = " or None" if expected.startswith("Optional[") else ""
            raise TypeError(f"`{name}` must be {wanted}{optional}, got {got}") from None

    return checked
