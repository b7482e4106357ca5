"""On a PyTorch whose private APIs have moved, results stay right, nothing raises, and the log and reports name the API.

`BREAKS` and `OTHERS` list all private APIs outside `ops/cuda` and `ops/inductor`; a scan of the source holds that.
"""

from __future__ import annotations

import ast
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from broken_api import WAYS, Broken, break_global, break_import
from torch import Tensor

import tatten
from tatten import backend, dtensor_sdpa, entry_point, inner_compiler, lowered
from tatten.caches.static_address import mark_static
from tatten.ops import moved
from tatten.ops.cpu import flash
from tatten.ops.distributed import collectives, placement, push
from tatten.ops.watch import Watch
from tatten.passes import symbolic
from tatten.passes.calls import has_schemas

ROOT = Path(__file__).parents[2]
CACHES = collectives.collectives_problem, flash.flash_problem, has_schemas, push._symmetric_memory


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(moved, "_notes", {})
    for cached in CACHES:
        cached.cache_clear()
    yield
    monkeypatch.undo()
    for cached in CACHES:
        cached.cache_clear()


def step(q: Tensor, k: Tensor, v: Tensor, cache: Tensor, mask: Tensor) -> Tensor:
    cache[:, :, :1].copy_(k[:, :, :1])
    return F.scaled_dot_product_attention(q, cache, v, mask, enable_gqa=True) * 2


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    q, (k, v, cache) = torch.randn(2, 8, 1, 16), torch.randn(3, 2, 2, 96, 16)
    return [q, k, v, cache, torch.arange(96)[None, None, None] < 50]


def compile_by(inner: str, **given: Any) -> Callable[[], tatten.Report]:
    def run() -> tatten.Report:
        torch._dynamo.reset()
        want_inputs, args = inputs(), inputs()
        with torch.no_grad(), tatten.recording() as report:
            want = step(*want_inputs)
            out = torch.compile(step, backend="tatten", options={"inner": inner}, **given)(*args)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(args, want_inputs)
        assert len(report.graphs) == 1
        return report

    return run


compile_step = compile_by("aot_eager")


def explain() -> tatten.Report:
    with torch.no_grad():
        report = tatten.explain(step, *inputs())
    assert len(report.rewritten) == 1
    return report


def attend_without_flash() -> None:
    q, (k, v) = torch.randn(2, 8, 3, 16), torch.randn(2, 2, 2, 40, 16)
    mask = torch.arange(40).expand(2, 1, 3, 40) < torch.tensor([0, 7])[:, None, None, None]
    out, lse = tatten.decode_attention(q, k, v, attn_mask=mask, return_lse=True)
    flash.flash_problem.cache_clear()
    scores = q.double() @ k.double().repeat_interleave(4, 1).mT / 4 + torch.where(mask, 0.0, -torch.inf)
    want = scores.softmax(-1).nan_to_num(0) @ v.double().repeat_interleave(4, 1)
    torch.testing.assert_close(out.double(), want, atol=1e-6, rtol=0)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-6, rtol=0)


def decompose() -> None:
    class Step(torch.nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return tatten.decode_attention(query, key, key)

    inputs, length = (torch.randn(2, 4, 1, 16), torch.randn(2, 2, 40, 16)), torch.export.Dim("length", max=64)
    with torch.no_grad():
        program = torch.export.export(Step(), inputs, dynamic_shapes=({}, {2: length}))
        module = program.run_decompositions(tatten.decompositions()).module()
        torch.testing.assert_close(module(*inputs), Step()(*inputs))


def register() -> None:
    registered = entry_point._registered
    entry_point._registered = False
    try:
        assert entry_point.backend is backend.tatten
    finally:
        entry_point._registered = registered


def use_dtensor_handlers() -> None:
    tatten.enable_dtensor_sdpa()
    tatten.disable_dtensor_sdpa()


def ask_for_collectives() -> None:
    problem = collectives.collectives_problem()
    for ask in (lambda: collectives.group_of("a group"), lambda: tatten.tree_merge(*state(), "a group")):
        with pytest.raises(NotImplementedError, match=re.escape(str(problem))):
            ask()
    assert placement.find_segment_sharding(*state(), [], [], None) == problem


def state() -> tuple[Tensor, Tensor]:
    return torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1)


def ask_for_push() -> None:
    out = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float16, shape=(1, 8), element_size=lambda: 2)
    reason = push.push_unsupported_reason(out, "a group")  # type: ignore[arg-type]
    assert reason in moved.moved_notes()


def reset() -> None:
    inner_compiler.reset_inner()


