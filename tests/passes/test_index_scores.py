"""The scores of an indexer: forms that become one op, and others, which stay as they are, with a reason."""

from __future__ import annotations

import expecttest
import index_forms
import pytest
import torch
from graphs import capture, listing, run_rewritten
from index_forms import LEFT, OTHERS, TAKEN, UNMASKED, B, D, H, L, S, exact, inputs
from index_graphs import assert_scores, ops, tensor_of
from torch.fx import Node

import tatten
from tatten.passes import Declined, Rewritten, cost, rewrite
from tatten.passes.byte_sizes import shown_bytes

DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.drawn(10)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", TAKEN)
def test_takes(name: str, dynamic: bool, length: int, dtype: torch.dtype) -> None:
    form, args = TAKEN[name], inputs(dtype, length=length)
    fixed = name in ("additive", "repeated", "columns")  # forms that are written for one size
    if dynamic and not fixed:
        torch._dynamo.maybe_mark_dynamic(args[1], 1)
        torch._dynamo.maybe_mark_dynamic(args[3], 2)
    (finding,), gm, out = run_rewritten(form, *args)
    assert isinstance(finding, Rewritten), finding
    assert not finding.attention
    (op,) = ops(gm)
    assert tensor_of(op.args[0]).dtype == tensor_of(op.args[1]).dtype == dtype
    assert ("attn_mask" in op.kwargs) == (name not in UNMASKED), listing(gm)
    wide = [x for x in gm.graph.nodes if str(x.target) in ("float", "to") and x.users and _numel(x) >= B * S * D]
    assert not wide or name == "copies", listing(gm)
    weights = args[2].bfloat16() if name == "narrow_weights" else args[2]
    assert_scores(out, exact(*args[:2], weights, args[3]))


def _numel(node: Node) -> int:
    value = node.meta.get("example_value")
    return int(value.numel()) if isinstance(value, torch.Tensor) else 0


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", {**TAKEN, **{name: form for name, (form, *_) in LEFT.items()}, **OTHERS})
def test_exported(name: str) -> None:
    form = {**TAKEN, **{x: LEFT[x][0] for x in LEFT}, **OTHERS}[name]

    class Scores(torch.nn.Module):
        def forward(self, q, k, w, m):
            return form(q, k, w, m)

    with torch.no_grad():
        program = torch.export.export(Scores(), inputs())
        with tatten.recording() as report:
            rewritten = tatten.rewrite(program)
        functional = {"keys_written", "copies_written", "mask_written", "relu_kept_in_place", "into_a_buffer"}
        assert bool(report.rewritten) == bool(ops(rewritten.graph_module))
        if name not in functional:  # what is read before a write is told apart, or there is no write
            assert bool(report.rewritten) == (name in TAKEN), report
        got, want = rewritten.module()(*inputs()), program.module()(*inputs())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)


@pytest.mark.drawn(6)
@pytest.mark.parametrize("name", LEFT)
def test_leaves(name: str) -> None:
    form, code, detail = LEFT[name]
    gm = capture(form, *inputs())
    before = listing(gm)
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Declined), finding
    assert (finding.decline.reason.value, finding.attention) == (code, False)
    assert detail in finding.decline.detail
    assert listing(gm) == before


@pytest.mark.parametrize("name", OTHERS)
def test_other_products_are_no_scores(name: str) -> None:
    gm = capture(OTHERS[name], *inputs())
    assert rewrite(gm).findings == ()
    assert not ops(gm)


def test_unmasked_scores_may_be_read_too() -> None:
    def fn(q, k, w, m):
        scores = index_forms.weighted(w, torch.relu(index_forms.products(q, k)))
        return scores, index_forms.left(scores, m)

    args = inputs()
    _, gm, (scores, masked) = run_rewritten(fn, *args)
    (op,) = ops(gm)
    assert "attn_mask" not in op.kwargs
    assert_scores(scores, exact(*args[:3], None, scale=1))
    assert_scores(masked, exact(*args, scale=1))


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4"])
def test_scales_that_are_inputs(name: str) -> None:
    """Under `dynamic=True` numbers of modules are inputs; after relu their sign is guarded on."""

    class Scores(torch.nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, q, k, w, m):
            products = index_forms.products(q, k)
            scores = (products * self.scale).relu() if name == "deepseek_v32" else products.relu() * self.scale
            return index_forms.left(index_forms.weighted(w, scores), m)

    args, graphs = inputs(length=1), []

    def backend(gm, _):
        graphs.append((gm, rewrite(gm).findings))
        return gm.forward

    torch._dynamo.reset()
    module = Scores(0.25)
    compiled = torch.compile(module, backend=backend, dynamic=True)
    with torch.no_grad():
        for scale in (0.25, 0.5, -1.0):
            module.scale = scale
            got, want = compiled(*args), module(*args)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)
    taken = [isinstance(finding, Rewritten) for _, (finding,) in graphs]
    assert taken[0]
    assert all(taken) == (name == "deepseek_v32")


def test_prefills_and_training_stay() -> None:
    codes = []
    for grad, length in ((False, 32), (True, L)):
        query, key, weights, mask = inputs(length=length)
        gm = capture(index_forms.deepseek_v32, query, key, weights.requires_grad_(grad), mask, grad=grad)
        (finding,) = rewrite(gm).findings
        codes.append(finding.decline.reason.value)
    assert codes == ["q_len", "requires_grad"]


