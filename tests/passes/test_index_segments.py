"""Index keys that are concatenated for their scores alone: each segment is scored where it is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import index_forms
import pytest
import torch
from expecttest import TestCase
from graphs import capture, listing, run_rewritten
from index_forms import D, H, deepseek_v32, exact
from index_graphs import assert_scores, ops, tensor_of
from torch import Tensor

import tatten
from tatten.passes import Declined, Rewritten, cost, rewrite
from tatten.passes.byte_sizes import shown_bytes

B, N, P, T = 2, 3, 80, 16  # prompts, samples of each, keys of a prompt and of a sample
ALL = P + T


def inputs(length: int = 1, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """Queries, keys of prompts and of samples, weights and which keys count: for one query none."""
    torch.manual_seed(0)
    query, weights = torch.randn(B * N, length, H, D).to(dtype), torch.randn(B * N, length, H)
    prompts, own = torch.randn(B, P, D).to(dtype), torch.randn(B * N, T, D).to(dtype)
    mask = torch.arange(ALL) < torch.randint(1, ALL, (B * N, length, 1))
    mask[0, 0] = False
    return query, prompts, own, weights, mask


def repeated(prompts: Tensor) -> Tensor:
    return prompts.unsqueeze(1).expand(-1, N, *[-1] * (prompts.dim() - 1)).flatten(0, 1)


def as_cached(prompts: Tensor, own: Tensor) -> Tensor:
    """As tatten's caches have it: one head, which is squeezed."""
    return torch.cat([repeated(prompts[:, None]), own[:, None]], dim=2).squeeze(1)


def three_levels(prompts: Tensor, own: Tensor) -> Tensor:
    system = prompts[:1, :16].expand(B * N, -1, -1)
    return torch.cat([system, repeated(prompts[:, 16:]), own], 1)


JOINED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[int]]] = {  # and how many rows each segment has
    "as cached": (as_cached, [B, B * N]),
    "interleaved": (lambda p, o: torch.cat((p.repeat_interleave(N, 0), o), dim=1), [B, B * N]),
    "one prompt": (lambda p, o: torch.cat((p[:1].expand(B * N, -1, -1), o), dim=1), [1, B * N]),
    "three levels": (three_levels, [1, B, B * N]),
    "nothing shared": (lambda p, o: torch.cat((repeated(p) * 1, o), dim=1), [B * N, B * N]),
    "prompts alone": (lambda p, o: repeated(torch.cat((p, p[:, :T]), 1)), [B, B]),
    "one segment": (lambda p, o: repeated(p.mT.repeat(1, 1, 2)[..., :ALL].mT.clone()), [B]),
}


def of_joined(join: Callable[[Tensor, Tensor], Tensor], form: Callable[..., Tensor] = deepseek_v32) -> Any:
    return lambda q, p, o, w, m: form(q, join(p, o), w, m)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("name", JOINED)
def test_segments_are_scored_where_they_are_stored(name: str, length: int) -> None:
    join, rows = JOINED[name]
    args = inputs(length)
    (finding,), gm, out = run_rewritten(of_joined(join), *args)
    assert isinstance(finding, Rewritten), finding
    found = ops(gm)
    assert len(found) == len(rows)
    assert finding.shapes.count(" k bfloat16") == len(rows)
    assert not any(x.numel() >= B * N * ALL * D for x in made_of(gm)), listing(gm)
    assert_scores(out, exact(args[0], join(*args[1:3]), *args[3:]))


def made_of(gm: torch.fx.GraphModule) -> list[Tensor]:
    values = [x.meta.get("example_value") for x in gm.graph.nodes if x.op != "placeholder"]
    return [x for x in values if isinstance(x, Tensor)]


def without_mask(q, k, w, m):
    return index_forms.weighted(w, torch.relu(index_forms.products(q, k) * index_forms.C))


MASKS = {
    "of all": lambda m: m[:1, :1],
    "of each query": lambda m: m[:1],
    "of each sequence": lambda m: m[:, :1],
    "one dim": lambda m: m[0, 0],
    "bias": lambda m: torch.zeros(m.shape).masked_fill(~m, -torch.inf),
}


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    query, prompts, own, weights, mask = inputs(3)
    mask = MASKS[name](mask)
    form = deepseek_v32 if mask.dtype == torch.bool else (lambda q, k, w, m: without_mask(q, k, w, m) + m)
    args = query, prompts, own, weights, mask
    _, gm, out = run_rewritten(of_joined(as_cached, form), *args)
    assert len(ops(gm)) == 2
    assert all("attn_mask" in x.kwargs for x in ops(gm))
    keys = as_cached(prompts, own)
    assert_scores(
        out, exact(query, keys, weights, mask.expand(B * N, 3, -1) if mask.dtype == torch.bool else mask == 0)
    )


def test_without_a_mask() -> None:
    args = inputs(3)
    _, gm, out = run_rewritten(of_joined(as_cached, without_mask), *args)
    assert ["attn_mask" in x.kwargs for x in ops(gm)] == [False, False]
    assert_scores(out, exact(args[0], as_cached(*args[1:3]), args[3], None))


