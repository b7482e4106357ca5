"""Where a private interface of Inductor has moved, ops stay opaque: nothing is raised, and log and report say why."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import pytest
import torch
from compiled import compile_in_subprocess

from tatten.ops.inductor import check
from tatten.ops.inductor.check import CALLS, NAMES, check_interfaces

MISSING = [(owner, name) for owner, names in NAMES.items() for name in names.split()]
CALLED = [(owner, name) for owner, name, _, _ in CALLS if name != "__init__"]


@pytest.mark.parametrize("owner, name", [*MISSING, *CALLED])
def test_a_missing_name_is_noticed(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in owner.__mro__ if inspect.isclass(owner) else [owner]:  # methods that classes inherit, too
        if name in vars(kind):
            monkeypatch.delattr(kind, name)
    with pytest.raises(AttributeError, match=name):
        check_interfaces()


def other_arguments(*, needed: int) -> None: ...


@pytest.mark.parametrize("owner, name", [(owner, name) for owner, name, _, _ in CALLS])
def test_another_signature_is_noticed(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, staticmethod(other_arguments) if inspect.isclass(owner) else other_arguments)
    with pytest.raises(TypeError, match=rf"{name} takes other arguments: "):
        check_interfaces()


def test_an_attribute_that_ours_lacks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def __init__(self: Any, **kwargs: Any) -> None:
        self.device = self.cluster = 0

    monkeypatch.setattr(check.ir.UserDefinedTritonKernel, "__init__", __init__)
    with pytest.raises(AttributeError, match=r"attributes that tatten does not know: \['cluster'\]"):
        check_interfaces()


SCRIPT = """
import contextlib, functools, json, logging, sys
from unittest import mock
import fake_h200
fake_h200.install()
import torch
from torch._inductor import custom_graph_pass, ir as inductor_ir, lowering as inductor_lowering
from torch._inductor.virtualized import V
import tatten
from tatten import lowered
from tatten.backend import tatten as backend
from tatten.ops import moved
from tatten.ops.inductor import lowering
from tatten.ops.library import cuda_implementations

ops, bf16 = torch.ops.tatten, torch.bfloat16

def merge(out, lse):
    return ops.merge_states.default(out, lse)[0] * 2

def latents(q, q_rope, c, k_rope):
    return ops.latent_attention.default(q, q_rope, c, k_rope, scale=0.1)[0] * 2

MERGE = merge, [((4, 2, 8, 1, 64), bf16), ((4, 2, 8, 1), torch.float32)]
LATENTS = latents, [
    ((2, 128, 1, 512), bf16), ((2, 128, 1, 64), bf16), ((2, 1, 512, 512), bf16), ((2, 1, 512, 64), bf16)
]
NATIVE = torch.__version__ >= "2.12"  # PyTorch 2.11 runs the Python code first, for which there is no GPU

def raises(*args, **kwargs):
    raise RuntimeError("moved\\nfar away")

def patched(name, value=raises):
    module, _, attribute = name.partition(".")
    if "." in attribute:
        owner, attribute = attribute.split(".")
        return mock.patch.object(getattr(sys.modules[f"tatten.ops.inductor.{module}"], owner), attribute, value)
    return mock.patch.object(sys.modules[f"tatten.ops.inductor.{module}"], attribute, value)

@contextlib.contextmanager
def missing(owner, name):
    value = vars(owner)[name]
    delattr(owner, name)
    try:
        yield
    finally:
        setattr(owner, name, value)

@contextlib.contextmanager
def not_imported():
    loaded = {name: sys.modules.pop(name) for name in [*sys.modules] if name.startswith("tatten.ops.inductor")}
    with missing(custom_graph_pass, "CustomGraphPass"):
        try:
            yield
        finally:
            sys.modules.update(loaded)

