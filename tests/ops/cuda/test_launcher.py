"""The launcher remembers a plan of a call for tensors of one layout, and none of the tensors."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from tatten.ops import moved
from tatten.ops.cuda import launcher
from tatten.ops.cuda.gpu_rates import GpuRates
from tatten.ops.cuda.launcher import Launch, by_layout
from tatten.ops.kernel_signatures import bifurcated_call, decode_call


class Planner:
    """Counts how often it plans."""

    def __init__(self) -> None:
        self.count = 0
        self.plan = by_layout(self._plan)

    def _plan(self, *args: Any) -> int:
        self.count += 1
        return self.count


def test_tensors_that_are_laid_out_alike_share_a_plan() -> None:
    planner = Planner()
    for _ in range(3):
        assert planner.plan(torch.randn(3, 4), [torch.randn(2), None], None, 0.5, "auto") == 1
    assert planner.count == 1


OTHERS = {
    "shape": (torch.zeros(4, 3), [None], 0.5, "auto"),
    "strides": (torch.zeros(4, 3).T, [None], 0.5, "auto"),
    "dtype": (torch.zeros(3, 4, dtype=torch.float16), [None], 0.5, "auto"),
    "device": (torch.zeros(3, 4, device="meta"), [None], 0.5, "auto"),
    "address": (torch.zeros(13)[1:].view(3, 4), [None], 0.5, "auto"),
    "none": (None, [None], 0.5, "auto"),
    "inner": (torch.zeros(3, 4), [torch.zeros(1)], 0.5, "auto"),
    "length": (torch.zeros(3, 4), [None, None], 0.5, "auto"),
    "float": (torch.zeros(3, 4), [None], 0.25, "auto"),
    "name": (torch.zeros(3, 4), [None], 0.5, "triton"),
}


def test_what_differs_has_a_plan_of_its_own() -> None:
    planner = Planner()
    base = torch.zeros(3, 4), [None], 0.5, "auto"
    made = {name: planner.plan(*args) for name, args in {"base": base, **OTHERS}.items()}
    assert len(set(made.values())) == len(made)
    assert {name: planner.plan(*args) for name, args in {"base": base, **OTHERS}.items()} == made


def test_an_error_is_raised_again() -> None:
    calls = []

    @by_layout
    def plan(x: Tensor) -> None:
        calls.append(x)
        raise ValueError("`x` is wrong")

    for _ in range(2):
        with pytest.raises(ValueError, match="`x` is wrong"):
            plan(torch.zeros(1))
    assert len(calls) == 2


def test_no_more_plans_are_kept_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "MOST_PLANS", 3)
    planner = Planner()
    for n in (1, 2, 3, 1, 2, 3):
        planner.plan(torch.zeros(n))
    assert planner.count == 3
    for n in range(1, 9):
        planner.plan(torch.zeros(n))
    assert planner.count == 8


@pytest.mark.parametrize("op", ["decode", "bifurcated", "merge", "mask"])
def test_a_plan_keeps_no_tensor(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A KV cache would stay in memory for as long as the process."""
    from tatten.ops.cuda import decode
    from tatten.ops.cuda import dispatch as cuda

    monkeypatch.setattr(decode, "INTERPRETED", False)  # so that there are tiles to describe
    monkeypatch.setattr(decode, "gpu_rates", lambda device: GpuRates(tma_least_bytes=0))

    def empty(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    cache = [empty(2, 2, 300, 128, dtype=torch.float8_e4m3fn if op == "decode" else torch.float16) for _ in range(2)]
    scales = [empty(2, dtype=torch.float32) for _ in range(2)]
    shared = [empty(1, 2, 300, 128) for _ in range(2)]
    query, mask, lens = empty(2, 8, 1, 128), empty(2, 8, 1, 300, dtype=torch.bool), empty(2, dtype=torch.int64)
    sinks, out, lse = empty(8), empty(3, 2, 8, 1, 128), empty(3, 2, 8, 1, dtype=torch.float32)
    match op:
        case "decode":
            variant = {"window": 9, "sinks": sinks, "key_scale": scales[0], "value_scale": scales[1]}
            plan = cuda._plan(None, *decode_call(query, *cache, mask, lens, provider="triton", **variant))
        case "bifurcated":
            both = [list(pair) for pair in zip(shared, cache, strict=True)]
            plan = cuda._plan(None, *bifurcated_call(query, *both, [None, mask], sinks=sinks))
            del both
        case "merge":
            plan = cuda._plan_merge_states(out, lse)
        case "mask":
            plan = cuda._plan_block_list(mask, 2)
    kept = [weakref.ref(x) for x in (*cache, *shared, *scales, query, mask, lens, sinks, out, lse)]
    variant = None
    del cache, shared, scales, query, mask, lens, sinks, out, lse
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)
    assert plan is not None


class Compiled:
    """Stands in for what Triton returns of a launch."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, launches: list[Any]) -> None:
        self.launches = launches

    def run(self, gridX: int, gridY: int, gridZ: int, stream: int, function: str, *args: Any) -> None:
        assert (stream, function, *args[:4]) == (7, "function", "metadata", None, None, None)
        self.launches.append(("again", (gridX, gridY, gridZ), args[4:]))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.launches.append(("with hooks", grid, args))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver of Triton's that knows of a device and a stream."""
    current = SimpleNamespace(get_current_device=lambda: 3, get_current_stream={3: 7}.get)
    monkeypatch.setattr(triton.runtime.driver, "_active", current)


class Kernel:
    __name__ = "kernel"
    arg_names = ("x", "y", "n", "scale", "BLOCK", "FLAG")

    def __init__(self, compiles: bool) -> None:
        self.compiles, self.launches = compiles, []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **kwargs: Any) -> Compiled | None:
            self.launches.append(("first", grid, args, kwargs))
            return Compiled(self.launches) if self.compiles else None

        return run


