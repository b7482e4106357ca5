"""Parts of Triton that are used beyond its documented interface; each test fails where Triton moves or changes one."""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from compiled import compile_in_subprocess

from tatten.ops import moved
from tatten.ops.cuda import allocation
from tatten.ops.cuda.allocation import Dense, allocate
from tatten.ops.cuda.launcher import PARAMETERS_OF_3_6, PARAMETERS_OF_3_9
from tatten.ops.cuda.tma import Tiling, tma_strides

# A driver that compiles for Hopper, and takes launches down instead of running them.
SCRIPT = """
import json
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from tatten.ops.cuda import decode, decode_grid
from tatten.ops.cuda.combine import plan_combine
from tatten.ops.cuda.gpu_rates import GpuRates
from tatten.ops.kernel_signatures import decode_call

launches = []

class Launcher:
    def __init__(self, source, metadata):
        pass

    def __call__(self, gridX, gridY, gridZ, stream, function, *rest):
        launches.append(((gridX, gridY, gridZ, stream, function), rest[-len(driver.names):], rest[:-len(driver.names)]))

class Utils:
    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}

    def load_binary(self, *args):
        return "module", "function", 0, 0, 1024

    def unload_module(self, module):
        pass

class Driver:
    launcher_cls, utils = Launcher, Utils()

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 7

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

driver.set_active(Driver())
decode_grid.multiprocessors = lambda device: 132
decode.gpu_rates = lambda device: GpuRates(tma_least_bytes=0)
names = []

def address(x):
    if isinstance(x, torch.Tensor):
        return x.data_ptr()
    if isinstance(x, tuple):
        return tuple(address(y) for y in x)
    return {**vars(x), "base": x.base.data_ptr()} if hasattr(x, "block_shape") else x

def launch(kernel, planned, *args):
    driver.names = kernel.arg_names
    result = planned(*args)
    return result, launches.pop()

query, key, value = (torch.zeros(2, heads, n, 64, dtype=torch.bfloat16) for heads, n in ((8, 1), (2, 500), (2, 500)))
call = decode_call(query, key, value, scale=0.1)
segment = decode.plan_segment(call, call.segments[0])
combine = plan_combine(query, 64, segment.tile_space)
found = {}
out = []
for _ in range(2):
    partials, by_decode = launch(segment.launch.kernel, segment, call, call.segments[0])
    out.append(partials)
    _, by_combine = launch(combine.launch.kernel, combine, partials)
    for name, made in (("decode", by_decode), ("combine", by_combine)):
        found.setdefault(name, []).append(made)
found = {name: [(at, [address(x) for x in args], len(more)) for at, args, more in x] for name, x in found.items()}
given = [[x.data_ptr() for x in partials if x is not None] for partials in out]
kernels = segment.launch.kernel, combine.launch.kernel
print(json.dumps({"found": found, "given": given, "names": [x.arg_names for x in kernels]}, default=str))
"""


def test_a_compiled_kernel_is_launched_again_by_addresses() -> None:
    """`Launch` hands what Triton handed to its launcher the first time, with addresses in place of tensors."""
    recorded = compile_in_subprocess(SCRIPT)
    for name, arg_names in zip(("decode", "combine"), recorded["names"], strict=True):
        (where, first, extra), (where_again, second, extra_again) = recorded["found"][name]
        assert where == where_again
        assert where[3:] == [7, "function"]
        assert extra == extra_again
        assert len(first) == len(second) == len(arg_names)
        new = {"out", "lse", "partial_out", "partial_lse", "partials_a", "partials_b", "whole_outs", "whole_lses"}
        for arg, a, b in zip(arg_names, first, second, strict=True):
            if arg not in new:
                assert a == b, arg
    at = recorded["names"][0].index("out")
    for partials, (_, args, _) in zip(recorded["given"], recorded["found"]["decode"], strict=True):
        assert args[at : at + 4] == partials
    for partials, (_, args, _) in zip(recorded["given"], recorded["found"]["combine"], strict=True):
        assert args[:2] == partials[:2]
        assert args[2][:4] == partials
        assert args[3:6] == [[], [], []], "of nothing else"


def test_the_launcher_is_known() -> None:
    from triton.backends.nvidia.driver import CudaLauncher

    _, *parameters = inspect.signature(CudaLauncher.__call__).parameters
    if parameters == PARAMETERS_OF_3_6:
        calls = "".join(inspect.getsource(CudaLauncher.__call__).split())
        flags, scratch = "self.launch_cooperative_grid,self.launch_pdl", "global_scratch,profile_scratch"
        assert f"self.launch(gridX,gridY,gridZ,stream,function,{flags},{scratch},*args)" in calls
    else:
        assert parameters == PARAMETERS_OF_3_9
    call = "".join(inspect.getsource(triton.JITFunction.run).split())
    hooks = "knobs.runtime.launch_enter_hook,knobs.runtime.launch_exit_hook"
    assert f"stream,kernel.function,kernel.packed_metadata,launch_metadata,{hooks},*bound_args.values())" in call


