"""The private API of Inductor that `ops/inductor` uses: if it moves, this says so."""

from __future__ import annotations

import inspect

import torch
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor import config, ir, lowering
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.runtime import triton_heuristics


def test_lowering() -> None:
    assert "type_promotion_kind" in inspect.signature(lowering.register_lowering).parameters
    assert "add_to_fallback_set" in inspect.signature(lowering.fallback_handler).parameters
    assert {"dtype", "device"} <= inspect.signature(lowering.empty_strided).parameters.keys()
    assert config.post_grad_custom_post_pass is None


def test_nodes() -> None:
    """`BoundCall` and its kernels have constructors of their own: what PyTorch's sets, they have to set."""
    source = inspect.getsource(ir.UserDefinedTritonKernel.__init__)
    for name in ("kernel_idx", "grid", "ordered_kwargs_for_cpp_kernel", "mutable_args", "mutation_outputs", "device"):
        assert f"self.{name} =" in source
    assert "V.graph.register_operation(self)" in source
    assert list(inspect.signature(ir.MutationOutput).parameters)[:3] == ["layout", "mutated_node", "mutating_node"]
    assert callable(ir.ExternKernel.require_exact_strides)
    assert callable(ir.ExternKernel.realize_input)
    assert callable(ir.InputsKernel.unwrap_storage_for_input)
    assert callable(triton_kernel_wrap.kernel_side_table.add_kernel)


def test_programmatic_dependent_launch() -> None:
    """It is read from `triton_meta`, which `define_user_defined_triton_kernel` prints and `define_kernel` gets."""
    defines = inspect.getsource(PythonWrapperCodegen.define_user_defined_triton_kernel)
    assert "triton_meta={triton_meta!r}" in defines
    assert "self.define_kernel(" in defines
    assert 'get("launch_pdl"' in inspect.getsource(triton_heuristics)


def test_fake_mode() -> None:
    assert hasattr(torch._inductor.virtualized.V, "set_fake_mode")