@pytest.mark.usefixtures("driver")
def test_a_second_launch_runs_what_the_first_compiled() -> None:
    kernel = Kernel(compiles=True)
    launch = Launch(kernel, (7,), {"num_warps": 4}, FLAG=True, scale=0.5, BLOCK=16, n=(5, 1))
    x, y, z, other, tiles = torch.zeros(3), torch.zeros(4), torch.zeros(2), torch.zeros(3), object()
    launch(x, (tiles, y))
    launch(other, (y, z))
    launch(x, (tiles, y))
    given = {"n": (5, 1), "scale": 0.5, "BLOCK": 16, "FLAG": True, "num_warps": 4, "enable_fp_fusion": False}
    assert kernel.launches[0] == ("first", (7,), (x, (tiles, y)), given)
    assert kernel.launches[1:] == [
        ("again", (7, 1, 1), (other.data_ptr(), (y.data_ptr(), z.data_ptr()), (5, 1), 0.5, 16, True)),
        ("again", (7, 1, 1), (x.data_ptr(), (tiles, y.data_ptr()), (5, 1), 0.5, 16, True)),
    ]


class LauncherOf36:
    """As Triton 3.6 has it: Python around a C function."""

    launch_cooperative_grid, launch_pdl, global_scratch_align = False, True, 1

    def __init__(self, launches: list[Any], scratch: int = 0) -> None:
        self.launch = lambda *args: launches.append(args)
        self.global_scratch_size, self.profile_scratch_size = 0, scratch

    def __call__(self, gridX: int, gridY: int, gridZ: int, stream: int, function: Any, *args: Any) -> None:
        scratch = [f"memory of {n}" if n else None for n in (self.global_scratch_size, self.profile_scratch_size)]
        grid, flags = (gridX, gridY, gridZ), (self.launch_cooperative_grid, self.launch_pdl)
        self.launch(*grid, stream, function, *flags, *scratch, *args)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("scratch", [0, 8])
def test_the_c_function_beneath_a_launcher_gets_what_the_launcher_passes(scratch: int) -> None:
    """Python around it takes a microsecond; memory of its own for a launch is left to it."""
    through, beneath = [], []
    constants = 7, "function", "metadata", None, None, None
    LauncherOf36(through, scratch)(2, 3, 4, *constants, 10, 20)
    compiled: Any = Compiled([])
    compiled.run = LauncherOf36(beneath, scratch)
    launcher._run_again(compiled, (2, 3, 4), (20,))([10])
    assert beneath == through
    assert (launcher._launcher(compiled.run)[0] is compiled.run) == bool(scratch)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_that_are_set_later_are_seen(name: str) -> None:
    """A profiler sets them while it runs."""
    kernel = Kernel(compiles=True)
    launch = Launch(kernel, (7,), {}, FLAG=True, scale=0.5, BLOCK=16, n=5)
    x, y = torch.zeros(3), torch.zeros(4)
    hook = getattr(triton.knobs.runtime, name)
    launch(x, y)
    hook.add(print)
    try:
        launch(x, y)
    finally:
        hook.remove(print)
    launch(x, y)
    assert [how for how, *_ in kernel.launches] == ["first", "with hooks", "again"]
    assert kernel.launches[1][1:] == kernel.launches[2][1:]


def rename_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", object(), raising=True)


def remove_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(triton.runtime.driver._active, "get_current_stream")


def add_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiled, "run", lambda self, gridX, gridY, gridZ, cluster, stream, function, *args: None)


def hide_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Compiled, "run")


def change_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiled, "__getitem__", lambda self, grid, cluster: None)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("move", [rename_hook, remove_stream, add_parameter, hide_launcher, change_index])
def test_an_unknown_triton_launches_by_its_public_interface(
    move: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    move(monkeypatch)
    monkeypatch.setattr(moved, "_notes", {})
    kernel = Kernel(compiles=True)
    given = {"n": 5, "scale": 0.5, "BLOCK": 16, "FLAG": False}
    tensors = torch.zeros(3), torch.zeros(4)
    with caplog.at_level("WARNING", "tatten"):
        for _ in range(2):  # two layers
            launch = Launch(kernel, (7,), {}, **given)
            for _ in range(3):
                launch(*tensors)
    assert kernel.launches == [("first", (7,), tensors, {**given, "enable_fp_fusion": False})] * 6
    (said,) = caplog.messages
    assert said.startswith("triton.compiler.CompiledKernel is not as in the versions that tatten was tested with (")


def test_the_interpreter_is_given_tensors_each_time() -> None:
    kernel = Kernel(compiles=False)
    given = {"n": 5, "scale": 0.5, "BLOCK": 16, "FLAG": False}
    launch = Launch(kernel, (2, 3), {}, **given)
    tensors = torch.zeros(3), torch.zeros(4)
    for _ in range(2):
        launch(*tensors)
    assert kernel.launches == [("first", (2, 3), tensors, {**given, "enable_fp_fusion": False})] * 2


@pytest.mark.parametrize(
    "given, says",
    [
        ({"scale": 0.5, "BLOCK": 16, "flag": True}, r"\['FLAG'\], got \['flag'\]"),
        ({"x": 0, "scale": 0.5, "BLOCK": 16, "FLAG": True}, r"\['n'\], got \['x'\]"),
        (dict.fromkeys("abcdefgh", 0), ".*'x', 'y'.*, got .*'h'"),
    ],
)
def test_arguments_that_are_not_the_last_of_the_kernel_are_an_error(given: dict, says: str) -> None:
    with pytest.raises(TypeError, match=f"arguments of kernel must include {says}"):
        Launch(Kernel(compiles=True), (1,), {}, **given)