def untraced() -> None:
    assert dtensor_sdpa._untraced(abs)(torch.tensor(-1.0)) == 1


def mark() -> None:
    mark_static(torch.zeros(3), torch.zeros(3))


def write_in_a_transform() -> tatten.Report:
    """Attention after a write to its values that vmap makes, which is seen also if nothing is known of the tensor."""

    def written(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        values = v.repeat_interleave(4, 1)
        torch.vmap(lambda x: x.mul_(-3))(v)
        return F.scaled_dot_product_attention(q, k.repeat_interleave(4, 1), values, mask)

    torch._dynamo.reset()
    (q, k, v, _, mask), others = inputs(), inputs()
    with torch.no_grad(), tatten.recording() as report:
        out = torch.compile(written, backend="tatten", options={"inner": "aot_eager"})(q, k, v, mask)
    torch.testing.assert_close(out, written(*others[:3], mask))
    return report


# For each API: the module that uses it, how it reaches it, its name there, what to run, and how it is named.
# A global or a module that is imported from; the name is a path from there.
BREAKS: list[tuple[str, str, str, Callable[[], Any], str]] = [
    ("inner_compiler", "torch", "_TorchCompileInductorWrapper", compile_by("inductor"), ""),
    ("inner_compiler", "torch", "_dynamo.config.patch", explain, "torch._dynamo.config.recompile_limit"),
    ("report", "torch", "_logging.trace_structured", compile_step, ""),
    ("report", "from torch._dynamo.utils", "counters", compile_step, ""),
    ("entry_point", "from torch._dynamo", "register_backend", register, ""),
    ("caches.static_address", "torch", "_dynamo.mark_static_address", mark, ""),
    ("dtensor_sdpa", "torch", "_disable_dynamo", untraced, ""),
    ("dtensor_sdpa", "from torch.distributed.tensor", "DTensor._op_dispatcher", use_dtensor_handlers, "_handlers"),
    ("ops.storage", "torch", "_C._is_alias_of", compile_step, ""),
    ("ops.storage", "torch", "_C._functorch.get_unwrapped", write_in_a_transform, ""),
    ("ops.cpu.flash", "torch", "ops.aten._scaled_dot_product_flash_attention_for_cpu", attend_without_flash, ""),
    ("ops.cpu.attend_used", "torch", "ops.aten._assert_scalar", decompose, ""),
    ("ops.distributed.collectives", "distributed_c10d", "_resolve_process_group", ask_for_collectives, ""),
    *(
        ("ops.distributed.collectives", "_c10d", name, ask_for_collectives, "")
        for name in collectives._ARGUMENTS
    ),
    ("ops.distributed.push", "from torch.distributed._symmetric_memory", "rendezvous", ask_for_push, "_symmetric_"),
    ("ops.distributed.push", "from torch._C._distributed_c10d", "_SymmetricMemory", ask_for_push, "_symmetric_memory"),
    ("passes.symbolic", "from torch.fx.experimental.symbolic_shapes", "statically_known_true",
     compile_by("aot_eager", dynamic=True), ""),
    ("passes.calls", "torch", "ops.aten.add_.Tensor._schema", compile_step, "torch._ops.OpOverload._schema"),
]  # fmt: skip


@pytest.mark.drawn(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("module, source, path, run, named", BREAKS, ids=[f"{x[0]}-{x[2]}" for x in BREAKS])
def test_each_private_api_broken(
    module: str, source: str, path: str, run: Callable[[], Any], named: str, way: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    if way == "raises" and path in ("rendezvous", "_SymmetricMemory"):
        pytest.skip("both are first called when the ranks allocate, where an error is one of the merge")
    breaks = break_import if source.startswith("from ") else break_global
    breaks(monkeypatch, f"tatten.{module}", source.removeprefix("from "), path, way)
    if path == "_resolve_process_group":
        world = SimpleNamespace(group_name="0")
        monkeypatch.setattr(collectives, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=world)))
    caplog.set_level(logging.WARNING, "tatten")
    report = run()
    run()
    (note,) = moved.moved_notes()
    assert (named or path) in note.split(" is not as in the versions")[0]
    assert [x.getMessage() for x in caplog.records if "is not as in the versions" in x.getMessage()] == [note]
    if isinstance(report, tatten.Report):
        with tatten.recording() as later:
            compile_step()
        assert note in later.graphs[0].note or note in report.graphs[0].note
        assert note in str(report) + str(later)


def size(way: str, name: str) -> Any:
    return SimpleNamespace(node=Broken(SimpleNamespace(), name, way))


def broken_tensor(way: str) -> Any:
    found = SimpleNamespace(placements=())
    return Broken(found, "_spec", way)


@pytest.mark.parametrize(
    "name, run",
    [
        ("torch.SymInt.node.maybe_as_int", lambda: symbolic.constant(size("missing", "maybe_as_int"))),
        ("torch.SymInt.node.maybe_as_int", lambda: symbolic.constant(size("raises", "maybe_as_int"))),
        ("torch.SymInt.node.hint", lambda: symbolic.hint(size("missing", "hint"))),
        ("torch.SymFloat.node.hint", lambda: symbolic.number_hint(size("missing", "hint"))),
        ("torch.SymFloat.node.expr", lambda: symbolic.integers_in(size("missing", "expr"))),
    ],
)
def test_sizes_are_unknown(name: str, run: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> None:
    assert run() is None
    assert run() is None
    assert [x.getMessage().split()[0] for x in caplog.records] == [name]


def test_mesh_order_without_shard_order() -> None:
    from torch.distributed.tensor import Replicate, Shard

    def x(*placements: object) -> Any:
        return Broken(SimpleNamespace(placements=placements), "_spec", "missing")

    assert placement._in_mesh_order(x(Shard(2), Replicate()))
    assert not placement._in_mesh_order(x(Shard(2), Shard(2)))
    (note,) = moved.moved_notes()
    assert "_spec.shard_order" in note


@pytest.mark.parametrize("name", ["_get_backend", "_device_types"])
def test_groups_without_internals(name: str) -> None:
    group: Any = SimpleNamespace()
    ask = (lambda: collectives.group_backend(group, "cuda")) if name == "_get_backend" else (
        lambda: collectives.group_timeout(group)
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match=name):
        ask()


@pytest.mark.parametrize("way", WAYS)
def test_groups_without_a_store(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "tatten.ops.distributed.collectives"
    break_global(monkeypatch, module, "distributed_c10d", "_get_process_group_store", way)
    with pytest.raises(NotImplementedError, match="_get_process_group_store"):
        collectives.group_store(SimpleNamespace())  # type: ignore[arg-type]


def test_masks_without_a_version() -> None:
    from tatten.integrations.transformers import masks

    assert masks._version(Broken(torch.zeros(1), "_version", "missing")) is None  # type: ignore[arg-type]
    assert "torch.Tensor._version" in moved.moved_notes()[0]


def test_a_config_without_an_attention_implementation() -> None:
    from tatten.integrations.transformers.config import attention_implementation

    config = Broken(SimpleNamespace(), "_attn_implementation", "missing")
    with pytest.raises(NotImplementedError, match=r"transformers.PreTrainedConfig._attn_implementation is not as in"):
        attention_implementation(SimpleNamespace(get_text_config=lambda decoder: config))  # type: ignore[arg-type]


@pytest.mark.parametrize("left", [None, SimpleNamespace()])
def test_weights_without_the_collector(left: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import output_capturing

    from tatten.integrations.transformers.config import weights_collected

    monkeypatch.delattr(output_capturing, "_active_collector")
    if left is not None:
        monkeypatch.setattr(output_capturing, "_active_collector", left, raising=False)
    assert not weights_collected()
    assert "_active_collector" in moved.moved_notes()[0]


LOOP_METHODS = (
    *("_prefill", "_update_model_kwargs_for_generation", "_extract_generation_mode_kwargs"),
    *("_sample", "_has_unfinished_sequences"),
)


@pytest.mark.parametrize("name", [*LOOP_METHODS, "_optimize_model_for_decode"])
def test_the_decode_loop_without_a_method_of_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import CompileConfig, GenerationMixin, LlamaConfig, LlamaForCausalLM

    from tatten.integrations.transformers import DecodeLoop
    from tatten.integrations.transformers.loop import decode_loop

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model, ids, loop = (
        LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes)).eval(),
        torch.ones(1, 4).long(),
        DecodeLoop(),
    )
    arguments = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **arguments)
    called: list[str | None] = []

    def unmodified(*args: Any) -> torch.Tensor:
        called.append(loop.reason)
        return expected

    monkeypatch.setattr(decode_loop, "run_unmodified", unmodified)
    config = CompileConfig(backend="tatten", mode=None, options={"inner": "eager"})

    def looped(model, input_ids, **rest):  # the method is missing only while the loop runs
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(GenerationMixin, name)
            return loop(model, input_ids, **rest)

    assert torch.equal(model.generate(ids, **arguments, custom_generate=looped, compile_config=config), expected)
    assert name in moved.moved_notes()[0]
    assert len(called) == (name in LOOP_METHODS)


def test_the_decode_loop_without_the_tensor_of_the_pad_token() -> None:
    from transformers import GenerationConfig

    from tatten.integrations.transformers.loop.generate_call import pad_token

    assert pad_token(GenerationConfig(pad_token_id=7), torch.device("cpu")).item() == 7
    assert "_pad_token_tensor" in moved.moved_notes()[0]


def test_rollouts_without_hooks() -> None:
    trl = pytest.importorskip("tatten.integrations.trl", reason="needs trl")
    embeddings = Broken(SimpleNamespace(), "_forward_hooks", "missing")
    with trl._without_gradient_hooks(SimpleNamespace(get_input_embeddings=lambda: embeddings)):
        pass
    assert "torch.nn.Module._forward_hooks" in moved.moved_notes()[0]


def test_a_graph_that_cannot_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.ops.tatten.merge_states.default, (graph.placeholder("x"),) * 2))
    module = torch.fx.GraphModule({}, graph)
    assert lowered._restorer(module) is not None
    monkeypatch.delattr(module.graph, "_codegen")
    assert lowered._restorer(module) is None
    assert "torch.fx.Graph._codegen" in moved.moved_notes()[0]


