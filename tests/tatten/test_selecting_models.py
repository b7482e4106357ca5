"""Models of transformers that select keys: each call reads the keys that its top-k picked, and no router is one."""

from __future__ import annotations

from typing import Any

import latent_models
import pytest
import selecting_models
import torch
from pairs import pairs
from selecting_models import MODELS
from slow import slow_but
from torch.fx import GraphModule, Node
from transformers import DynamicCache, StaticCache

import tatten
from tatten.integrations.transformers import cache_kwargs
from tatten.passes import GraphReport, Rewritten, cost, rewrite

pytestmark = pytest.mark.drawn(2, "models")

BATCH, PROMPT = 2, 60
CACHES = {"static": lambda c: StaticCache(config=c, max_cache_len=80), "dynamic": lambda c: DynamicCache(config=c)}
FAST = [("deepseek_v32", "static", 1, True), ("minimax_m3_vl", "dynamic", 4, False), ("hy_v4", "static", 1, True)]
CASES = [*FAST, *pairs(list(MODELS), list(CACHES), [1, 4], [False, True])]


@pytest.fixture(autouse=True)
def _pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cost.RATES, "cpu", cost.Rates(1.0, 0.0, 1.0))


class Backend:
    """Rewrites graphs, and keeps the ops and the report."""

    def __init__(self) -> None:
        self.reports: list[GraphReport] = []
        self.ops: list[Node] = []
        self.scores: list[Node] = []

    def __call__(self, gm: GraphModule, example_inputs: list[torch.Tensor]):
        self.reports.append(rewrite(gm))
        gm.graph.lint()
        self.ops += [x for x in gm.graph.nodes if "tatten" in str(x.target) and "_attention" in str(x.target)]
        self.scores += [x for x in gm.graph.nodes if x.target is torch.ops.tatten.index_scores.default]
        return gm.forward


def step(
    model: Any, cache: str, q_len: int, padded: bool, backend: Backend | str | None, **captured: bool
) -> torch.Tensor:
    """The result of one step after a prefill, in eager mode without a backend."""
    past = CACHES[cache](model.config.get_text_config(decoder=True))
    torch.manual_seed(1)
    ids, mask = torch.randint(3, 60, (BATCH, PROMPT + q_len)), torch.ones(BATCH, PROMPT + q_len, dtype=torch.long)
    if padded:
        mask[0, :4] = 0
    torch._dynamo.reset()
    compiled = model if backend is None else torch.compile(model, backend=backend)
    with torch.no_grad(), torch._dynamo.config.patch(**captured):
        model(ids[:, :PROMPT], attention_mask=mask[:, :PROMPT], **cache_kwargs(past), use_cache=True)
        out = compiled(ids[:, PROMPT:], attention_mask=mask, **cache_kwargs(past), use_cache=True)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


@pytest.mark.parametrize(("name", "cache", "q_len", "padded"), slow_but(FAST, dict.fromkeys(CASES)))
def test_reads_what_a_top_k_picked(name: str, cache: str, q_len: int, padded: bool) -> None:
    pytest.importorskip(f"transformers.models.{name}", reason=f"this transformers has no {name}")
    spec, backend = MODELS[name], Backend()
    if cache == "static" and not spec.static:
        pytest.skip(f"transformers has no static cache for {name}")
    model = selecting_models.build(name, torch.float64)
    got = step(model, cache, q_len, padded, backend, **spec.captured)
    want = step(model, cache, q_len, padded, None)
    picked = [x for x in backend.ops if "indices" in x.kwargs]
    findings = [x for report in backend.reports for x in report.findings]
    assert len(picked) == spec.picked, findings
    assert len(backend.ops) == spec.picked + spec.read, findings
    assert {x.kwargs.get("index_block", 1) for x in picked} == {spec.block}
    assert {x.kwargs.get("rest_bias") is not None for x in picked} == {spec.finite}
    notes = [x.note for x in findings if isinstance(x, Rewritten)]
    assert sum("keys by top-k" in x for x in notes) == spec.picked, notes
    assert len(backend.scores) == spec.scored, findings
    assert all(isinstance(x, Rewritten) for x in findings if not x.attention), findings
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)  # their norms and indexers compute in float32
    assert want.abs().max() > 0.1


@pytest.mark.slow
def test_no_copy_of_index_keys_is_made_in_a_wider_dtype() -> None:
    pytest.importorskip("transformers.models.deepseek_v32")
    backend = Backend()
    step(selecting_models.build("deepseek_v32", torch.bfloat16), "static", 1, True, backend)
    assert [x.args[1].meta["example_value"].dtype for x in backend.scores] == [torch.bfloat16] * 2


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    """The backend itself, in float32: the logits are those of the model."""
    pytest.importorskip("transformers.models.deepseek_v32")
    model = selecting_models.build("deepseek_v32", torch.float32)
    with tatten.recording() as report:
        got = step(model, "static", 1, True, "tatten")
    assert sum(not x.attention for x in report.rewritten) == 2
    torch.testing.assert_close(got, step(model, "static", 1, True, None), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", ["static", pytest.param("dynamic", marks=pytest.mark.slow)])
def test_attention_in_eager_mode_is_read_so_too(cache: str) -> None:
    """Written out, with additive masks: rows without keys may be NaN, so that the mask itself is read at the picks."""
    pytest.importorskip("transformers.models.deepseek_v32")
    model = selecting_models.build("deepseek_v32", torch.float32, attn_implementation="eager")
    backend = Backend()
    got = step(model, cache, 1, True, backend)
    assert ["indices" in x.kwargs for x in backend.ops] == [True, True]
    torch.testing.assert_close(got, step(model, cache, 1, True, None), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["deepseek_v3", pytest.param("glm4_moe_lite", marks=pytest.mark.slow)])
def test_a_router_selects_no_keys(name: str) -> None:
    backend = Backend()
    step(latent_models.build(name, torch.float64), "static", 1, True, backend)
    assert ["indices" in x.kwargs for x in backend.ops] == [False, False]
    assert not any("picks" in x.note for report in backend.reports for x in report.findings)
