"""Launching Triton kernels again and again: what tensors of one layout need the second time is remembered.

A call in eager mode takes as long as the host takes for it. Triton looks at each argument of a kernel at each launch,
most of what a launch of the lean kernel with its 70 costs; to check and plan a call costs more than that again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
MOST_PLANS = 1024  # of each function; of a cache that grows each length is planned anew


def by_layout(plan: Callable[..., T]) -> Callable[..., T]:
    """Remember what `plan` returns for tensors of one layout: shape, strides, dtype, device, and address modulo 16.

    It may depend on nothing else of a tensor, and keep none. Its other arguments, and lists', are compared by value.
    """
    made: dict[tuple[Any, ...], T] = {}

    @functools.wraps(plan)
    def planned(*args: Any) -> T:
        at = tuple([_layout(x) if isinstance(x, (Tensor, list, tuple)) else x for x in args])
        found = made.get(at)
        if found is None:
            if len(made) >= MOST_PLANS:
                made.clear()
            found = made[at] = plan(*args)
        return found

    return planned


def _layout(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16
    return tuple([_layout(y) for y in x]) if isinstance(x, (list, tuple)) else x


def on_device_of(x: Tensor, run: Callable[..., T], *args: Any) -> T:
    """`run(*args)` with the device of `x` as the current one, where Triton launches."""
    if x.device.index == torch.cuda.current_device():
        return run(*args)
    with torch.cuda.device(x.device):
        return run(*args)


class Launch:
    """A Triton kernel with its grid and all of its arguments but the tensors, which are its first ones.

    Called with tensors it launches. The first time Triton compiles it for them; later ones must be of the same layout,
    and only their addresses are looked at.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], *sizes: Any, **constants: Any) -> None:
        self.kernel, self.grid, self.sizes, self.constants = kernel, grid, sizes, constants
        self._run: Callable[..., None] | None = None
        self._rest: tuple[Any, ...] = ()

    def __call__(self, *tensors: Any) -> None:
        if self._run is not None:
            self._run(*[x.data_ptr() if isinstance(x, Tensor) else x for x in tensors], *self._rest)
            return
        compiled = self.kernel[self.grid](*tensors, *self.sizes, **self.constants)
        if compiled is not None:  # the interpreter compiles nothing
            named = self.kernel.arg_names[len(tensors) + len(self.sizes) :]
            self._rest = (*self.sizes, *[self.constants[name] for name in named])
            self._run = compiled[(*self.grid, 1, 1)[:3]]
