"""Inductor's intermediate representation: only this file uses its private API for lowering."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import triton
from torch import Tensor
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor import ir, lowering
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_leaves

from tatten.ops.cuda.bound_kernel import BoundLaunch
from tatten.ops.cuda.launcher import Launch
from tatten.ops.cuda.prepared import IMPORT, PreparedCall
from tatten.ops.cuda.recording import NotRecordableError

Boxes = ir.TensorBox
# From PyTorch 2.15 on, a node lists which of its arguments are options of Triton's compiler.
TAKES_OPTIONS = "launch_kwargs" in inspect.signature(ir.UserDefinedTritonKernel).parameters
CONFIGURED = "num_warps", "num_stages"
COMPILE_OPTIONS = "launch_pdl", "enable_fp_fusion"  # that Inductor passes to Triton's compiler in any version


def register(op: Any, lower: Callable[..., Any]) -> None:
    """Have Inductor call `lower` for an op."""
    lowering.register_lowering(op, type_promotion_kind=None)(lower)


def fallback(op: Any) -> Callable[..., Any]:
    """Return Inductor's lowering of an op that it does not know: a call of the op."""
    return lowering.fallback_handler(op, add_to_fallback_set=False)  # type: ignore[no-any-return]


def boxes_of(args: Any, kwargs: Any) -> list[Any]:
    return [x for x in tree_leaves((args, kwargs)) if isinstance(x, Boxes)]


def are_static(args: Any, kwargs: Any) -> bool:
    """Return True if all sizes, strides, offsets and numbers are known."""
    numbers = []
    for x in tree_leaves((args, kwargs)):
        if isinstance(x, Boxes):
            layout = x.maybe_get_layout()
            numbers += [*x.get_size(), *(x.maybe_get_stride() or ()), getattr(layout, "offset", 0)]
        else:
            numbers.append(x)
    return not any(getattr(x, "free_symbols", None) or isinstance(x, torch.SymInt) for x in numbers)


