"""Kernels that take tensors and floats only: sizes and strides are written into the source.

A launch by generated code then has nine arguments instead of 47, and none is a tuple. Floats stay arguments: if
the scale were a constant, the compiler would fuse other products, and results would differ from the op's in the last
bit.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tatten.ops.cuda.launcher import Launch
from tatten.ops.cuda.recording import NotRecordableError, Recorder

_CASTS = {torch.uint8: "tl.uint8"}


@dataclass(frozen=True)
class BoundLaunch:
    """A launch of a kernel of tensors and floats.

    Attributes:
        kernel: a function of `triton.jit`.
        tensors: for each of its first parameters, an input or allocated tensor.
        floats: for each of its other parameters, a number.
        grid, options: as in the launch that it stands for.
    """

    kernel: Any
    tensors: dict[str, Tensor]
    floats: dict[str, float]
    grid: tuple[int, ...]
    options: dict[str, Any]


def bind(recording: Recorder, launch: Launch, tensors: Sequence[Any]) -> BoundLaunch:
    """Bind the arguments of a launch that was recorded with these tensors, None, or tuples of them.

    Raises:
        NotRecordableError: the kernel is not in Triton.
    """
    if launch.kernel.is_gluon():
        raise NotRecordableError(f"launches {launch.kernel.__name__}, which is in Gluon")
    params: dict[int, str] = {}
    bases: dict[str, Tensor] = {}

    def expression(tensor: Tensor | None, name: str) -> str:
        if tensor is None:
            return "None"
        base = recording.base(tensor)
        param = params.setdefault(id(base), name)
        bases[param] = base
        if tensor.dtype == base.dtype:
            return param
        if tensor.dtype not in _CASTS:
            raise NotRecordableError(f"reads {base.dtype} as {tensor.dtype}")
        return f"{param}.to(tl.pointer_type({_CASTS[tensor.dtype]}), bitcast=True)"

    lines = []
    for name, x in zip(launch.kernel.arg_names, tensors, strict=False):
        if isinstance(x, tuple):
            lines.append("(" + "".join(expression(y, f"{name}_{i}") + ", " for i, y in enumerate(x)) + ")")
        else:
            lines.append(expression(x, name))
    unspecialized = {p.name for p in launch.kernel.params if p.do_not_specialize}
    constant = {p.name for p in launch.kernel.params if p.is_constexpr}
    floats = {name: x for name, x in launch.arguments.items() if type(x) is float and name not in constant}
    for name, x in launch.arguments.items():
        if name in floats:
            lines.append(f"{name}={name}.to(tl.float32)")  # Inductor passes float64
        else:
            lines.append(f"{name}={x!r}" if name in constant else f"{name}={_integer(x, name not in unspecialized)}")
    kernel_name = launch.kernel.__name__
    body = "".join(f"        {line},\n" for line in lines)
    source = f"def {kernel_name.strip('_')}({', '.join([*bases, *floats])}):\n    {kernel_name}(\n{body}    )\n"
    return BoundLaunch(_compile(launch.kernel, source), bases, floats, launch.grid, launch.options)


@functools.cache
def _compile(kernel: Any, source: str) -> Any:
    """Make a kernel from source that calls `kernel`. Equal launches get one object, as Inductor's table requires."""
    filename = f"<tatten {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    lines = source.splitlines(keepends=True)
    linecache.cache[filename] = (len(source), None, lines, filename)  # Triton and Inductor read the source
    namespace = {"tl": tl, kernel.__name__: kernel, "__name__": kernel.__module__}
    exec(compile(source, filename, "exec"), namespace)
    return triton.jit(namespace[kernel.__name__.strip("_")])


def _integer(x: Any, specialized: bool) -> str:
    """Write an integer in the type of a launch's argument; Triton turns some integers into constants."""
    if isinstance(x, tuple):  # its members are always specialised
        return f"({''.join(f'{_integer(y, True)}, ' for y in x)})"
    if x is None or (specialized and type(x) is int and x == 1):
        return repr(x)
    if type(x) is int:
        return f"tl.full([], {x}, tl.int{32 if -(1 << 31) <= x < 1 << 31 else 64})"
    raise TypeError(f"arguments of a launch must be int, float or None, or tuples of ints, got {x!r}")
