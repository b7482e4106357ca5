"""Calls of an op by generated Python code: the recorded launches, with their tensors by number.

They are for kernels in Gluon, which Inductor can't define, and for kernels that read a large KV by TMA. The `repr` of
these classes is the expression that constructs them. Inductor writes it into its code, which is kept on disk and run by
other processes.
"""

from __future__ import annotations

import ast
import importlib
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tatten.ops.cuda.launcher import Launch
from tatten.ops.cuda.recording import NotRecordableError, Recorder


@dataclass(frozen=True)
class TmaTiles:
    """A parameter that describes tiles of a tensor to TMA.

    Attributes:
        tensor: the number of the tensor.
        block: the keys and the columns of a tile.
        heads_last: the tensor has heads behind keys, as pages have.
    """

    tensor: int
    block: tuple[int, int]
    heads_last: bool = False


@dataclass(frozen=True)
class Bytes:
    """A parameter that reads a tensor of bool as bytes.

    Attributes:
        tensor: the number of the tensor.
    """

    tensor: int


@dataclass(frozen=True)
class PreparedLaunch:
    """A launch of a kernel.

    Attributes:
        module, kernel: the module of the kernel, and its name.
        grid, options, arguments: as in `tatten.ops.cuda.launcher.Launch`.
        tensors: for each of the kernel's first parameters the number of a tensor, `TmaTiles`, `Bytes`, None, or a tuple
            of these.
    """

    module: str
    kernel: str
    grid: tuple[int, ...]
    options: dict[str, Any]
    arguments: dict[str, Any]
    tensors: tuple[Any, ...]

    def make(self, tensors: tuple[Tensor, ...]) -> Callable[[tuple[Tensor, ...]], None]:
        """Make a function that launches for all tensors of a call, whose layouts are those of `tensors`."""
        kernel = getattr(importlib.import_module(self.module), self.kernel)
        launch = Launch(kernel, self.grid, self.options, **self.arguments)
        parameters_of = _parameter_of(self.tensors, tensors, kernel)
        return lambda call_tensors: launch(*parameters_of(call_tensors))


def _descriptors_for(kernel: Any) -> Any:
    """Return the module that makes TMA descriptors for a kernel."""
    from tatten.ops.cuda import sm90, tma

    return sm90 if kernel.is_gluon() else tma


def _parameter_of(x: Any, tensors: tuple[Tensor, ...], kernel: Any) -> Callable[[tuple[Tensor, ...]], Any]:
    """Make a function from all tensors of a call to the value of one parameter. It keeps none of `tensors`."""
    if x is None:
        return lambda call_tensors: None
    if isinstance(x, tuple):
        parts = [_parameter_of(y, tensors, kernel) for y in x]
        return lambda call_tensors: tuple([part(call_tensors) for part in parts])
    if isinstance(x, TmaTiles):
        tiling, number = _descriptors_for(kernel).key_tiling(tensors[x.tensor], *x.block, x.heads_last), x.tensor
        return lambda call_tensors: tiling(_aligned(call_tensors[number]))
    if isinstance(x, Bytes):
        number = x.tensor
        return lambda call_tensors: call_tensors[number].view(torch.uint8)
    return operator.itemgetter(x)


def _aligned(x: Tensor) -> Tensor:
    """Return a tensor that TMA can read. Inductor does not check the addresses of a module's parameters and buffers."""
    if x.data_ptr() % 16:
        raise ValueError(f"a tensor {tuple(x.shape)} must begin at a multiple of 16 bytes, got address {x.data_ptr()}")
    return x


class PreparedCall:
    """The launches of a call, in order.

    A call with its tensors launches. They must be on the current device, and have the same layouts and alignment at
    every call; a ValueError names a tensor that TMA could not read.
    """

    def __init__(self, *launches: PreparedLaunch) -> None:
        self.launches = launches
        self._made: list[Callable[[tuple[Tensor, ...]], None]] | None = None

    def __repr__(self) -> str:
        return f"PreparedCall({', '.join(map(repr, self.launches))})"

    def __call__(self, *tensors: Tensor) -> None:
        if self._made is None:
            self._made = [launch.make(tensors) for launch in self.launches]
        for launch in self._made:
            launch(tensors)


IMPORT = f"from {__name__} import {', '.join(x.__name__ for x in (Bytes, PreparedCall, PreparedLaunch, TmaTiles))}"


def prepare(recording: Recorder) -> tuple[PreparedCall, list[Tensor]]:
    """Prepare the call whose launches were recorded, and return the inputs and allocated tensors that it takes.

    Raises:
        NotRecordableError: a launch takes an argument that can't be written down.
    """
    tensors: list[Tensor] = []

    def number(x: Tensor) -> int:
        base = recording.base(x)
        if x.element_size() != base.element_size():
            raise NotRecordableError(f"reads {base.dtype} as {x.dtype}")
        for i, other in enumerate(tensors):
            if base is other:
                return i
        tensors.append(base)
        return len(tensors) - 1

    def as_parameter(x: Any, kernel: Any) -> Any:
        if x is None:
            return None
        if isinstance(x, tuple):
            return tuple([as_parameter(y, kernel) for y in x])
        if not isinstance(x, Tensor):
            return tiles(x, kernel)
        tensor_number = number(x)
        if (stored := tensors[tensor_number].dtype) == x.dtype:
            return tensor_number
        if (stored, x.dtype) != (torch.bool, torch.uint8):
            raise NotRecordableError(f"reads {stored} as {x.dtype}")
        return Bytes(tensor_number)

    def tiles(descriptor: Any, kernel: Any) -> TmaTiles:
        tensor_number = number(descriptor.base)
        if (descriptor.base.shape, descriptor.base.stride()) != (
            tensors[tensor_number].shape,
            tensors[tensor_number].stride(),
        ):
            raise NotRecordableError(f"takes tiles of a view, {tuple(descriptor.base.shape)}")
        if not _descriptors_for(kernel).are_tiles_of(descriptor, tensors[tensor_number]):
            raise NotRecordableError(f"takes tiles of another kind, {descriptor}")
        _, first, second, columns = descriptor.block_shape
        return TmaTiles(tensor_number, (first * second, columns), first > 1)

    launches = []
    for launch, launch_tensors in recording.launches:
        values = launch.grid, launch.options, launch.arguments
        module, name = launch.kernel.__module__, launch.kernel.__name__
        if getattr(importlib.import_module(module), name, None) is not launch.kernel:
            raise NotRecordableError(f"launches a kernel that its name does not import, {module}.{name}")
        if not _has_literal(values):
            raise NotRecordableError(f"launches {name} with arguments that have no literal, {values}")
        launches.append(PreparedLaunch(module, name, *values, as_parameter(launch_tensors, launch.kernel)))
    return PreparedCall(*launches), tensors


def _has_literal(x: Any) -> bool:
    """Return True if `repr(x)` is a literal equal to `x`."""
    try:
        return bool(ast.literal_eval(repr(x)) == x)
    except (ValueError, SyntaxError):
        return False
