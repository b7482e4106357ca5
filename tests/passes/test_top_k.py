"""Top-k's whose picks only attention reads: the op that sorts nothing takes their place on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import capture
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.utils._pytree import tree_map_only

from tatten.passes import rewrite

B, HEADS, S, DIM, K = 2, 4, 8192, 32, 64
TOP_PICKS = torch.ops.tatten.top_picks.default


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, HEADS, n, DIM) for n in (1, S, S))
    return q, k, v, torch.randn(B, 1, S), torch.rand(B, 1, 1, S) < 0.9


def attend(q: Tensor, k: Tensor, v: Tensor, picks: Tensor, base: Tensor) -> Tensor:
    unpicked = picks.new_ones((B, 1, S), dtype=torch.bool).scatter(-1, picks.long(), False).unsqueeze(1)
    return F.scaled_dot_product_attention(q, k, v, base & ~unpicked)


def as_models_do(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, base: Tensor) -> Tensor:
    return attend(q, k, v, scores.topk(K, dim=-1).indices.to(torch.int32), base)


def as_on_cuda(gm: GraphModule) -> GraphModule:
    """Move the example values of a graph to a GPU: a machine without one can't run all of its ops on fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        for node in gm.graph.nodes:
            if "example_value" in node.meta:
                node.meta["example_value"] = tree_map_only(
                    Tensor,
                    lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda"),
                    node.meta["example_value"],
                )
    return gm


def rewritten(fn: Callable[..., Any], on_cuda: bool = True) -> tuple[GraphModule, str]:
    gm = capture(fn, *inputs())
    report = rewrite(as_on_cuda(gm) if on_cuda else gm)
    gm.graph.lint()
    return gm, report.note


def run(gm: GraphModule) -> Tensor:
    """Run a graph on the inputs, which it takes in an order of its own."""
    by_name = dict(zip(("q", "k", "v", "scores", "base"), inputs(), strict=True))
    return gm(*(by_name[x.name.strip("_")[2:]] for x in gm.graph.find_nodes(op="placeholder")))[0]


def targets(gm: GraphModule) -> list[Any]:
    return [x.target for x in gm.graph.nodes if x.op in ("call_function", "call_method")]


def test_picks_need_no_sort() -> None:
    gm, note = rewritten(as_models_do)
    assert note == "1 selection of keys without a sort"
    assert TOP_PICKS in targets(gm)
    assert "topk" not in targets(gm)
    assert torch.ops.tatten.decode_attention.default in targets(gm)
    (op,) = (x for x in gm.graph.nodes if x.target is torch.ops.tatten.decode_attention.default)
    picks = op.kwargs["indices"]
    assert picks.all_input_nodes[0].target is TOP_PICKS or picks.target is TOP_PICKS  # int32 as it is
    torch.testing.assert_close(run(gm), as_models_do(*inputs()), rtol=1e-5, atol=1e-5)


def test_many_rows_stay_with_topk_unsorted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tatten.passes.top_k.MOST_SCORES", B * S - 1)
    gm, note = rewritten(as_models_do)
    assert note == "1 selection of keys without a sort"
    assert TOP_PICKS not in targets(gm)
    (top_k,) = (x for x in gm.graph.nodes if x.target == "topk")
    assert top_k.kwargs == {"dim": -1, "sorted": False}
    torch.testing.assert_close(run(gm), as_models_do(*inputs()), rtol=1e-5, atol=1e-5)


def test_layers_share_a_selection() -> None:
    def two_layers(q, k, v, scores, base):
        picks = scores.topk(K).indices
        return attend(q, k, v, picks, base) + attend(q, v, k, picks, base)

    gm, note = rewritten(two_layers)
    assert note == "1 selection of keys without a sort"
    assert targets(gm).count(TOP_PICKS) == 1
    torch.testing.assert_close(run(gm), two_layers(*inputs()), rtol=1e-5, atol=1e-5)


def with_values(q, k, v, scores, base):
    top = scores.topk(K)
    return attend(q, k, v, top.indices, base) * top.values.mean()


def best_of_picks(q, k, v, scores, base):
    return attend(q, k, v, scores.topk(2 * K).indices[..., :K], base)


def returned(q, k, v, scores, base):
    picks = scores.topk(K).indices
    return attend(q, k, v, picks, base), picks


def smallest(q, k, v, scores, base):
    return attend(q, k, v, scores.topk(K, largest=False).indices, base)


def in_half(q, k, v, scores, base):
    return attend(q, k, v, scores.half().topk(K).indices, base)


@pytest.mark.parametrize("fn", [with_values, best_of_picks, returned, smallest, in_half])
def test_a_top_k_stays_where_its_order_may_matter(fn: Callable[..., Any]) -> None:
    gm, note = rewritten(fn)
    assert TOP_PICKS not in targets(gm)
    assert note == ""


def test_a_top_k_stays_on_a_cpu() -> None:
    gm, note = rewritten(as_models_do, on_cuda=False)
    assert TOP_PICKS not in targets(gm)
    assert note == ""


def test_a_top_k_of_few_scores_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tatten.passes.top_k.LEAST_SCORES", S + 1)
    assert TOP_PICKS not in targets(rewritten(as_models_do)[0])
