"""Keys that a top-k selects among those of a shared prefix and of suffixes: each segment is read by its own indices."""

from __future__ import annotations

from collections.abc import Callable

import expecttest
import pick_forms
import pytest
import torch
import torch.nn.functional as F
from graphs import capture, listing, run_rewritten
from pick_forms import BLOCK, KV, LEFT, TAKEN, WITH_DUPLICATES, B, D, H, L, S, and_not, but, inputs, top
from torch import Tensor
from torch.fx import Node

import tatten
from tatten.ops.picks import key_indices, without_duplicates
from tatten.passes import Rewritten, cost, rewrite

REMARK = "not read by indices [picks]: "
FINITE = {"inverted_floats", "bias_of_lowest", "lowest_of_both", "chosen_by_where", "biases_of_their_own"}
FINITE |= {"rows_without_keys", "in_blocks"}  # the bias of keys that aren't picked
OP = torch.ops.tatten.bifurcated_attention.default
Form = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cost.RATES, "cpu", cost.Rates(1.0, 0.0, 1.0))


def joined(form: Form) -> Callable[..., Tensor]:
    """Attention to prefixes of several sequences each and to suffixes, with the mask that `form` makes."""

    def fn(query, scores, base, keys, values):
        parts = keys, values
        segments = [[x.repeat_interleave(B // len(x), dim=0) if len(x) < B else x for x in part] for part in parts]
        key, value = (torch.cat(x, dim=2).repeat_interleave(H // KV, dim=1) for x in segments)
        return F.scaled_dot_product_attention(query, key, value, form(scores, base))

    return fn


def tree(*lengths: int, rows: tuple[int, ...] = (1, B)) -> tuple[object, ...]:
    """A query, scores, the keys that count, and keys and values of segments with so many rows."""
    query, key, value, scores, base = inputs()
    keys, values = ([x[:n] for n, x in zip(rows, y.split(lengths, dim=2), strict=True)] for y in (key, value))
    return query, scores, base, [x.clone() for x in keys], [x.clone() for x in values]


def the_op(gm: torch.fx.GraphModule) -> Node:
    (op,) = gm.graph.find_nodes(op="call_function", target=OP)
    return op


@pytest.mark.drawn(6)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", [x for x in TAKEN if x not in FINITE])
def test_takes(name: str, dynamic: bool) -> None:
    fn, args = joined(TAKEN[name]), tree(99, S - 99)
    if dynamic:
        for x, dim in ((args[1], 2), (args[2], 2), (args[3][0], 2), (args[4][0], 2)):
            torch._dynamo.maybe_mark_dynamic(x, dim)
    (finding,), gm, out = run_rewritten(fn, *args)
    assert isinstance(finding, Rewritten), finding
    op = the_op(gm)
    assert [x.meta["example_value"].shape[0] for x in op.args[1]] == [1, B]
    assert len(op.kwargs["indices"]) == 2, finding.note
    assert "keys by " in finding.note
    assert (out - fn(*tree(99, S - 99))).abs().max() < 1e-12
    removed = sum(x.target is without_duplicates for x in gm.graph.nodes)
    assert removed <= 1
    assert removed >= (name in WITH_DUPLICATES)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", [*sorted(FINITE), *LEFT])
def test_leaves(name: str) -> None:
    fn = joined({**TAKEN, **LEFT}[name])
    (finding,), gm, out = run_rewritten(fn, *tree(99, S - 99))
    assert "indices" not in the_op(gm).kwargs
    assert REMARK in finding.note
    assert ("the mean of the values of all segments" in finding.note) == (name in FINITE)
    assert (out - fn(*tree(99, S - 99))).abs().max() < 1e-12


def blocks(scores: Tensor, base: Tensor) -> Tensor:
    """Blocks of keys for each kv head, in a bool mask."""
    best = torch.stack((scores, -scores), dim=1).masked_fill(~base[:, None], -torch.inf)
    picks = best.unflatten(-1, (S // BLOCK, BLOCK)).amax(-1).topk(pick_forms.K, -1)[1]
    kept = torch.zeros(B, KV, L, S // BLOCK, dtype=torch.bool).scatter(-1, picks, True)
    return kept.repeat_interleave(BLOCK, dim=-1).repeat_interleave(H // KV, dim=1) & base[:, None]


@pytest.mark.parametrize("length, aligned", [(100, True), (98, False)])
def test_blocks_begin_where_a_segment_does_or_are_read_key_by_key(length: int, aligned: bool) -> None:
    fn = joined(blocks)
    _, gm, out = run_rewritten(fn, *tree(length, S - length))
    op = the_op(gm)
    assert op.kwargs.get("index_block", 1) == (BLOCK if aligned else 1)
    assert any(x.target is key_indices for x in gm.graph.nodes) != aligned
    assert [x.meta["example_value"].shape[1] for x in op.kwargs["indices"]] == [KV, KV]
    assert (out - fn(*tree(length, S - length))).abs().max() < 1e-12


@pytest.mark.parametrize("lengths", [(40, 50, 38), (1, 126, 1)])
def test_several_levels(lengths: tuple[int, ...]) -> None:
    fn = joined(and_not)
    _, gm, out = run_rewritten(fn, *tree(*lengths, rows=(1, 1, B)))
    assert len(the_op(gm).kwargs["indices"]) == 3
    assert (out - fn(*tree(*lengths, rows=(1, 1, B)))).abs().max() < 1e-12


def test_a_selection_of_all_keys_is_dropped() -> None:
    fn = joined(pick_forms.every_key)
    (finding,), gm, out = run_rewritten(fn, *tree(99, S - 99))
    assert "indices" not in the_op(gm).kwargs
    assert not any("scatter" in str(x.target) for x in gm.graph.nodes)
    assert finding.note.startswith(f"{S} of {S} keys by top-k, which are all")
    assert (out - fn(*tree(99, S - 99))).abs().max() < 1e-12


def test_selected_rows() -> None:
    """Each sequence reads the prefix that an index says."""
    rows = torch.tensor([1, 0, 1])

    def fn(query, scores, base, keys, values):
        pairs = [x[0].index_select(0, rows) for x in (keys, values)], [x[1] for x in (keys, values)]
        key, value = (torch.cat(x, dim=2).repeat_interleave(H // KV, dim=1) for x in zip(*pairs, strict=True))
        return F.scaled_dot_product_attention(query, key, value, and_not(scores, base))

    args = tree(99, S - 99, rows=(2, B))
    _, gm, out = run_rewritten(fn, *args)
    assert len(the_op(gm).kwargs["indices"]) == 2
    assert (out - fn(*args)).abs().max() < 1e-12


def layers(query, scores, base, keys, values):
    """Two layers share the indices, which may name a key twice."""
    picks = torch.cat((top(scores, base), top(scores, base)), dim=-1).to(torch.int32)
    key, value = (torch.cat((x[0].expand(B, -1, -1, -1), x[1]), dim=2) for x in (keys, values))
    key, value = (x.repeat_interleave(H // KV, dim=1) for x in (key, value))
    for _ in range(2):
        query = F.scaled_dot_product_attention(query, key, value, base[:, None] & ~but(picks, scores))
    return query


def test_layers_share_the_indices_of_each_segment() -> None:
    _, gm, out = run_rewritten(layers, *tree(99, S - 99))
    first, second = gm.graph.find_nodes(op="call_function", target=OP)
    assert first.kwargs["indices"] == second.kwargs["indices"]
    assert sum(x.target is without_duplicates for x in gm.graph.nodes) == 1
    assert (out - layers(*tree(99, S - 99))).abs().max() < 1e-12


@pytest.mark.parametrize("stored", [KV, H])
def test_picks_for_each_kv_head_fit_segments_of_as_many(stored: int) -> None:
    def fn(query, scores, base, keys, values):
        pairs = [[x.repeat_interleave(H // x.shape[1], dim=1) for x in pair] for pair in (keys, values)]
        key, value = (torch.cat((first.expand(B, -1, -1, -1), last), dim=2) for first, last in pairs)
        return F.scaled_dot_product_attention(query, key, value, blocks(scores, base))

    args = tree(100, S - 100)
    for pair in args[3:]:
        pair[0] = pair[0].repeat_interleave(stored // KV, dim=1)
    (finding,), gm, out = run_rewritten(fn, *args)
    assert ("indices" in the_op(gm).kwargs) == (stored == KV)
    assert (REMARK in finding.note) == (stored == H)
    assert (out - fn(*args)).abs().max() < 1e-12


def test_the_same_bits_in_every_batch() -> None:
    fn, args = joined(and_not), tree(99, S - 99)
    gm = capture(fn, *args)
    (finding,) = rewrite(gm, batch_invariant=True).findings
    assert the_op(gm).kwargs["batch_invariant"], finding
    assert len(the_op(gm).kwargs["indices"]) == 2
    torch._dynamo.reset()
    with torch.no_grad():
        step = torch.compile(fn, backend="tatten", options={"inner": "eager", "batch_invariant": True})
        assert (step(*args) - fn(*args)).abs().max() < 1e-12


def test_a_cache_that_was_forked() -> None:
    torch.manual_seed(0)
    n, prompt, capacity = 3, 90, 40
    cache = tatten.SharedPrefixCache(num_layers=1)
    cache.update(0, *torch.randn(2, 1, KV, prompt, D, dtype=torch.float64))
    cache = cache.fork(n, capacity=capacity)
    scores = torch.randn(n, 1, prompt + capacity)

    def step(query, key, value):
        mask = cache.mask()
        keys, values = cache.update(0, key, value)
        picks = scores.masked_fill(~mask[:, 0], -torch.inf).topk(7, -1).indices
        chosen = torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, picks, True).unsqueeze(1)
        keys, values = (x.repeat_interleave(H // KV, dim=1) for x in (keys, values))
        return F.scaled_dot_product_attention(query, keys, values, mask & chosen)

    compiled = torch.compile(step, backend="tatten", options={"inner": "eager"}, fullgraph=True)
    torch._dynamo.reset()
    with torch.no_grad(), tatten.recording() as report:
        for _ in range(3):
            new = torch.randn(n, H, 1, D, dtype=torch.float64), *torch.randn(2, n, KV, 1, D, dtype=torch.float64)
            other = cache.select(range(n))
            out = compiled(*new)
            cache, kept = other, cache
            want = step(*new)
            cache = kept
            assert (out - want).abs().max() < 1e-12
    assert "7 of 130 keys by top-k" in str(report)


class TestGraphs(expecttest.TestCase):
    def test_a_prefix_and_suffixes(self) -> None:
        gm = capture(joined(and_not), *tree(99, S - 99))
        rewrite(gm)
        self.assertExpectedInline(
            listing(gm),
            """\
getitem = getitem(l_base_, (slice(None, None, None), None))
invert = invert(l_base_)
masked_fill = masked_fill(l_scores_, invert, -inf)
topk = topk(masked_fill, 7, -1)
getitem_2 = getitem(topk, 1)
to = to(getitem_2, torch.int32)
split = split(getitem, [99, 29], -1)
getitem_3 = getitem(split, 0)
getitem_4 = getitem(split, 1)
unsqueeze_1 = unsqueeze(to, 1)
counted_from = counted_from(unsqueeze_1, 99)
bifurcated_attention_default = bifurcated_attention.default(l_query_, [l_keys_0_, l_keys_1_], [l_values_0_, l_values_1_], [getitem_3, getitem_4], [None, None], None, indices=[unsqueeze_1, counted_from])
getitem_5 = getitem(bifurcated_attention_default, 0)
return (getitem_5)""",
        )

    def test_a_prefix_of_any_length(self) -> None:
        args = tree(99, S - 99)
        for x, dim in ((args[1], 2), (args[2], 2), (args[3][0], 2), (args[4][0], 2)):
            torch._dynamo.mark_dynamic(x, dim)
        gm = capture(joined(pick_forms.duplicates), *args)
        rewrite(gm)
        self.assertExpectedInline(
            listing(gm),
            """\
invert = invert(l_base_)
masked_fill = masked_fill(l_scores_, invert, -inf)
topk = topk(masked_fill, 7, -1)
picks = getitem(topk, 1)
cat_2 = cat((picks, picks), -1)
sym_sum = sym_sum([29, s32])
to = to(cat_2, torch.int32)
unsqueeze_1 = unsqueeze(to, 1)
size_1 = size(l_keys_0_, 2)
add = add(size_1, 29)
without_duplicates = without_duplicates(unsqueeze_1, add)
size_2 = size(l_keys_0_, 2)
counted_from = counted_from(without_duplicates, size_2)
bifurcated_attention_default = bifurcated_attention.default(l_query_, [l_keys_0_, l_keys_1_], [l_values_0_, l_values_1_], [None, None], [None, None], None, indices=[without_duplicates, counted_from])
getitem_5 = getitem(bifurcated_attention_default, 0)
return (getitem_5)""",
        )
