"""Gluon kernels for Hopper on a CPU: the kernel's own code runs, with PyTorch in the place of Gluon's language.

`gluon_machine` says what of concurrency is seen. Layouts are ignored, and sizes have 64 bits.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from gluon_machine import Barrier, Barriers, Machine, Shared, Value
from torch import Tensor
from triton.experimental.gluon.language import constexpr


class Pointer:
    """The address of an element of `base`, or those of a tile."""

    def __init__(self, base: Tensor, at: Any = 0) -> None:
        self.base, self.at, self.dtype = base, at, SimpleNamespace(element_ty=base.dtype)

    def __add__(self, n: Any) -> Pointer:
        return Pointer(self.base, self.at + n)

    def places(self, mask: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The whole storage, the places in it that are pointed to, and which of them `mask` leaves."""
        storage = self.base.as_strided((self.base.untyped_storage().nbytes() // self.base.element_size(),), (1,), 0)
        at, ok = torch.broadcast_tensors(torch.as_tensor(self.at), torch.as_tensor(True if mask is None else mask))
        return storage, torch.where(ok, at + self.base.storage_offset(), 0), ok


class Descriptor:
    """A TMA descriptor, as the kernel sees it."""

    def __init__(self, made: Any) -> None:
        self.base, self.dtype, self.block_shape, self.layout = made.base, made.base.dtype, made.block_shape, made.layout
        self.block_type = SimpleNamespace(nbytes=math.prod(made.block_shape) * made.base.element_size())


def _load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Tensor:
    storage, at, ok = pointer.places(mask)
    there = storage[at] if len(storage) else storage.new_zeros(at.shape)
    return torch.where(ok, there, other)


def _store(pointer: Pointer, values: Tensor, mask: Any = None) -> None:
    storage, at, ok = pointer.places(mask)
    storage[at[ok]] = values.expand(ok.shape)[ok]


def _of_numbers(operator: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda a, b: operator(torch.as_tensor(a), torch.as_tensor(b))


def _max(x: Tensor, axis: int) -> Tensor:
    """Triton's: NaN does not count."""
    return x.nan_to_num(-math.inf, math.inf, -math.inf).amax(axis) if x.is_floating_point() else x.amax(axis)


def _nothing(*_: object, **__: object) -> None: ...


def _language(machine: Machine, program: Callable[[], int]) -> dict[str, Any]:
    """Return stand-ins for the imports of a kernel's module, by the names there."""

    def allocate(dtype: torch.dtype, shape: list[int], layout: object) -> Shared | Barriers | Barrier:
        if layout == "barriers":
            return Barriers(Barrier() for _ in range(shape[0])) if len(shape) > 1 else Barrier()
        return Shared(machine, torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype))

    def arrive(barrier: Barrier) -> None:
        barrier.arrive(1, 0)
        machine.pause()

    def copy(to: Shared, rows: Pointer, mask: Any) -> None:
        machine.gather(to, _load(rows, mask))

    def arrive_after_copies(barrier: Barrier, increment_count: bool) -> None:
        assert not increment_count
        machine.arrive_after_gathers(barrier, 128)

    layouts = ("BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout", "SwizzledSharedLayout")
    gl = SimpleNamespace(
        **dict.fromkeys(layouts, _nothing),
        NVMMASharedLayout=SimpleNamespace(get_default_for=_nothing),
        uint8=torch.uint8,
        int32=torch.int32,
        int64=torch.int64,
        float32=torch.float32,
        arange=lambda start, stop, layout: torch.arange(start, stop),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype).as_subclass(Value),
        load=_load,
        store=_store,
        where=torch.where,
        minimum=_of_numbers(torch.fmin),
        maximum=_of_numbers(torch.fmax),
        abs=torch.abs,
        exp2=torch.exp2,
        log=torch.log,
        sqrt_rn=torch.sqrt,
        fma=lambda a, b, c: a * b + c,
        sum=torch.sum,
        max=_max,
        min=torch.amin,
        zeros_like=torch.zeros_like,
        expand_dims=torch.unsqueeze,
        associative_scan=lambda x, dim, _: x.cumsum(dim),
        convert_layout=lambda x, layout: x,
        static_assert=_nothing,
        static_range=range,
        program_id=lambda _: torch.tensor(program()),
        allocate_shared_memory=allocate,
        warp_specialize=machine.run,
    )
    barriers = SimpleNamespace(
        MBarrierLayout=lambda: "barriers",
        init=Barrier.init,
        expect=lambda barrier, size: barrier.arrive(1, size),
        arrive=arrive,
        wait=lambda barrier, parity: machine.pause(lambda: barrier.phases % 2 != parity),
    )
    return {
        "gl": gl,
        "mbarrier": barriers,
        "fence_async_shared": machine.fence,
        "warpgroup_mma": machine.multiply,
        "warpgroup_mma_wait": machine.wait_for_products,
        "_barrier": machine.pause,
        "_load": machine.load_tile,
        "_copy": copy,
        "_arrive_after_copies": arrive_after_copies,
        **dict.fromkeys(("gdc_wait", "gdc_launch_dependents"), _nothing),
    }


def _as_seen(x: Any) -> Any:
    """Return an argument as the kernel sees it."""
    if x is None:
        return x
    if isinstance(x, tuple):
        return tuple([_as_seen(y) for y in x])
    return Pointer(x) if isinstance(x, Tensor) else Descriptor(x)


class Interpreted:
    """A kernel to launch in the place of the one called `name`, the code of which is in these modules."""

    def __init__(self, patch: pytest.MonkeyPatch, seed: int, name: str, *modules: ModuleType) -> None:
        kernel = vars(modules[0])[name]
        self.__name__, self.arg_names, self.function, self.program = name, kernel.arg_names, kernel.fn, 0
        language = _language(Machine(seed), lambda: self.program)
        for module in modules:
            for other, x in list(vars(module).items()):
                if other in language:
                    patch.setattr(module, other, language[other])
                elif isinstance(x, constexpr):
                    patch.setattr(module, other, x.value)
                elif hasattr(x, "fn"):
                    patch.setattr(module, other, _with_language(x.fn, language["gl"]))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*tensors: Any, **arguments: Any) -> None:
            given = [_as_seen(x) for x in tensors]
            for name in self.arg_names[len(tensors) :]:
                x = arguments[name]
                given.append(torch.tensor(x).as_subclass(Value) if name.islower() and isinstance(x, int) else x)
            for self.program in range(math.prod(grid)):
                self.function(*given)

        return launch


def _with_language(function: FunctionType, language: Any) -> FunctionType:
    """Return a function of Triton that runs with this language, and others as they are."""
    names = function.__globals__
    return FunctionType(function.__code__, {**names, "tl": language}) if "tl" in names else function


def import_with_fault(
    patch: pytest.MonkeyPatch, names: Sequence[str], line: str, instead: str, folder: Path
) -> list[ModuleType]:
    """Import copies of modules, in which `instead` stands in place of a line that one of them has once.

    Args:
        names: the modules, each before those that import from it.
        folder: the folder that the copies are written to.
    """
    for launcher in ("latent_sm90", "picked_sm90"):  # else their first import may be from a copy, and stay
        importlib.import_module(f"tatten.ops.cuda.{launcher}")
    modules, lines = [], 0
    for name in names:
        original = importlib.util.find_spec(name)
        assert original is not None
        code = Path(str(original.origin)).read_text()
        lines += code.count(line)
        path = folder / f"{name}.py"
        path.write_text(code.replace(line, instead))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, name, module)  # the next ones import from it
        spec.loader.exec_module(module)
        modules.append(module)
    assert lines == 1
    return modules