def realize(args: Any, kwargs: Any) -> Any:
    """Realize each box in memory, with the strides that it has in the graph."""
    node = V.graph.current_node

    def in_memory(box: Any, at: Any) -> Any:
        if not isinstance(box, Boxes):
            return box
        # Each call that reads it would compute it again. The base of a view of a part is left, as it may be large.
        base = box.data.unwrap_view() if isinstance(box.data, ir.BaseView) else box.data
        if base.get_numel() == box.get_numel():
            box.realize()
        return ir.ExternKernel.require_exact_strides(box, at.meta["val"].stride())

    def walk(x: Any, at: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [walk(y, z) for y, z in zip(x, at, strict=True)]
        return in_memory(x, at)

    return (
        tuple(walk(x, at) for x, at in zip(args, node.args, strict=True)),
        # Inductor may have filled in defaults. The node does not know them, and they hold no box.
        {name: walk(x, node.kwargs.get(name)) for name, x in kwargs.items()},
    )


def is_cpp() -> bool:
    """Return True if the generated code is C++."""
    return bool(V.graph.cpp_wrapper)


def is_python() -> bool:
    """Return True if the generated code is Python source."""
    return not (V.graph.cpp_wrapper or V.graph.fx_wrapper)


def ahead_of_time() -> bool:
    """Return True if AOTInductor is compiling the graph.

    Its packages have to run without Python, and it reads no caches.
    """
    return bool(V.aot_compilation)


def fake_mode() -> Any:
    """Return the mode in which the graph was traced: tensors made in it are fake."""
    return V.fake_mode


def fake_of(box: Any) -> Tensor:
    """Return a fake tensor of the layout of a box, for `fake_mode`."""
    sizes, strides = ([int(x) for x in xs] for xs in (box.get_size(), box.get_stride()))
    return torch.empty_strided(sizes, strides, dtype=box.get_dtype(), device=box.get_device())


def allocate(like: Tensor) -> Any:
    """Return a buffer that Inductor allocates."""
    return lowering.empty_strided([*like.shape], [*like.stride()], dtype=like.dtype, device=like.device)


def dropped_options(launch: Launch | BoundLaunch) -> list[str]:
    """Return the names of the options of a launch that Inductor does not pass to Triton's compiler."""
    return [] if TAKES_OPTIONS else sorted({*launch.options} - {*CONFIGURED, *COMPILE_OPTIONS})


def check_options(launch: BoundLaunch) -> None:
    """Check that Inductor passes all options of a launch to Triton's compiler.

    Raises:
        NotRecordableError: it would drop one.
    """
    if dropped := dropped_options(launch):
        raise NotRecordableError(f"launches {launch.kernel.__name__} with {dropped}, which Inductor drops")


class _Kernel(ir.UserDefinedTritonKernel):  # type: ignore[misc]
    """One of the launches of a `BoundCall`. It may start before the previous launch ends.

    Inductor's own constructor finds the written tensors in Triton's IR, and assumes that a function writes all tensors
    that a kernel passes to it. Before PyTorch 2.15 it takes no options of Triton's compiler, so they are written into
    the source.
    """

    def __init__(self, launch: BoundLaunch, tensors: dict[str, Any]) -> None:
        inputs = {name: _input(box) for name, box in tensors.items()}
        floats = launch.floats
        configured = {name: x for name, x in launch.options.items() if name in CONFIGURED}
        self.compile_options = {name: launch.options.get(name, False) for name in COMPILE_OPTIONS}
        options = {name: x for name, x in launch.options.items() if name not in configured} if TAKES_OPTIONS else {}
        self.device = next(iter(inputs.values())).get_device()
        ir.ExternKernel.__init__(
            self,
            None,
            ir.NoneLayout(device=self.device),
            [*inputs.values()],
            (*floats.values(), *options.values()),
            {**inputs, **floats, **options},
        )
        self.ordered_kwargs_for_cpp_kernel = [*tensors, *floats]
        kernel = _configured(launch.kernel, tuple(sorted(configured.items())))
        self.kernel_idx = triton_kernel_wrap.kernel_side_table.add_kernel(kernel)
        self.grid = [(*launch.grid, 1, 1)[:3]]
        self.launch_kwargs = tuple(options)

    def codegen(self, wrapper: Any) -> None:
        if TAKES_OPTIONS:
            super().codegen(wrapper)
            return
        define = wrapper.define_kernel

        @functools.wraps(define)
        def with_options(name: str, body: str, *args: Any, **kwargs: Any) -> Any:
            with_meta = body.replace("triton_meta={", f"triton_meta={{{repr(self.compile_options)[1:-1]}, ", 1)
            if with_meta == body:
                raise AttributeError(
                    f"Inductor defines {name} without `triton_meta`, which takes {self.compile_options}"
                )
            return define(name, with_meta, *args, **kwargs)

        wrapper.define_kernel = with_options
        try:
            super().codegen(wrapper)
        finally:
            vars(wrapper).pop("define_kernel", None)


class _Call(ir.UserDefinedTritonKernel):  # type: ignore[misc]
    """The launches of a call of an op, in order.

    Some of them run side by side, without waiting for each other, so they are one node. Inductor puts nothing between
    them, and the tensors that any of them reads or writes stay allocated until the last one.
    """

    def __init__(self, inputs: Sequence[Any], writes: Sequence[Any]) -> None:
        self.device = inputs[0].get_device()
        self.grid: list[Any] = []
        layout = ir.NoneLayout(device=self.device)
        ir.ExternKernel.__init__(self, None, layout, [*inputs], (), {})
        self.mutable_args = [*writes]
        self.mutation_outputs = [ir.MutationOutput(layout, box, self) for box in writes]
        V.graph.register_operation(self)

    def can_fuse_epilogue(self) -> bool:
        return False


class BoundCall(_Call):
    """Launches of kernels that Inductor defines."""

    def __init__(self, kernels: Sequence[_Kernel], writes: Sequence[Any]) -> None:
        self.kernels = kernels
        inputs: list[Any] = [x for kernel in kernels for x in kernel.inputs]
        super().__init__([*{x.get_name(): x for x in inputs}.values()], writes)

    def codegen(self, wrapper: Any) -> None:
        for kernel in self.kernels:
            kernel.codegen(wrapper)


class PythonCall(_Call):
    """Launches that generated Python code makes by a `PreparedCall`, one for each call."""

    def __init__(self, call: PreparedCall, tensors: Sequence[Any], writes: Sequence[Any]) -> None:
        self.call = call
        super().__init__([*map(_realized, tensors)], writes)

    def codegen(self, wrapper: Any) -> None:
        name, inputs = f"tatten_{self.get_operation_name()}", cast("Sequence[Any]", self.inputs)
        wrapper.add_import_once(IMPORT)
        wrapper.define_kernel(name, f"{self.call!r}\n", gpu=False)
        wrapper.writeline(f"{name}({', '.join(x.codegen_reference() for x in inputs)})")


@functools.cache
def _configured(kernel: Any, options: tuple[tuple[str, int], ...]) -> Any:
    """Return a kernel with Triton's options; the same object each time, as Inductor's table keeps every kernel."""
    return triton.autotune(configs=[triton.Config({}, **dict(options))], key=[])(kernel)


def _realized(box: Any) -> Any:
    """Return the buffer of a box, or the view of a buffer."""
    return ir.InputsKernel.unwrap_storage_for_input(ir.ExternKernel.realize_input(box))


def _input(box: Any) -> Any:
    """Return the argument of a kernel, which needs only an address: for a view that begins at its base, the base."""
    x = _realized(box)
    if isinstance(x, ir.ReinterpretView) and x.layout.offset == 0 and x.get_dtype() == x.data.get_dtype():
        return ir.InputsKernel.unwrap_storage_for_input(x.data)
    return x


def launch_kernels(launches: Sequence[tuple[BoundLaunch, dict[str, Any]]], writes: Sequence[Any]) -> None:
    """Add launches to the graph, as one node.

    Args:
        launches: each launch with a box for each parameter.
        writes: the boxes that the launches write to.
    """
    kernels = [_Kernel(launch, tensors) for launch, tensors in launches]
    if ahead_of_time():
        _try_codegen(kernels)
    BoundCall(kernels, writes)


def _try_codegen(kernels: Sequence[_Kernel]) -> None:
    """Generate code and drop it, so that an error is raised while the package can still call the op instead."""
    graph: Any = V.graph
    state_before = {**vars(graph)}
    try:
        graph.init_wrapper_code()
        # The call of a kernel can be generated only between nodes of a schedule.
        graph.wrapper_code.generate_kernel_call = lambda *args, **kwargs: None
        with graph.set_current_device(kernels[0].device):
            for kernel in kernels:
                kernel.codegen(graph.wrapper_code)
    finally:
        vars(graph).clear()
        vars(graph).update(state_before)


def call_in_python(call: PreparedCall, tensors: Sequence[Any], writes: Sequence[Any]) -> None:
    """Add the launches of a call to the graph, as one node.

    Args:
        call: the call, which the generated code constructs, too.
        tensors: the boxes that are its arguments.
        writes: the boxes that it writes to.
    """
    PythonCall(call, tensors, writes)


def check_aligned(boxes: Iterable[Any]) -> None:
    """Raise unless Inductor knows or ensures that boxes begin at multiples of 16 bytes.

    Inductor copies inputs that do not, but not constants and parameters.

    Raises:
        NotRecordableError: Inductor does not know where a box begins.
    """
    for box in boxes:
        name = box.get_name()
        layout = getattr(V.graph.get_buffer(name), "layout", None)
        within_another = isinstance(layout, ir.NonOwningLayout) and not layout.maybe_guard_aligned()
        if within_another or name in V.graph.constants or ir.is_unaligned(box):
            raise NotRecordableError(f"takes {name}, which may begin at any address")
