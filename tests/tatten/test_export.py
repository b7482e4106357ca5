"""`tatten.rewrite`: the backend's passes over exported programs, which stay right in all that torch.export promises."""

from __future__ import annotations

import copy
import importlib
import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from slow import slow_but
from torch import Tensor
from torch._dynamo.utils import counters
from torch.export import Dim, ExportedProgram, export
from torch.utils._pytree import tree_leaves

import tatten
from tatten.passes import internal
from tatten.passes.reasons import Reason
from tatten.report import Report

pytestmark = pytest.mark.drawn(6)

SLOTS = 64
Args = tuple[Tensor, ...]


def step_args(position: int = 3) -> Args:
    generator = torch.Generator().manual_seed(position)
    return torch.randn(2, 8, 1, 16, generator=generator), torch.tensor([position])


class Step(torch.nn.Module):
    """A decode step with a static cache in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.nn.Linear(16, 16)
        self.register_buffer("k", torch.zeros(2, 2, SLOTS, 16))
        self.register_buffer("v", torch.zeros(2, 2, SLOTS, 16))

    def forward(self, x, position):
        self.k.index_copy_(2, position, self.projection(x)[:, :2])
        self.v.index_copy_(2, position, x[:, 2:4])
        mask = (torch.arange(SLOTS) <= position)[None, None, None]
        k, v = (y[:, :, None].expand(2, 2, 4, SLOTS, 16).flatten(1, 2) for y in (self.k, self.v))
        return F.scaled_dot_product_attention(self.projection(x), k, v, mask)


class Layer(torch.nn.Module):
    def forward(self, q, k, mask):
        return F.scaled_dot_product_attention(q, k, k, mask, enable_gqa=True)


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))

    def forward(self, q, k, mask):
        for layer in self.layers:
            q = layer(q, k, mask)
        return q


class Attend(torch.nn.Module):
    def forward(self, q, k, mask):
        return Layer()(q, k, mask).transpose(1, 2).flatten(2)


class Of(torch.nn.Module):
    """A module of a function."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args):
        return self.fn(*args)


def attend_args(queries: int = 1, batch: int = 2, length: int = SLOTS) -> Args:
    mask = torch.ones(batch, 1, 1, length, dtype=torch.bool)
    mask[..., length // 2 :] = False
    return torch.randn(batch, 8, queries, 16), torch.randn(batch, 2, length, 16), mask


def exported(module: torch.nn.Module, args: Args, **kwargs: Any) -> ExportedProgram:
    with torch.no_grad():
        return export(module, args, **kwargs)


def rewritten(program: ExportedProgram) -> tuple[ExportedProgram, Report]:
    """The rewritten program, if its argument stayed as it was, and the report."""
    before, signature, env = str(program.graph), str(program.graph_signature), shape_env(program)
    guards = env and len(env.guards)
    state = copy.deepcopy(program.state_dict)
    with tatten.recording() as report:
        after = tatten.rewrite(program)
    assert (str(program.graph), str(program.graph_signature)) == (before, signature)
    assert (env and len(env.guards)) == guards
    assert all(torch.equal(x, state[name]) for name, x in program.state_dict.items())
    after.validate()
    return after, report


def shape_env(program: ExportedProgram) -> Any:
    values = (node.meta.get("val") for node in program.graph.nodes)
    return next(x.fake_mode.shape_env for x in values if isinstance(x, Tensor))


def assert_equal_steps(a: ExportedProgram, b: ExportedProgram, *steps: Args) -> None:
    """Both give the same outputs, step after step, and have the same state afterwards."""
    one, other = (copy.deepcopy(program).module() for program in (a, b))
    with torch.no_grad():
        for args in steps:
            torch.testing.assert_close(one(*copy.deepcopy(args)), other(*copy.deepcopy(args)))
    for x, y in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y)


def targets(program: ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if "tatten" in str(node.target)]


class CheckValues(torch.fx.Interpreter):
    """Runs a graph and compares what each node gives with its `val`."""

    def run_node(self, node: torch.fx.Node) -> Any:
        out = super().run_node(node)
        if node.op in ("placeholder", "call_function"):
            said, given = tree_leaves(node.meta["val"]), tree_leaves(out)
            assert len(said) == len(given), node
            for x, y in zip(said, given, strict=True):
                if isinstance(y, Tensor):
                    assert (x.shape, x.dtype) == (y.shape, y.dtype), node
                    strides = [(a, b) for a, b, n in zip(x.stride(), y.stride(), y.shape, strict=True) if n != 1]
                    assert all(a == b for a, b in strides), node
        return out