def test_autocast_rounds_products() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        (finding,), _, out = run_rewritten(index_forms.deepseek_v32, *inputs())
        want = index_forms.deepseek_v32(*inputs())
    assert finding.decline.reason.value == "index_scores"
    assert "bfloat16" in finding.decline.detail
    assert torch.equal(out, want)


def test_vmap() -> None:
    fn = torch.vmap(lambda q, k, w: torch.relu(q.float() @ k.float().mT[:, None]).mul(w[..., None]).sum(2))
    args = [torch.stack([x, x]) for x in inputs()[:3]]
    findings, gm, _ = run_rewritten(fn, *args)
    assert not ops(gm)
    assert {x.decline.reason.value for x in findings} <= {"torch_func"}


def test_few_keys_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cost.RATES, "cpu", cost.Rates(bytes_per_us=1e3, segment_us=200.0))
    (finding,), _, _ = run_rewritten(index_forms.deepseek_v32, *inputs())
    assert finding.decline.reason.value == "index_small"
    keys, scores = B * S * D, B * L * S
    moved, read = keys * (2 + 2 * 4) + scores * 4 * (2 * H + 1), keys * 2 + scores * 4
    assert f"by moving {shown_bytes(read)} instead of {shown_bytes(moved)}" in finding.decline.detail
    args = inputs()
    torch._dynamo.mark_dynamic(args[1], 1)
    torch._dynamo.mark_dynamic(args[3], 2)
    (finding,), _, _ = run_rewritten(index_forms.deepseek_v32, *args)
    assert isinstance(finding, Rewritten)
    assert "weighed for 4096 keys, a dynamic number" in finding.note


def test_report() -> None:
    def fn(q, k, w, m):
        return index_forms.deepseek_v32(q, k, w, m).topk(4, -1).indices

    with torch.no_grad():
        text = str(tatten.explain(fn, *inputs()))
    assert "0 of 0 attention calls rewritten, and the scores of 1 of 1 indexers" in text
    assert "call: tatten.index_scores.default" in text
    assert "with  q bfloat16[2, 3, 4, 16] k bfloat16[2, 128, 16] w float32[2, 3, 4] mask bool[2, 3, 128]" in text
    assert "moved 67 KiB per step before, at most 11 KiB now" in text


def picked(q, k, w, m, query, key, value):
    """The picks are proven by the op's result as by the program's own."""
    scores = tatten.index_scores(q, k, w, scale=0.25, attn_mask=m)
    picks = scores.topk(4, -1).indices
    kept = torch.zeros(B, L, S, dtype=torch.bool).scatter(-1, picks, True) & m
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, kept[:, None])


def picked_by_program(q, k, w, m, query, key, value):
    picks = index_forms.deepseek_v32(q, k, w, m).topk(4, -1).indices
    kept = torch.zeros(B, L, S, dtype=torch.bool).scatter(-1, picks, True) & m
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, kept[:, None])


@pytest.mark.parametrize("fn", [picked, picked_by_program])
def test_picks_of_the_ops_scores_are_proven(fn) -> None:
    torch.manual_seed(1)
    args = (*inputs(), torch.randn(B, 4, L, D), *torch.randn(2, B, 2, S, D))
    findings, gm, out = run_rewritten(fn, *args)
    assert [x.note for x in findings if x.attention] == [f"4 of {S} keys by top-k"]
    assert len(ops(gm)) == 1
    (attention,) = (x for x in gm.graph.nodes if "decode_attention" in str(x.target))
    assert not any("scatter" in str(x.target) for x in gm.graph.nodes)
    assert attention.kwargs["indices"] is not None
    torch.testing.assert_close(out, fn(*args), rtol=1e-5, atol=1e-5, equal_nan=True)


class TestGraphs(expecttest.TestCase):
    def test_deepseek_v32(self) -> None:
        gm = capture(lambda *args: index_forms.deepseek_v32(*args).topk(4, -1).indices, *inputs())
        rewrite(gm)
        self.assertExpectedInline(
            listing(gm),
            """\
index_scores_default = index_scores.default(l_args_0_, l_args_1_, l_args_2_, scale=0.25, attn_mask=l_args_3_)
topk = topk(index_scores_default, 4, -1)
getitem_1 = getitem(topk, 1)
return (getitem_1)""",
        )

    def test_deepseek_v4(self) -> None:
        gm = capture(index_forms.deepseek_v4, *inputs())
        rewrite(gm)
        self.assertExpectedInline(
            listing(gm),
            """\
index_scores_default = index_scores.default(l_q_, l_k_, l_w_, scale=0.25, attn_mask=l_m_)
return (index_scores_default)""",
        )

    def test_heads_first(self) -> None:
        gm = capture(index_forms.heads_first, *inputs())
        rewrite(gm)
        self.assertExpectedInline(
            listing(gm),
            """\
index_scores_default = index_scores.default(l_q_, l_k_, l_w_, scale=0.25, attn_mask=l_m_)
return (index_scores_default)""",
        )