BEFORE = {
    "import": not_imported,
    "name": lambda: missing(sys.modules["torch._higher_order_ops.triton_kernel_wrap"], "kernel_side_table"),
}
said = []
class Said(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("tatten").addHandler(Said())
logging.getLogger("tatten").setLevel(logging.WARNING)

def compiled(case, times=1, package=False, **options):
    said.clear()
    options |= {"cpp_wrapper": True} if package else {}
    lowered._register.cache_clear()
    moved._notes.clear()
    for op in cuda_implementations():
        inductor_lowering.lowerings.pop(op, None)
    with tatten.recording() as report, V.set_aot_compilation(package):
        for _ in range(times):
            code = fake_h200.generated_code(*case, compiler=functools.partial(backend, options=options or None))
    return code, [x.note for x in report.graphs], [*said]

results = {"as it is": compiled(MERGE), "as it is, in Python": compiled(LATENTS)}
if NATIVE:
    results["package"] = compiled(MERGE, package=True)
    with patched("ir._Kernel.codegen"):
        results["in a package"] = compiled(MERGE, package=True)
for name in json.loads(sys.argv[1]):
    case = LATENTS if name in ("lowering.prepare", "ir.PythonCall.codegen", "lowering.call_in_python") else MERGE
    with BEFORE[name]() if name in BEFORE else patched(name):
        results[name] = compiled(case, times=2)
graphs = []
def own_pass(graph):
    graphs.append(graph.owning_module.code)
    (product,) = [node for node in graph.nodes if node.args[1:] == (2,)]
    product.args = product.args[0], 3
with patched("ir._Kernel.codegen"):
    results["own pass"] = compiled(MERGE, pre_grad_custom_pass=own_pass)
print(json.dumps([results, graphs]))
"""

NATIVE = torch.__version__ >= "2.12"
STEPS = [
    "import",
    "name",
    "lowering.check_interfaces",
    "lowering.register",
    "custom_pass.with_lowerings",
    "custom_pass.LaunchesKernels.__call__",
    "lowering.realize",
    "lowering.in_force",
    "lowering.boxes_of",
    "lowering.are_static",
    "lowering.fake_mode",
    "lowering.fake_of",
    "lowering.record",
    "lowering.bind",
    "lowering.prepare",
    "lowering.allocate",
    "lowering.launch_kernels",
    "lowering.call_in_python",
    "ir._Kernel.__init__",
    "ir.BoundCall.__init__",
    "ir._Kernel.codegen",
    "ir.BoundCall.codegen",
    "ir.PythonCall.codegen",
    "ir.BoundCall.get_read_writes",
]


@functools.cache
def compile_steps(*steps: str) -> Any:
    """All of it in one interpreter: most of the time is its imports."""
    return compile_in_subprocess(SCRIPT, steps)


@pytest.fixture
def built(request: pytest.FixtureRequest) -> Any:
    """The results of the steps whose tests run, and the graphs that the user's pass saw."""
    function = test_the_op_stays_opaque_where_a_step_of_its_lowering_raises
    tests = [item for item in request.session.items if getattr(item, "function", None) is function]
    return compile_steps(*(item.callspec.params["step"] for item in tests))


def compiled(case: str, built: Any) -> tuple[bool, list[str], list[str]]:
    """Tell whether generated code calls the op, the notes of the reports, and the lines of the log."""
    code, notes, said = built[0][case]
    return "torch.ops.tatten." in re.sub(r"^#.*$", "", code, flags=re.M) or '"tatten::' in code, notes, said


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the made-up GPU is for machines without one")


@no_gpu
@pytest.mark.parametrize("case", ["as it is", "as it is, in Python", *(["package"] if NATIVE else [])])
def test_ops_are_lowered_where_nothing_has_moved(case: str, built: Any) -> None:
    assert compiled(case, built) == (False, [""], [])


@no_gpu
@pytest.mark.drawn(3)
@pytest.mark.parametrize("step", STEPS)
def test_the_op_stays_opaque_where_a_step_of_its_lowering_raises(step: str, built: Any) -> None:
    opaque, notes, said = compiled(step, built)
    assert opaque
    (line,) = said  # of two graphs
    assert notes == [line, line]
    assert line.startswith("torch._inductor is not as in the versions that tatten was tested with (")
    assert line.endswith("); Inductor calls the ops instead of launching their kernels")
    wanted = {
        "import": "ImportError: cannot import name 'CustomGraphPass'",
        "name": "AttributeError: .*kernel_side_table",
    }
    assert re.search(wanted.get(step, r"RuntimeError: moved\)"), line)


@no_gpu
@pytest.mark.skipif(not NATIVE, reason="PyTorch 2.11 runs the Python code first")
def test_an_error_in_code_generation_leaves_a_package_with_an_op(built: Any) -> None:
    """AOTInductor is called by the user, so nothing can compile the graph once more."""
    opaque, notes, said = compiled("in a package", built)
    assert opaque
    assert notes == said
    assert "RuntimeError: moved" in said[0]


@no_gpu
def test_a_pass_of_the_users_sees_the_graph_as_it_was_each_time(built: Any) -> None:
    assert compiled("own pass", built)[0]
    first, second = built[1]
    assert first == second
    assert "mul.Tensor(getitem, 2)" in first