def test_dynamic_lengths() -> None:
    """One graph for prompts of all lengths."""
    graphs = []

    def backend(gm, _):
        graphs.append((gm, rewrite(gm).findings))
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(of_joined(as_cached), backend=backend, dynamic=None)
    for length in (80, 40, 70):
        query, prompts, own, weights, mask = inputs()
        args = query, prompts[:, :length].contiguous(), own, weights, mask[..., : length + T].contiguous()
        with torch.no_grad():
            assert_scores(compiled(*args), exact(query, as_cached(*args[1:3]), weights, args[4]))
    assert [len(ops(gm)) for gm, _ in graphs] == [2, 2]
    assert "keys, a dynamic number" in graphs[1][1][0].note


@pytest.mark.parametrize("reader", ["keys", "selected"])
def test_keys_that_exist_anyway_are_read_as_one(reader: str) -> None:
    """Something else reads what was concatenated; or an index selected the rows of a prompt."""

    def fn(q, p, o, w, m):
        if reader == "selected":
            rows = torch.tensor([1, 0, 1, 1, 0, 0])
            return deepseek_v32(q, torch.cat((p[rows], o), 1), w, m), q
        keys = torch.cat((repeated(p) * 1, o), 1)
        return deepseek_v32(q, keys, w, m), keys

    args = inputs()
    _, gm, (out, _) = run_rewritten(fn, *args)
    keys = fn(*args)[1] if reader == "keys" else torch.cat((args[1][[1, 0, 1, 1, 0, 0]], args[2]), 1)
    assert len(ops(gm)) == (1 if reader == "keys" else 2)
    if reader == "selected":
        assert [tensor_of(x.args[1]).shape[0] for x in ops(gm)] == [B * N] * 2
    assert_scores(out, exact(args[0], keys, *args[3:]))


def test_a_write_before_the_scores_are_used() -> None:
    """The copy is as old as the concatenation, and is read."""

    def fn(q, p, o, w, m):
        own = o.clone()
        products = index_forms.products(q, as_cached(p, own))
        own[:, 0] = 1
        return index_forms.left(index_forms.weighted(w, torch.relu(products)), m)

    args = inputs()
    (finding,), gm, out = run_rewritten(fn, *args)
    assert not isinstance(finding, Declined), finding
    assert len(ops(gm)) == 1
    assert_scores(out, exact(args[0], as_cached(*args[1:3]), *args[3:], scale=1))


def test_cost_and_report(monkeypatch: pytest.MonkeyPatch) -> None:
    args = inputs()
    with torch.no_grad():
        text = str(tatten.explain(of_joined(as_cached), *args))
    assert f"k bfloat16[{B}, 1, {P}, {D}] k bfloat16[{B * N}, 1, {T}, {D}] w float32" in text
    monkeypatch.setitem(cost.RATES, "cpu", cost.Rates(bytes_per_us=1e3, segment_us=200.0))
    (finding,), _, _ = run_rewritten(of_joined(as_cached), *args)
    one, scores, stored = B * N * ALL * D, B * N * ALL * 4, (B * P + B * N * T) * D
    moved, read = one * (2 + 2 * 4) + scores * (2 * H + 1) + 2 * stored + 2 * one, 2 * stored + 3 * scores
    assert f"by moving {shown_bytes(read)} instead of {shown_bytes(moved)}, about 400 us more" in finding.decline.detail


@pytest.mark.parametrize("name", ["as cached", "three levels"])
def test_exported(name: str) -> None:
    class Scores(torch.nn.Module):
        def forward(self, *args: Tensor) -> Tensor:
            return of_joined(JOINED[name][0])(*args)

    args = inputs(3)
    with torch.no_grad():
        program = torch.export.export(Scores(), args)
        rewritten = tatten.rewrite(program)
    assert len(ops(rewritten.graph_module)) == len(JOINED[name][1])
    assert_scores(rewritten.module()(*args), exact(args[0], JOINED[name][0](*args[1:3]), *args[3:]))


class TestGraphs(TestCase):
    def test_as_cached(self) -> None:
        gm = capture(of_joined(as_cached), *inputs(3))
        rewrite(gm)
        self.assertExpectedInline(
            listing(gm),
            """\
getitem = getitem(l_p_, (slice(None, None, None), None))
getitem_1 = getitem(l_o_, (slice(None, None, None), None))
split_with_sizes = split_with_sizes(l_m_, [80, 16], 2)
squeeze_2 = squeeze(getitem, 1)
squeeze_3 = squeeze(getitem_1, 1)
unflatten = unflatten(l_q_, 0, (2, 3))
flatten_1 = flatten(unflatten, 1, 2)
unflatten_1 = unflatten(l_w_, 0, (2, 3))
flatten_2 = flatten(unflatten_1, 1, 2)
getitem_2 = getitem(split_with_sizes, 0)
expand_1 = expand(getitem_2, 6, 3, -1)
unflatten_2 = unflatten(expand_1, 0, (2, 3))
flatten_3 = flatten(unflatten_2, 1, 2)
index_scores_default = index_scores.default(flatten_1, squeeze_2, flatten_2, scale=0.25, attn_mask=flatten_3)
unflatten_3 = unflatten(index_scores_default, 1, (-1, 3))
flatten_4 = flatten(unflatten_3, 0, 1)
getitem_3 = getitem(split_with_sizes, 1)
index_scores_default_1 = index_scores.default(l_q_, squeeze_3, l_w_, scale=0.25, attn_mask=getitem_3)
cat_1 = cat([flatten_4, index_scores_default_1], -1)
return (cat_1)""",
        )
