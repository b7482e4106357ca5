"""The private API of Inductor that `ops/inductor` uses: if it moves, this says so."""

from __future__ import annotations

import inspect

from torch._inductor import config, ir, lowering
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_heuristics
from torch._inductor.virtualized import V

from tatten.ops.inductor.check import check_interfaces
from tatten.ops.inductor.ir import TAKES_OPTIONS, ahead_of_time


def test_lowering() -> None:
    assert "type_promotion_kind" in inspect.signature(lowering.register_lowering).parameters
    assert "add_to_fallback_set" in inspect.signature(lowering.fallback_handler).parameters
    assert {"dtype", "device"} <= inspect.signature(lowering.empty_strided).parameters.keys()
    assert config.post_grad_custom_post_pass is None


def test_nodes() -> None:
    source = inspect.getsource(ir.UserDefinedTritonKernel.__init__)
    assert "V.graph.register_operation(self)" in source
    assert list(inspect.signature(ir.MutationOutput).parameters)[:3] == ["layout", "mutated_node", "mutating_node"]
    check_interfaces()


def test_calls_by_python() -> None:
    """`define_kernel` writes `name = body` to the header, after the imports."""
    source = inspect.getsource(PythonWrapperCodegen.__init__)
    assert "self.add_import_once = " in source
    assert "gpu" in inspect.signature(PythonWrapperCodegen.define_kernel).parameters
    assert "{kernel_name} = {kernel_body}" in inspect.getsource(PythonWrapperCodegen._format_kernel_definition)
    assert "V.graph.unaligned_buffers" in inspect.getsource(ir.is_unaligned)
    assert {"cpp_wrapper", "fx_wrapper"} <= inspect.signature(GraphLowering).parameters.keys()


def test_compile_options() -> None:
    """A node takes them; before, `define_user_defined_triton_kernel` prints `triton_meta` for `define_kernel`."""
    heuristics = inspect.getsource(triton_heuristics)
    if TAKES_OPTIONS:
        assert 'options.update(compile_meta.get("backend_options", {}))' in heuristics
        return
    defines = inspect.getsource(PythonWrapperCodegen.define_user_defined_triton_kernel)
    assert "triton_meta={triton_meta!r}" in defines
    assert "self.define_kernel(" in defines
    for option in ("launch_pdl", "enable_fp_fusion"):
        assert f'"{option}"' in heuristics


def test_packages_are_always_lowered() -> None:
    assert not ahead_of_time()
    with V.set_aot_compilation(True):
        assert ahead_of_time()
