"""Latent attention of transformers: each layer attends to latents as they are cached, and the outputs are SDPA's."""

from __future__ import annotations

import copy

import latent_models
import pytest
import torch
from latent_models import MODELS
from pairs import pairs
from slow import slow_but
from torch import Tensor
from torch.fx import GraphModule, Node
from transformers import CompileConfig, DynamicCache, StaticCache

import tatten
from tatten.integrations.transformers import SharedPrefixCache, cache_kwargs
from tatten.passes import Rewritten, cost, rewrite
from tatten.passes.sdpa import find_sdpa

pytestmark = pytest.mark.drawn(2, "models")

BATCH, PROMPT = 3, 9
CACHES = {"static": lambda c: StaticCache(config=c, max_cache_len=24), "dynamic": lambda c: DynamicCache(config=c)}
WITH_SDPA = [name for name, model in MODELS.items() if model.layers]
FAST = [(name, "static", 1, True, False) for name in ("deepseek_v3", "kimi_linear")]
FAST += [("deepseek_v3", "dynamic", q_len, q_len == 4, q_len == 1) for q_len in (1, 4)]
CASES = [*FAST, *((name, cache, 1, True, True) for name in WITH_SDPA for cache in CACHES)]
CASES += [(*case, False) for case in pairs(WITH_SDPA, list(CACHES), [1, 4], [False, True])]


class Compared:
    """A backend that runs a graph, and beside it the rewritten one, whose layers are fed by those of the first."""

    def __init__(self) -> None:
        self.findings: list[object] = []
        self.errors: list[float] = []
        self.scale = 0.0
        self.copies = 0

    def __call__(self, gm: GraphModule, example_inputs: list[Tensor]):
        calls = [call.node for call in find_sdpa(gm.graph)]
        output = gm.graph.output_node()
        results = output.args[0]
        output.args = ((*results, *calls),)
        gm.recompile()
        fed = copy.deepcopy(gm)
        _feed(fed.graph, [node for node in fed.graph.nodes if node.name in {x.name for x in calls}])
        before = sum(node.target == "copy_" for node in fed.graph.nodes)
        report = rewrite(fed)
        fed.recompile()
        done = sum(isinstance(x, Rewritten) and x.attention for x in report.findings)
        self.copies += before - 2 * done - sum(node.target == "copy_" for node in fed.graph.nodes)
        self.findings += report.findings

        def run(*args):
            outs = gm(*(x.clone() if isinstance(x, Tensor) else x for x in args))
            attention = outs[len(results) :]
            got = fed(*args, *attention)
            for a, b in zip(attention, got[len(results) :], strict=True):
                self.errors.append((a - b).abs().max().item())
                self.scale = max(self.scale, a.abs().max().item())
            return got[: len(results)]

        return run


def _feed(graph: torch.fx.Graph, calls: list[Node]) -> None:
    """Let each call's users take another input of the graph in its place; the call itself is only returned."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    output = graph.output_node()
    for i, call in enumerate(calls):
        with graph.inserting_before(first):
            given = graph.placeholder(f"given_{i}")
        given.meta.update(call.meta)
        call.replace_all_uses_with(given, lambda user: user is not output)


@pytest.mark.parametrize(("name", "cache", "q_len", "padded", "dynamic"), slow_but(FAST, dict.fromkeys(CASES)))
def test_attention_is_sdpas_in_float64(name: str, cache: str, q_len: int, padded: bool, dynamic: bool) -> None:
    pytest.importorskip(f"transformers.models.{name}")
    model = latent_models.build(name, torch.float64)
    past = CACHES[cache](model.config)
    ids, mask = torch.randint(3, 60, (BATCH, PROMPT)), torch.ones(BATCH, PROMPT, dtype=torch.long)
    if padded:
        mask[0, :4] = mask[1, :2] = 0
    compared = Compared()
    torch._dynamo.reset()
    with torch.no_grad():
        model(ids, attention_mask=mask, **cache_kwargs(past), use_cache=True)
        mask = torch.cat((mask, mask.new_ones(BATCH, q_len)), dim=1)
        step = torch.compile(model, backend=compared, dynamic=dynamic, fullgraph=name != "longcat_flash")
        step(torch.randint(3, 60, (BATCH, q_len)), attention_mask=mask, **cache_kwargs(past), use_cache=True)
    ops = [x.op if isinstance(x, Rewritten) else x.decline for x in compared.findings if x.attention]
    assert ops == ["tatten.latent_attention.default"] * MODELS[name].layers
    assert compared.scale > 0.1
    assert max(compared.errors) < 1e-12
    assert compared.copies == 0  # writes to other state stay


def test_a_model_that_writes_attention_out() -> None:
    """hy_v4 has sinks, and writes its attention out over keys that it projects from latents."""
    pytest.importorskip("transformers.models.hy_v4")
    model = latent_models.build("hy_v4", torch.float32)
    past = StaticCache(config=model.config, max_cache_len=24)
    with torch.no_grad():
        report = tatten.explain(model, torch.randint(3, 60, (BATCH, 1)), **cache_kwargs(past), use_cache=True)
    attention = [x for x in report.rewritten if x.attention]  # and the scores of an indexer
    of_latents = past.layers[0].keys.shape[1] == 1  # transformers 5.17 caches the keys and values that it projects
    op = "tatten.latent_attention.default" if of_latents else "tatten.decode_attention.default"
    assert not report.declined, str(report)
    assert {x.op for x in attention} == {op}, str(report)
    assert all("4 of 24 keys by top-k" in x.note for x in attention)
    assert all(x.note.startswith("attention written out, with") for x in attention)


@pytest.mark.parametrize("name", slow_but(["deepseek_v3"], ["deepseek_v3", "deepseek_v2", "glm4_moe_lite", "minicpm3"]))
def test_samples_share_the_latents_of_their_prompt(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` over a fork: the tokens of plain `generate`, and one read of each prompt's latents for its samples."""
    pytest.importorskip(f"transformers.models.{name}")
    monkeypatch.setitem(cost.RATES, "cpu", cost.Rates(1.0, 0.0))
    model = latent_models.build(name, torch.float32)
    model.generation_config.eos_token_id = None
    ids, mask = torch.randint(3, 60, (2, PROMPT)), torch.ones(2, PROMPT, dtype=torch.long)
    mask[0, :4] = 0
    cache = SharedPrefixCache(model.config)
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, :-1]
        model(ids[:, :-1], attention_mask=mask[:, :-1], position_ids=positions, **cache_kwargs(cache))
    config = CompileConfig(backend="tatten", mode=None, options={"inner": "eager"}, fullgraph=True)
    config._compile_all_devices = True
    kwargs = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(2)
    want = model.generate(ids, **kwargs)
    torch._dynamo.reset()
    with tatten.recording() as report:
        torch.manual_seed(2)
        got = model.generate(ids, **cache_kwargs(cache.fork(3, 5)), compile_config=config, **kwargs)
    assert torch.equal(got, want)
    assert [x.op for x in report.rewritten] == ["tatten.latent_attention.default"] * MODELS[name].layers
    assert all(f"c float32[2, 1, {PROMPT - 1}, " in x.shapes for x in report.rewritten)
