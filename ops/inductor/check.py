"""Check that Inductor has the private interfaces that `ir.py` uses: names, parameters, and a node's attributes."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor import ir, lowering
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

from tatten.ops.inductor.ir import TAKES_OPTIONS

NAMES: dict[Any, str] = {
    ir: "TensorBox BaseView ReinterpretView UserDefinedTritonKernel NonOwningLayout",
    ir.TensorBox: "get_device get_dtype get_name get_numel get_size get_stride maybe_get_layout maybe_get_stride "
    "realize",
    ir.BaseView: "unwrap_view",
    ir.ReinterpretView: "codegen_reference",
    ir.UserDefinedTritonKernel: "can_fuse_epilogue" if TAKES_OPTIONS else "get_kernel_and_metadata",
    PythonWrapperCodegen: "define_user_defined_triton_kernel",
    triton_kernel_wrap: "kernel_side_table",
    type(V): "graph fake_mode aot_compilation",
}
# Each function, the number of its positional arguments, and the names of its keyword arguments.
CALLS: tuple[tuple[Any, str, int, str], ...] = (
    (lowering, "register_lowering", 1, "type_promotion_kind"),
    (lowering, "fallback_handler", 1, "add_to_fallback_set"),
    (lowering, "empty_strided", 2, "dtype device"),
    (ir, "MutationOutput", 3, ""),
    (ir, "NoneLayout", 0, "device"),
    (ir, "is_unaligned", 1, ""),
    (ir.Buffer, "codegen_reference", 1, ""),
    (ir.ExternKernel, "__init__", 6, ""),
    (ir.ExternKernel, "realize_input", 1, ""),
    (ir.ExternKernel, "require_exact_strides", 2, ""),
    (ir.InputsKernel, "unwrap_storage_for_input", 1, ""),
    (ir.NonOwningLayout, "maybe_guard_aligned", 1, ""),
    (ir.UserDefinedTritonKernel, "codegen", 2, ""),
    (ir.UserDefinedTritonKernel, "get_operation_name", 1, ""),
    (PythonWrapperCodegen, "define_kernel", 3, "gpu"),
    (PythonWrapperCodegen, "writeline", 2, ""),
    (GraphLowering, "get_buffer", 2, ""),
    (GraphLowering, "register_operation", 2, ""),
)
# The attributes that the constructor of Inductor's node sets. tatten's node sets `OURS`, too. Only the fusion of an
# epilogue, which tatten's node refuses, reads `FOR_EPILOGUES`.
OURS = {"device", "grid", "kernel_idx", "launch_kwargs", "mutable_args", "mutation_outputs"}
OURS |= {"ordered_kwargs_for_cpp_kernel"}
FOR_EPILOGUES = {"arg_accesses", "kernel_args", "kernel_ast", "kernel_src", "kernel_stores"}


def check_interfaces() -> None:
    """Check Inductor's interfaces.

    Raises:
        AttributeError: a name is missing, or Inductor's node has an attribute that tatten's node lacks.
        TypeError: a function takes other arguments.
    """
    for owner, names in NAMES.items():
        for name in names.split():
            getattr(owner, name)
    for owner, name, positional, named in CALLS:
        _check_call(owner, name, positional, named.split())
    if "add_import_once" not in _set_by(PythonWrapperCodegen.__init__):
        raise AttributeError("PythonWrapperCodegen has no `add_import_once`")
    if unknown := {*_set_by(ir.UserDefinedTritonKernel.__init__)} - OURS - FOR_EPILOGUES:
        raise AttributeError(f"UserDefinedTritonKernel has attributes that tatten does not know: {sorted(unknown)}")


def _check_call(owner: Any, name: str, positional: int, named: list[str]) -> None:
    function = getattr(owner, name)
    try:
        inspect.signature(function).bind(*[None] * positional, **dict.fromkeys(named))
    except TypeError as error:
        raise TypeError(f"{getattr(owner, '__name__', owner)}.{name} takes other arguments: {error}") from error


def _set_by(function: Callable[..., Any]) -> Iterator[str]:
    """Yield the names of the attributes that a function sets."""
    code = inspect.unwrap(function).__code__
    return (instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == "STORE_ATTR")
