"""The private API of Inductor that `ops/inductor` uses: if it moves, this says so."""

from __future__ import annotations

import inspect
import re

import pytest
from torch._inductor import config, ir, lowering
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_heuristics
from torch._inductor.virtualized import V

from tatten import Report, inner_compiler
from tatten.ops.inductor.ir import ahead_of_time, check_names
from tatten.passes import Declined, GraphReport
from tatten.passes.reasons import Decline, Reason
from tatten.passes.source_location import SourceLocation


def test_lowering() -> None:
    assert "type_promotion_kind" in inspect.signature(lowering.register_lowering).parameters
    assert "add_to_fallback_set" in inspect.signature(lowering.fallback_handler).parameters
    assert {"dtype", "device"} <= inspect.signature(lowering.empty_strided).parameters.keys()
    assert config.post_grad_custom_post_pass is None


# What the constructor of PyTorch's node sets: ours do, too, but for what fusing an epilogue needs, which they refuse.
SET = {"kernel_idx", "grid", "ordered_kwargs_for_cpp_kernel", "mutable_args", "mutation_outputs", "device"}
FOR_EPILOGUES = {"kernel_src", "kernel_ast", "kernel_stores", "kernel_args", "arg_accesses"}


def test_nodes() -> None:
    source = inspect.getsource(ir.UserDefinedTritonKernel.__init__)
    found = set(re.findall(r"self\.(\w+) =", source))
    assert found - FOR_EPILOGUES == SET, "`_Kernel` and `_Call` have constructors of their own"
    assert "V.graph.register_operation(self)" in source
    assert list(inspect.signature(ir.MutationOutput).parameters)[:3] == ["layout", "mutated_node", "mutating_node"]
    check_names()


def test_calls_by_python() -> None:
    """`define_kernel` writes `name = body` to the header, after the imports."""
    source = inspect.getsource(PythonWrapperCodegen.__init__)
    assert "self.add_import_once = " in source
    assert "gpu" in inspect.signature(PythonWrapperCodegen.define_kernel).parameters
    assert "{kernel_name} = {kernel_body}" in inspect.getsource(PythonWrapperCodegen._format_kernel_definition)
    assert "V.graph.unaligned_buffers" in inspect.getsource(ir.is_unaligned)
    assert {"cpp_wrapper", "fx_wrapper"} <= inspect.signature(GraphLowering).parameters.keys()


def test_a_name_that_moved_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ir, "MutationOutput")
    with pytest.raises(AttributeError, match="MutationOutput"):
        check_names()
    inner_compiler._register_lowerings.cache_clear()
    monkeypatch.setattr(inner_compiler, "_on_cuda", lambda inputs: True)
    note = inner_compiler.launch_note("inductor", [])
    assert note.startswith("Inductor calls the ops instead of launching their kernels: AttributeError: ")
    assert "MutationOutput" in note
    assert inner_compiler.launch_note("eager", []) == ""
    assert f"note: {note}" in str(
        Report([GraphReport((Declined(SourceLocation(), "", Decline(Reason.NO_SDPA, "")),), 0.5, note)])
    )
    inner_compiler._register_lowerings.cache_clear()


def test_compile_options() -> None:
    """It is read from `triton_meta`, which `define_user_defined_triton_kernel` prints and `define_kernel` gets."""
    defines = inspect.getsource(PythonWrapperCodegen.define_user_defined_triton_kernel)
    assert "triton_meta={triton_meta!r}" in defines
    assert "self.define_kernel(" in defines
    for option in ("launch_pdl", "enable_fp_fusion"):
        assert f'"{option}"' in inspect.getsource(triton_heuristics)


def test_packages_are_always_lowered() -> None:
    assert not ahead_of_time()
    with V.set_aot_compilation(True):
        assert ahead_of_time()