def saved_and_loaded(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.parametrize("strict", [False, True])
def test_cache_in_buffers(strict: bool) -> None:
    before = exported(Step(), step_args(), strict=strict)
    assert before.dialect == "TRAINING"
    after, report = rewritten(before)
    assert targets(after) == ["tatten.block_mask.default", "tatten.decode_attention.default"]
    assert [x.op for x in report.rewritten] == ["tatten.decode_attention.default"]
    assert "F.scaled_dot_product_attention(self.projection(x)" in report.rewritten[0].location.code
    assert sorted(after.graph_signature.buffers_to_mutate.values()) == ["k", "v"]
    assert after.graph_signature.parameters == before.graph_signature.parameters
    assert after.state_dict.keys() == before.state_dict.keys()
    assert all(x is before.state_dict[name] for name, x in after.state_dict.items())
    steps = [step_args(i) for i in range(4)]
    assert_equal_steps(before, after, *steps)
    assert_equal_steps(before, saved_and_loaded(after), *steps)


def shared(fn: Callable[[Tensor, Tensor], Tensor]) -> torch.nn.Module:
    """Attention to rows of k that `fn` shares or selects."""
    return Of(lambda q, k, mask, rows: F.scaled_dot_product_attention(q, fn(k, rows), fn(k, rows), mask))


ROWS = torch.tensor([1, 0, 0, 1])
SHARED = {
    "expand": lambda k, rows: k[:, None].expand(2, 2, 8, SLOTS, 16).flatten(0, 1),
    "index": lambda k, rows: k[rows],
    "index_select": lambda k, rows: k.index_select(0, rows),
    "gather": lambda k, rows: k.gather(0, rows[:, None, None, None].expand(4, 8, SLOTS, 16)),
    "concatenated": lambda k, rows: torch.cat([k[:1].expand(4, -1, -1, -1), k[rows]], 2)[:, :, : 2 * SLOTS],
}


@pytest.mark.parametrize("name", ["expand", "index", "index_select", "gather", "concatenated"])
def test_shared_rows(name: str) -> None:
    length = SLOTS * (1 + (name == "concatenated"))
    args = torch.randn(4, 8, 3, 16), torch.randn(2, 8, SLOTS, 16), torch.rand(4, 1, 3, length) > 0.5, ROWS
    before = exported(shared(SHARED[name]), args)
    after, report = rewritten(before)
    assert [x.op for x in report.rewritten] == ["tatten.bifurcated_attention.default"]
    assert_equal_steps(before, after, args)
    CheckValues(after.graph_module).run(*args)


@pytest.mark.parametrize("queries", [1, 3])
def test_values_of_all_nodes(queries: int) -> None:
    args = attend_args(queries)
    after, _ = rewritten(exported(Attend(), args))
    CheckValues(after.graph_module).run(*args)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("batch", [Dim.STATIC, Dim.DYNAMIC])
def test_dynamic_shapes(batch: object, queries: int) -> None:
    length = Dim("length", min=2, max=4096)
    shapes = {0: batch}, {0: batch, 2: length}, {0: batch, 3: length}
    before = exported(Attend(), attend_args(queries), dynamic_shapes=shapes)
    after, report = rewritten(before)
    assert len(report.rewritten) == 1
    assert after.range_constraints == before.range_constraints
    assert_equal_steps(before, after, attend_args(queries), attend_args(queries, length=1000))
    if batch is Dim.DYNAMIC:
        assert_equal_steps(before, after, attend_args(queries, batch=5, length=17))


def test_lengths_that_only_a_guard_would_make_equal() -> None:
    """Nothing heeds a guard on an exported graph: a run where the lengths differ would be wrong."""

    def attend(q, k, v, k2, v2):
        k, v = (torch.cat([x.expand(2, -1, -1, -1), y], 2) for x, y in ((k, k2), (v, v2)))
        return F.scaled_dot_product_attention(q, k, v)

    q, *tensors = (torch.randn(2, 4, 1, 16), *(torch.randn(n, 4, 10 * (4 - n), 16) for n in (1, 1, 2, 2)))
    before = exported(Of(attend), (q, *tensors), dynamic_shapes=(({}, *[{2: Dim.DYNAMIC}] * 4),))
    after, report = rewritten(before)
    assert [x.decline.reason for x in report.declined] == [Reason.SEGMENTS]
    assert after is before


def test_writes_between_in_a_loaded_program() -> None:
    """The values of its nodes share no storage, by which a write would be found."""

    class Between(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.randn(1, 8, SLOTS, 16))

        def forward(self, q, new):
            keys = self.cache[:, :].expand(2, 8, SLOTS, 16).clone()
            self.cache.mul_(new)
            return F.scaled_dot_product_attention(q, keys, keys)

    args = torch.randn(2, 8, 1, 16), torch.tensor(2.0)
    before = saved_and_loaded(exported(Between(), args))
    after, report = rewritten(before)
    assert len(report.rewritten) == 1
    assert_equal_steps(before, after, args, args)


def test_input_that_is_written() -> None:
    def step(q, cache, mask, position):
        cache.index_copy_(2, position, q[:, :2])
        return {"attended": F.scaled_dot_product_attention(q, cache, cache, mask, enable_gqa=True)}

    one = *attend_args(), torch.tensor([3])
    before = exported(Of(step), one)
    after, _ = rewritten(before)
    other = tuple(x.clone() for x in one)
    torch.testing.assert_close(before.module()(*one), after.module()(*other))
    torch.testing.assert_close(one, other)


def test_report_goes_where_the_backends_goes(caplog: pytest.LogCaptureFixture) -> None:
    counters.clear()
    with caplog.at_level(logging.INFO, "tatten"):
        _, report = rewritten(exported(Attend(), attend_args()))
    assert counters["tatten"]["rewritten"] == 1
    assert str(report) in caplog.text
    assert "graph 0: 1 of 1 attention calls rewritten" in str(report)


def test_regions_without_gradients_and_checkpoints_are_no_obstacle() -> None:
    attend = Attend()

    def under_no_grad(*args):
        with torch.no_grad():
            x = attend(*args)
        return x * 2

    def checkpointed(*args):
        return torch.utils.checkpoint.checkpoint(attend, *args, use_reentrant=False)

    for fn in (under_no_grad, checkpointed):
        before = export(Of(fn), attend_args())
        after, report = rewritten(before)
        assert len(report.rewritten) == 1
        assert_equal_steps(before, after, attend_args())


def test_attention_in_a_branch_is_nested() -> None:
    def branch(q, k, mask):
        return torch.cond(mask.all(), Layer(), lambda q, k, mask: q.clone(), (q, k, mask))

    before = exported(Of(branch), attend_args())
    after, report = rewritten(before)
    assert [x.decline.reason for x in report.declined] == [Reason.NESTED]
    assert after is before


def test_nothing_to_rewrite() -> None:
    before = exported(torch.nn.Linear(3, 3), (torch.randn(2, 3),))
    after, report = rewritten(before)
    assert after is before
    assert "no attention" in str(report)


def test_rewritten_again_is_the_same() -> None:
    once, _ = rewritten(exported(Step(), step_args()))
    twice, report = rewritten(once)
    assert twice is once
    assert not report.rewritten


def test_what_is_no_program() -> None:
    for wrong in (Attend(), exported(Attend(), attend_args()).module(), None):
        with pytest.raises(TypeError, match=rf"must be a torch.export.ExportedProgram, got a {type(wrong).__name__}"):
            tatten.rewrite(wrong)


def test_an_input_that_requires_grad() -> None:
    q, *rest = attend_args()
    before = export(Attend(), (q.requires_grad_(), *rest))
    after, report = rewritten(before)
    assert [x.decline.reason for x in report.declined] == [Reason.REQUIRES_GRAD]
    assert after is before


def test_a_device_without_kernels() -> None:
    before = exported(Attend(), tuple(x.to("meta") for x in attend_args()))
    after, report = rewritten(before)
    assert [x.decline.reason for x in report.declined] == [Reason.DEVICE]
    assert "query, key and value are on meta" in str(report)
    assert after is before


def test_decomposed_first_there_is_no_sdpa() -> None:
    _, report = rewritten(exported(Attend(), attend_args()).run_decompositions())
    assert [x.decline.reason for x in report.declined] == [Reason.NO_SDPA]
    assert "call tatten.rewrite before run_decompositions" in str(report)


def test_parameters_that_require_grad() -> None:
    """They nearly always do, so the program is rewritten; to run it where gradients are wanted is an error."""
    before = export(Step(), step_args())
    after, report = rewritten(before)
    assert len(report.rewritten) == 1
    with pytest.raises(NotImplementedError, match=r"has no backward: .* call it under torch.no_grad\(\)"):
        after.module()(*step_args())


def test_dropout_in_training() -> None:
    def attend(q, k, mask):
        return F.scaled_dot_product_attention(q, k, k, mask, dropout_p=0.5, enable_gqa=True)

    _, report = rewritten(exported(Of(attend).train(), attend_args()))
    assert [x.decline.reason for x in report.declined] == [Reason.DROPOUT]


def test_cache_that_is_a_constant() -> None:
    class Lifted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache = [torch.zeros(2, 2, SLOTS, 16)]

        def forward(self, q, position):
            self.cache[0][:, :1].index_copy_(2, position, q[:, :1])
            return F.scaled_dot_product_attention(q, self.cache[0], self.cache[0], enable_gqa=True)

    program = exported(Lifted(), step_args(), strict=False)
    with pytest.raises(ValueError, match=r"writes to the constant 'lifted_tensor_0' in `index_copy_`; .* strict=True"):
        tatten.rewrite(program)


def test_autocast_around_the_call_stays_outside() -> None:
    before = exported(Attend(), attend_args())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        after, _ = rewritten(before)
    assert {x.meta["val"].dtype for x in after.graph.find_nodes(op="placeholder")} == {torch.float32, torch.bool}
    assert not any("_to_copy" in str(node.target) for node in after.graph.nodes)


def test_cost_is_the_same_for_a_strict_export() -> None:
    """It leaves Dynamo's values at parameters and buffers, which the passes prefer: they have to fit the others."""

    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("prefix", torch.randn(1, 8, SLOTS, 16))

        def forward(self, q):
            keys = self.prefix.expand(2, -1, -1, -1)
            return F.scaled_dot_product_attention(q, keys, keys)

    programs = (exported(Shared(), (torch.randn(2, 8, 1, 16),), strict=strict) for strict in (False, True))
    (one,), (other,) = (rewritten(program)[1].rewritten for program in programs)
    assert one.cost == other.cost


def test_softmax_over_a_product_with_a_parameter_is_no_attention() -> None:
    class Router(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(16, SLOTS))

        def forward(self, x, experts):
            return torch.matmul(torch.softmax(torch.matmul(x, self.weight), -1), experts)

    _, report = rewritten(exported(Router(), (torch.randn(2, 8, 16), torch.randn(2, SLOTS, 16))))
    assert not report.declined


@pytest.mark.parametrize("preserve", [(), ("layers.0", "layers.1")])
def test_modules(preserve: tuple[str, ...]) -> None:
    args = attend_args()
    before = exported(Layers(), args, preserve_module_call_signature=preserve)
    after, report = rewritten(before)
    assert [x.location.module for x in report.rewritten] == ["layers.0", "layers.1"]
    modules = [list(x.meta["nn_module_stack"].values())[-1][0] for x in after.graph.nodes if "tatten" in str(x.target)]
    assert modules == ["layers.0", "layers.0", "layers.1"]  # one list of blocks for both
    torch.testing.assert_close(torch.export.unflatten(after)(*args), before.module()(*args))


@pytest.mark.parametrize("strict", slow_but([False], [True, False]))
def test_static_cache_of_transformers(strict: bool) -> None:
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa")
    model = LlamaForCausalLM(config).eval()
    cache = {"batch_size": 1, "max_cache_len": SLOTS, "device": "cpu"}
    model.generation_config = GenerationConfig(
        use_cache=True, cache_implementation="static", max_length=SLOTS, cache_config=cache
    )
    step = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=SLOTS, device="cpu")
    inputs = {"input_ids": torch.zeros(1, 1, dtype=torch.long), "cache_position": torch.tensor([0])}
    with torch.no_grad():
        before = export(step, (), inputs, strict=strict)
    if not strict:
        with pytest.raises(ValueError, match=r"writes to the constant .*strict=True"):
            tatten.rewrite(before)
        return
    after, report = rewritten(before)
    assert len(report.rewritten) == 2
    written = set(after.graph_signature.buffers_to_mutate.values())
    assert {"key_cache_0", "value_cache_0", "key_cache_1", "value_cache_1"} <= written
    one, other = (copy.deepcopy(program).module() for program in (before, after))
    with torch.no_grad():
        for i in range(4):
            inputs = {"input_ids": torch.tensor([[7 * i]]), "cache_position": torch.tensor([i])}
            torch.testing.assert_close(one(**inputs), other(**inputs))


