"""`generate_batch` with steps that transformers compiles: one graph, the same tokens, and an op for each layer."""

from __future__ import annotations

import gc
import importlib
from typing import Any, ClassVar

import pytest
import torch
import transformers
from one_row_layers import take_any_size
from slow import slow_but

if not transformers.__version__.startswith("5.24"):
    pytest.skip("no other transformers was tested", allow_module_level=True)

from batched_models import MODELS, behind, build, expected, greedy, padded, prompts, quick, run
from batched_models import batching as batching_config
from transformers import CompileConfig, GenerationConfig

import tatten.integrations.transformers  # noqa: F401  (registers the attention)
from tatten.passes import fused_linears, skinny_linears
from tatten.passes.symbolic import constant, known_tensor

NEW = 12
PADDED: dict[str, Any] = {"q_padding_interval_size": 16, "max_requests_per_batch": 8, "max_batch_tokens": 32}


@pytest.fixture(autouse=True)
def no_earlier_graphs() -> None:
    """Forget the graphs of other tests, all of which are those of one function of transformers."""
    torch._dynamo.reset()


class Graphs:
    """A backend that runs graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.Graph] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.graphs.append(module.graph)
        return module.forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:  # transformers copies a configuration
        return self

    def layers(self) -> list[list[int]]:
        """Return the layers whose attention each graph computes."""
        op = torch.ops.tatten.attend_pages
        return [[node.args[4] for node in graph.nodes if node.target in (op, op.default)] for graph in self.graphs]


def compiled(backend: Any, **options: Any) -> dict[str, CompileConfig]:
    config = CompileConfig(backend=backend, mode=None, fullgraph=True, **({"dynamic": True} | options))
    return {"varlen_compile_config": config, "decode_compile_config": config}


@pytest.mark.parametrize(
    "name, samples", slow_but([("llama", 3), ("gemma3", 1)], [(name, n) for name in MODELS for n in (1, 3)])
)
def test_one_graph_has_all_layers(name: str, samples: int) -> None:
    """Chunks, decode steps, rings and forks: each step is one graph, with the tokens of `generate`."""
    model, ids, backend = build(name), prompts(), Graphs()
    got = run(model, ids, greedy(NEW, samples), **PADDED, **compiled(backend))
    assert got == [tokens for tokens in expected(model, ids, NEW) for _ in range(samples)]
    assert all(layers == list(range(model.config.num_hidden_layers)) for layers in backend.layers())
    assert len(backend.graphs) <= 6  # decode steps of one request and of several, and steps with chunks


@pytest.mark.parametrize("name", slow_but(["llama"], ["llama", "gemma2", "gpt_oss"]))
def test_tokens_under_tatten(name: str) -> None:
    model, ids = build(name, num_hidden_layers=2, layer_types=None), prompts()
    decode = {"decode_compile_config": CompileConfig(backend="tatten", mode=None, fullgraph=True, dynamic=True)}
    assert run(model, ids, greedy(NEW), **PADDED, **decode) == expected(model, ids, NEW)


@pytest.mark.parametrize("name", slow_but(["llama"], ["llama", "qwen3", "gemma3"]))
def test_linear_layers_of_decode_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the option `decode`, those of one input share a launch on a GPU of Hopper, for any number of requests."""
    take_any_size(monkeypatch)
    monkeypatch.setattr(skinny_linears, "choose_parts", lambda *_: 1)  # as for layers of larger models
    rewriting = importlib.import_module("tatten.passes.rewrite")  # the package has a function of this name
    launches: dict[str, list[int]] = {"one": [], "any": []}  # numbers of layers, by the number of requests
    apply = rewriting._apply_linears

    def count(group: skinny_linears.LinearGroup | fused_linears.FusedGroup) -> None:
        rows = constant(known_tensor(group.layers[0].x).shape[1])
        launches["any" if rows is None else "one"].append(len(group.layers))
        apply(group)

    monkeypatch.setattr(rewriting, "_apply_linears", count)
    model, ids = build(name, num_hidden_layers=2, layer_types=None).bfloat16(), prompts()
    config = CompileConfig(backend="tatten", mode=None, options={"decode": True}, fullgraph=True, dynamic=True)
    for prompt, tokens in zip(ids, run(model, ids, greedy(NEW), **PADDED, decode_compile_config=config), strict=True):
        assert behind(model, prompt, tokens) < 0.3
    a_graph = [3, 1, 2, 1] * 2 + [1]
    assert launches["any"] == a_graph
    assert launches["one"] in (a_graph, a_graph * 2)  # Dynamo traces the first graph again if it has floats


def test_sampled_tokens() -> None:
    """A compiled step draws the tokens of one that is not compiled."""
    config = GenerationConfig(
        max_new_tokens=NEW, do_sample=True, num_return_sequences=4, eos_token_id=-1, pad_token_id=0
    )
    model, ids = build("llama"), prompts((30, 7))
    with padded():  # compiles nothing, but batches have the sizes of compiled steps, on which draws depend
        want = run(model, ids, config, seed=5, **PADDED, **compiled("eager"))
    assert run(model, ids, config, seed=5, **PADDED, **compiled("eager")) == want
    assert len({tuple(tokens) for tokens in want}) > 4


@pytest.mark.parametrize("name", slow_but(["llama"], ["llama", "gemma3"]))
def test_a_second_manager_compiles_nothing(name: str) -> None:
    """Its steps run the graphs of the first one over pages of its own."""
    model, ids, backend = build(name), prompts(), Graphs()
    want = expected(model, ids, NEW)
    counts = []
    for _ in range(3):
        assert run(model, ids, greedy(NEW), **PADDED, **compiled(backend)) == want
        counts.append(len(backend.graphs))
    assert counts[0] == counts[2]


class Checked(torch.fx.Interpreter):
    """Runs a graph, and holds the first call of each kind of step to the schema and the shapes of the op."""

    steps: ClassVar[set[str]] = set()

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.tatten.attend_pages:
            rows = args[5]
            kind = "chunks" if rows is None else "decode"
            if kind not in self.steps:
                self.steps.add(kind)
                torch.library.opcheck(target.default, args, test_utils=("test_schema", "test_faketensor"))
        return super().call_function(target, args, kwargs)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_the_op_fits_its_schema_and_shapes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of one layer can attend twice in one step."""
    monkeypatch.setattr(Checked, "steps", set())
    options = compiled(lambda module, inputs: Checked(module).run)
    run(build(name, num_hidden_layers=1), prompts(), greedy(NEW), **PADDED, **options)
    assert Checked.steps == {"decode", "chunks"}


def test_a_freed_cache() -> None:
    model, ids = build("llama"), prompts((5,))
    options = {"generation_config": greedy(2), "continuous_batching_config": batching_config()}
    with quick(), model.continuous_batching_context_manager(**options) as manager:
        manager.add_request(ids[0])
        manager.get_result(timeout=60)
        number = manager.batch_processor.cache.number
    del manager
    gc.collect()
    rows, heads = torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, 4, 1, 16)
    new = heads[:, :2]
    with pytest.raises(RuntimeError, match=f"cache {int(number)} must exist as long as a compiled step runs"):
        torch.ops.tatten.attend_pages(heads, new, new, number, 0, rows, *(None,) * 4, 0, 0, *(None,) * 4)


def test_graphs_of_inductor_leave_the_op_out() -> None:
    """They would keep the pools of one cache, and later managers run the same graphs."""
    assert torch.Tag.cudagraph_unsafe in torch.ops.tatten.attend_pages.default.tags
