"""Repeated launches of Triton kernels: a call is planned once for tensors of one layout.

In eager mode the host decides how long a call takes. Triton inspects each argument of a kernel at each launch, which is
most of the host time of a launch of the decode kernel. Checking and planning a call takes longer still.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from tatten.ops.cuda.recording import recorder
from tatten.ops.moved import moved

T = TypeVar("T")
GRID = ["gridX", "gridY", "gridZ", "stream", "function"]
PARAMETERS_OF_3_6 = [*GRID, "args"]
PARAMETERS_OF_3_9 = [*GRID, "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook", "args"]
VALUES = frozenset({type(None), bool, int, float, str, torch.dtype})  # compared by value
MOST_PLANS = 1024  # per function: a growing cache is planned anew at each length


def by_layout(plan: Callable[..., T]) -> Callable[..., T]:
    """Remember the result of `plan` for tensors of one layout: shape, strides, dtype, device, and address modulo 16.

    `plan` may depend on no other property of a tensor, and keep no tensor. Its other arguments are compared by value,
    and lists and tuples by their contents.
    """
    plans: dict[tuple[Any, ...], T] = {}

    @functools.wraps(plan)
    def planned(*args: Any) -> T:
        if recorder.get() is not None:  # fake tensors have no address
            return plan(*args)
        layouts = _layouts(args)
        result = plans.get(layouts)
        if result is None:
            if len(plans) >= MOST_PLANS:
                plans.clear()
            result = plans[layouts] = plan(*args)
        return result

    return planned


def _layouts(args: Sequence[Any]) -> tuple[Any, ...]:
    # Calling a function for each tensor would double the time of this one.
    return tuple(
        [
            x
            if (kind := type(x)) in VALUES
            else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16)
            if kind is Tensor
            else _layouts(x)
            if isinstance(x, (tuple, list))
            else _layout(x)
            for x in args
        ]
    )


def _layout(x: Any) -> Any:
    """Return the layout of a tensor of a subclass, and other values as they are."""
    return (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) if isinstance(x, Tensor) else x


def on_device_of(x: Tensor, run: Callable[..., T], *args: Any) -> T:
    """Call `run(*args)` with the device of `x` as the current one, where Triton launches."""
    if x.device.index == torch.cuda.current_device():
        return run(*args)
    with torch.cuda.device(x.device):
        return run(*args)


class Launch:
    """A Triton kernel with its grid and all arguments that follow the tensors.

    A call with tensors, None, or tuples of them launches the kernel. The first call compiles it for them by Triton.
    Tensors of later calls must have the same layout; only their addresses are read.

    Args:
        kernel: a function of `triton.jit` or `gluon.jit`.
        grid: the numbers of programs.
        options: Triton's own: `num_warps`, `num_stages`, `maxnreg`, `launch_pdl`.
        arguments: the kernel's arguments after the tensors, each by name.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], options: dict[str, Any], **arguments: Any) -> None:
        tensors = len(kernel.arg_names) - len(arguments)
        names = kernel.arg_names[max(0, tensors) :]
        if set(names) != set(arguments):
            missing, unknown = sorted({*names} - {*arguments}), sorted({*arguments} - {*names})
            raise TypeError(f"arguments of {kernel.__name__} must include {missing}, got {unknown} instead")
        self.kernel, self.grid, self.arguments = kernel, grid, arguments
        # If the compiler and ptxas may choose the product to fuse with a sum, the last bit depends on their versions
        # and on the constants. The kernels call `fma` themselves where time counts.
        self.options = {"enable_fp_fusion": False, **options}
        self._run: Callable[[Sequence[Any]], None] | None = None  # None: use Triton's public interface
        self._in_order = tuple([arguments[name] for name in names])

    def __call__(self, *tensors: Any) -> None:
        if (recording := recorder.get()) is not None:
            recording.launches.append((self, tensors))
            return
        if self._run is not None:
            self._run([x.data_ptr() if isinstance(x, Tensor) else _address(x) for x in tensors])
            return
        compiled = self.kernel[self.grid](*tensors, **self.arguments, **self.options)
        if compiled is not None:  # the interpreter compiles nothing
            self._run = _run_again(compiled, (*self.grid, 1, 1)[:3], self._in_order)


def _address(x: Any) -> Any:
    if x and isinstance(x, tuple):
        return tuple([y.data_ptr() if isinstance(y, Tensor) else _address(y) for y in x])
    return x


def _run_again(
    compiled: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]
) -> Callable[[Sequence[Any]], None] | None:
    """Like Triton's `compiled[grid]`, but skips the preparations for launch hooks, which halves the host time.

    It returns None if Triton is not one of the known versions.
    """
    import triton

    try:
        driver, hooks, with_hooks = triton.runtime.driver.active, triton.knobs.runtime, compiled[grid]
        run, constants = _launcher(compiled.run)
        constants = compiled.function, *constants, compiled.packed_metadata, None, None, None
        current_stream, device = driver.get_current_stream, driver.get_current_device()  # one for tensors of a layout
        len(hooks.launch_enter_hook.calls), len(hooks.launch_exit_hook.calls)
    except Exception as error:  # of any kind: it's private API
        moved("triton.compiler.CompiledKernel", error, "launches go through Triton's public interface, which is slower")
        return None

    def run_again(addresses: Sequence[Any]) -> None:
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:  # a profiler has set them
            with_hooks(*addresses, *arguments)
        else:
            run(*grid, current_stream(device), *constants, *addresses, *arguments)

    return run_again


def _launcher(run: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the function to launch with, and its constant arguments.

    Triton 3.6's launcher adds constant arguments and calls a function: return both. For 3.9 return the launcher.

    Raises:
        TypeError: the launcher takes other parameters.
    """
    parameters = [*inspect.signature(run).parameters]
    if parameters not in (PARAMETERS_OF_3_6, PARAMETERS_OF_3_9):
        raise TypeError(f"{type(run).__name__} takes {parameters}")
    scratch = [getattr(run, name, None) for name in ("global_scratch_size", "profile_scratch_size")]
    if parameters == PARAMETERS_OF_3_9 or scratch != [0, 0]:  # AMD's launcher has no scratch sizes
        return run, ()
    return run.launch, (run.launch_cooperative_grid, run.launch_pdl, None, None)