def test_a_mode_that_cannot_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    def raising(self: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(TorchDispatchMode, "__init__", raising)
    with pytest.raises(NotImplementedError, match="TorchDispatchMode"):
        Watch(print)


def test_other_backends_are_refused_where_the_registry_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    break_import(monkeypatch, "tatten.inner_compiler", "torch._dynamo.backends.registry", "list_backends", "missing")
    with pytest.raises(NotImplementedError, match=r"got 'aot_eager': torch._dynamo.backends.registry is not as in"):
        inner_compiler.named_compiler("aot_eager", None, {})


def test_a_reset_without_cudagraph_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", SimpleNamespace())  # type: ignore[misc]
    inner_compiler.reset_inner()
    assert "reset_cudagraph_trees" in moved.moved_notes()[0]


@pytest.mark.parametrize("given", [{"mode": "no such mode"}, {"options": {"no_such_option": 1}}])
def test_bad_options_are_errors_without_the_wrapper(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    break_global(monkeypatch, "tatten.inner_compiler", "torch", "_TorchCompileInductorWrapper", "missing")
    with pytest.raises(ValueError, match=r"no.such"):
        inner_compiler.inductor_compiler(given.get("mode"), given.get("options", {}))
    wrapper = inner_compiler._inductor("max-autotune-no-cudagraphs", {"triton.cudagraphs": False})
    assert wrapper.config["max_autotune"] is True
    assert wrapper.config["triton.cudagraphs"] is False


def test_autocast_without_its_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    from tatten.passes import autocast

    def cast(q: Tensor, k: Tensor, v: Tensor, cache: Tensor, mask: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention(q, cache, v, mask, enable_gqa=True)

    monkeypatch.setattr(autocast, "_enter_autocast", None)
    with torch.no_grad(), tatten.recording() as report:
        out = torch.compile(cast, backend="tatten", options={"inner": "eager"})(*inputs())
        torch.testing.assert_close(out, cast(*inputs()))
    (declined,) = report.declined
    assert declined.decline.detail == "`_enter_autocast` is a function that may set autocast"


IMPORTS = """
import sys, types, torch, torch._dynamo
import torch.nn.functional as F
hidden = {
    "torch.utils._python_dispatch": "TorchDispatchMode",
    "torch._subclasses.fake_tensor": "FakeTensor",
    "torch.amp.autocast_mode": "_enter_autocast",
}
real = {name: sys.modules[name] for name in hidden}
for name, hides in hidden.items():
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update({x: y for x, y in vars(real[name]).items() if x != hides})
disable, special = torch._disable_dynamo, torch._C._special
del torch._disable_dynamo, torch._C._special
import tatten, tatten.backend
sys.modules.update(real)
torch._disable_dynamo, torch._C._special = disable, special
from tatten.ops.moved import moved_notes
names = [*hidden.values(), "_disable_dynamo", "_special"]
assert len(moved_notes()) == len(names), moved_notes()
assert all(any(name in note for note in moved_notes()) for name in names), moved_notes()
def step(q, k, v, mask): return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
args = torch.randn(2, 8, 1, 16), *torch.randn(2, 2, 2, 96, 16), torch.arange(96)[None, None, None] < 50
with torch.no_grad(), tatten.recording() as report:
    out = torch.compile(step, backend="tatten", options={"inner": "eager"})(*args)
    torch.testing.assert_close(out, step(*args))
assert all(name in str(report) for name in names), str(report)
"""


@pytest.mark.drawn(1, "imports of a fresh interpreter")
def test_names_that_are_imported_first() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", IMPORTS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is not as in the versions that tatten was tested with") == 5


# The APIs that the tests above break in another way, and those that need none.
OTHERS = {
    # broken by the tests beside `BREAKS`, or in `test_serve.py` or `test_counters.py`
    *("_validate_args", "_foreach_add_", "_detect_timestamp_from_logprob"),
    *("torch._subclasses.fake_tensor", "torch.utils._python_dispatch.TorchDispatchMode", "torch._disable_dynamo"),
    *("torch.amp.autocast_mode._enter_autocast", "torch.amp.autocast_mode._exit_autocast", "torch._C"),
    *("torch._dynamo.backends", "torch._dynamo.exc", "torch._inductor.cudagraph_trees", "torch._dynamo.config"),
    *("_get_backend", "_device_types", "_get_process_group_store", "_spec", "_version", "_attn_implementation"),
    *("_prefill", "_update_model_kwargs_for_generation", "_extract_generation_mode_kwargs", "_pad_token_tensor"),
    *("_sample", "_has_unfinished_sequences", "_optimize_model_for_decode", "_debug_get_cache_entry_list"),
    *("_forward_hooks", "_op_dispatcher", "_custom_op_handlers", "_schema", "_codegen", "_active_collector"),
    # documented in spite of their names
    *("torch._check", "torch._inductor.compile", "torch._inductor.list_mode_options", "torch._inductor.list_options"),
    # only recognised: where they move, calls are declined or an attribute has its default
    *("_can_compile_fullgraph", "_is_user_defined", "_generation_state"),
    *("torch._dynamo.variables", "_dynamo_marked_constant", "_timeout", "_torchdynamo_orig_callable", "_orig_mod"),
    # imported for types alone
    *("torch._ops.OpOverload", "torch._ops.OpOverloadPacket"),
    # looked for at import: those that are missing are left out
    *(f"torch.ops.aten._scaled_dot_product_{x}_attention" for x in ("flash", "efficient", "cudnn")),
    *("_safe_softmax", "_special", "_nn", "_linalg", "_fft"),
    # of transformers' allocators, whose code is compared with the tested one: test_continuous_batching_replaced.py
    *("_kv_page_views", "_kv_token_views", "_compute_blocks_needed"),
    # of transformers' server, which `tatten-serve` starts only in a version that was tested
    "_cb",
    # not PyTorch's
    *("_make", "_value_", "_replace", "_asdict", "_fields"),
    # prefixes in names that `moved` is given
    *("torch._dynamo.reset", "torch._dynamo.utils", "torch._dynamo", "torch._C._distributed_c10d"),
    *("torch.distributed._symmetric_memory", "torch.ops._c10d_functional"),
}


def our_files() -> Iterator[Path]:
    for folder in ("ops", "passes", "tatten"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            linked = path.is_relative_to(ROOT / "tatten/ops") or path.is_relative_to(ROOT / "tatten/passes")
            if (
                not linked
                and not path.is_relative_to(ROOT / "ops/cuda")
                and not path.is_relative_to(ROOT / "ops/inductor")
            ):
                yield path


def test_the_table_is_complete() -> None:
    trees = {path: ast.parse(path.read_text()) for path in our_files()}
    assert len(trees) > 60
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    ours = {x.name for _, x in nodes if isinstance(x, (ast.FunctionDef, ast.ClassDef))}
    ours |= {x.id for _, x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    ours |= {
        x.attr
        for _, x in nodes
        if isinstance(x, ast.Attribute)
        and isinstance(x.ctx, ast.Store)
        and getattr(x.value, "id", "") in ("self", "new")
    }
    known = {part for _, source, path, _, _ in BREAKS for part in (source + "." + path).split(".")}
    known |= {part for name in OTHERS for part in name.split(".")}
    unknown = set()
    for path, node in nodes:
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(x.name for x in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for x in node.names for part in x.name.split(".")]
        elif (
            isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr") and len(node.args) > 1
        ):
            names = [node.args[1].value] if isinstance(node.args[1], ast.Constant) else []
        else:
            continue
        private = {x for x in names if x.startswith("_") and not x.startswith("__")} - ours - known
        unknown |= {f"{path.relative_to(ROOT)}:{node.lineno} {name}" for name in private}
    assert not unknown, "private APIs that no test breaks: add them to `BREAKS` or `OTHERS`"