def test_memory_is_allocated_as_inductor_allocates_it() -> None:
    """`allocate` calls what generated code calls, with the same arguments; the one for a CPU can be called here."""
    from torch._inductor.codegen import wrapper

    source = inspect.getsource(wrapper)
    for device in ("cpu", "cuda"):
        assert f"empty_strided_{device} = torch._C._dynamo.guards._empty_strided_{device}" in source
    layout = Dense.of((3, 0, 4), torch.int64)
    made = torch._C._dynamo.guards._empty_strided_cpu(*layout)
    assert (made.shape, made.stride(), made.dtype) == layout
    assert callable(allocation._empty_strided_cuda)


def other_arguments(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, stream: int) -> None: ...


def test_memory_is_allocated_where_the_private_function_has_moved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no GPU here: a tensor that says it is on one stands in, and the public function is one for a CPU."""
    layout = Dense.of((3, 4), torch.int64)
    like: Any = SimpleNamespace(is_cuda=True)
    empty_strided = torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", lambda *args, dtype, device: empty_strided(*args, dtype=dtype))
    monkeypatch.setattr(allocation, "_empty_strided_cuda", other_arguments)
    monkeypatch.setattr(moved, "_notes", {})
    with caplog.at_level("WARNING", "tatten"):
        made = [x for _ in range(2) for x in allocate(like, layout, layout)]
    assert [(x.shape, x.stride(), x.dtype) for x in made] == [layout] * 4
    assert len(caplog.messages) == 1
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cuda")
    assert allocation._find() is allocation._public
    assert "_empty_strided_cuda" in caplog.messages[1]


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4), (1, 5, 1), (0, 16, 128), (4, 0, 2)])
def test_the_layout_of_new_memory_is_that_of_a_contiguous_tensor(shape: tuple[int, ...]) -> None:
    want = torch.empty(shape, dtype=torch.float16)
    (got,) = allocate(torch.zeros(1), Dense.of(shape, torch.float16))
    assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)


def descriptors() -> list[tuple[type, list[Any]]]:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
    from triton.tools.tensor_descriptor import TensorDescriptor

    block = [1, 1, 64, 64]
    return [
        (TensorDescriptor, [block]),
        (GluonDescriptor, [block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)]),
    ]


@pytest.mark.parametrize("which", [0, 1])
def test_a_tensor_descriptor_is_what_its_fields_say(which: int) -> None:
    """So a `Tiling` may copy the fields of one, and need not have them checked again."""
    kind, given = descriptors()[which]
    x, y = torch.zeros(2, 2, 2, 100, 64, dtype=torch.bfloat16)
    made, want = Tiling(kind, x, *given)(y), kind(y, list(y.shape), tma_strides(y), *given)
    assert type(made) is type(want)
    assert made.base is y
    assert {**vars(made), "base": None} == {**vars(want), "base": None}
    assert not hasattr(kind, "__slots__")


@pytest.mark.parametrize("slots", [False, True])
def test_other_descriptors_are_made_by_triton(slots: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that holds an address: it may not be copied from another tensor's."""

    @dataclasses.dataclass(slots=slots)
    class Descriptor:
        base: Any
        shape: list[int]
        strides: list[int]
        block_shape: list[int]
        address: int = 0

        def __post_init__(self) -> None:
            self.address = self.base.data_ptr()

    monkeypatch.setattr(moved, "_notes", {})
    x, y = torch.zeros(2, 2, 2, 100, 64, dtype=torch.bfloat16)
    assert Tiling(Descriptor, x, [1, 1, 64, 64])(y) == Descriptor(y, list(y.shape), tma_strides(y), [1, 1, 64, 64])
    assert len(moved.moved_notes()) == 1


def test_the_names_that_gluon_renamed_are_there() -> None:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import tma

    assert hasattr(gl, "thread_barrier") or hasattr(gl, "barrier")
    assert hasattr(tma, "async_load") or hasattr(tma, "async_copy_global_to_shared")


def test_the_interpreter_is_told_from_the_compiler_by_the_type_of_a_kernel() -> None:
    import triton
    from triton.runtime.interpreter import InterpretedFunction

    assert not issubclass(InterpretedFunction, triton.JITFunction)
    assert "return kernel" in inspect.getsource(triton.JITFunction.run)