STEPS = ["_restore_values", "_write_literals", "_update_modules", "calls_ops", "lower_ops"]


@pytest.mark.parametrize("step", [*STEPS, "first trace", "second trace"])
def test_an_error_leaves_the_program(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error after the checks: the user gets the program back, and the report names the error."""
    module, traces = importlib.import_module("tatten.export"), []
    monkeypatch.setattr(internal, "RAISES", False)
    before = exported(Step(), step_args())
    code = str(before.graph)

    def fail(*_: object) -> None:
        raise LookupError("not foreseen")

    def run_decompositions(program: ExportedProgram, table: dict[Any, Any]) -> ExportedProgram:
        traces.append(program)
        return fail() if len(traces) == (1 if step == "first trace" else 2) else traced(program, table)

    if step in STEPS:
        monkeypatch.setattr(module, step, fail)
    else:
        traced = ExportedProgram.run_decompositions
        monkeypatch.setattr(ExportedProgram, "run_decompositions", run_decompositions)
    with tatten.recording() as report:
        after = tatten.rewrite(before)
    assert after is before
    assert str(before.graph) == code
    (declined,) = report.declined
    assert declined.decline.reason is Reason.INTERNAL
    assert "LookupError: not foreseen" in declined.decline.detail
    assert not report.rewritten
    with torch.no_grad():
        torch.testing.assert_close(after.module()(*step_args()), before.module()(*step_args()))
