"""Keys that a top-k selects: masks that are read by its indices, and others, which are read as they are."""

from __future__ import annotations

from collections.abc import Callable

import expecttest
import pick_forms
import pytest
import torch
import torch.nn.functional as F
from graphs import capture, listing, run_rewritten
from pick_forms import (
    KV,
    LEFT,
    READ_BEFORE_A_WRITE,
    SENTINELS,
    TAKEN,
    WITH_DUPLICATES,
    B,
    K,
    L,
    S,
    attend,
    but,
    inputs,
    lowest,
    top,
)
from torch import Tensor
from torch.fx import GraphModule, Node

import tatten
from tatten.ops.picks import without_duplicates
from tatten.passes import Rewritten, cost, rewrite

REMARK = "not read by indices [picks]: "


@pytest.fixture(autouse=True)
def _pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cost.RATES, "cpu", cost.Rates(1.0, 0.0, 1.0))


def ops(gm: GraphModule) -> list[Node]:
    return [x for x in gm.graph.nodes if "tatten" in str(x.target) and "attention" in str(x.target)]


@pytest.mark.drawn(8)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", TAKEN)
def test_takes(name: str, dynamic: bool) -> None:
    fn, args = attend(TAKEN[name]), inputs()
    if dynamic:
        for x, dim in zip(args[1:], (2, 2, 2, 2), strict=True):
            torch._dynamo.maybe_mark_dynamic(x, dim)
    (finding,), gm, out = run_rewritten(fn, *args)
    assert isinstance(finding, Rewritten), finding
    assert (f"{KV}, {S}, " not in finding.shapes) == dynamic
    (op,) = ops(gm)
    assert "indices" in op.kwargs, finding.note
    assert (out - fn(*inputs())).abs().max() < 1e-12
    removed = any(x.target is without_duplicates for x in gm.graph.nodes)
    assert removed == (name in WITH_DUPLICATES or (dynamic and name in SENTINELS))


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", [x for x in TAKEN if x not in ("biases_of_their_own", "behind_a_window")])
def test_the_mask_of_a_selection_is_made_no_longer(name: str) -> None:
    _, gm, _ = run_rewritten(attend(TAKEN[name]), *inputs())
    assert not any("scatter" in str(x.target) for x in gm.graph.nodes), listing(gm)


@pytest.mark.drawn(6)
@pytest.mark.parametrize("name", LEFT)
def test_leaves(name: str) -> None:
    fn = attend(LEFT[name])
    (finding,), gm, out = run_rewritten(fn, *inputs())
    assert isinstance(finding, Rewritten), finding
    (op,) = ops(gm)
    assert "indices" not in op.kwargs
    assert (out - fn(*inputs())).abs().max() < 1e-12
    assert REMARK in finding.note


@pytest.mark.drawn(6)
@pytest.mark.parametrize("name", {**TAKEN, **LEFT})
def test_exported(name: str) -> None:
    class Attend(torch.nn.Module):
        def forward(self, *args):
            return attend({**TAKEN, **LEFT}[name])(*args)

    with torch.no_grad():
        program = torch.export.export(Attend(), inputs())
        with tatten.recording() as report:
            rewritten = tatten.rewrite(program)
        assert len(report.rewritten) == 1, report
        (op,) = ops(rewritten.graph_module)
        # Functional graphs tell what is read before a write from what is read after it.
        assert ("indices" in op.kwargs) == (name in TAKEN or name in READ_BEFORE_A_WRITE), report
        assert (rewritten.module()(*inputs()) - program.module()(*inputs())).abs().max() < 1e-12


def test_a_selection_of_all_keys_is_dropped() -> None:
    fn = attend(pick_forms.every_key)
    (finding,), gm, out = run_rewritten(fn, *inputs())
    (op,) = ops(gm)
    assert "indices" not in op.kwargs
    assert not any("scatter" in str(x.target) for x in gm.graph.nodes)
    assert (out - fn(*inputs())).abs().max() < 1e-12
    assert finding.note.startswith(f"{S} of {S} keys by top-k, which are all")


@pytest.mark.parametrize("k, taken", [(S // 4, True), (S // 4 + 1, False)])
def test_few_keys_are_read_in_order(k: int, taken: bool) -> None:
    fn = attend(lambda scores, base: base[:, None] & ~but(top(scores, base, k), scores))
    (finding,), gm, out = run_rewritten(fn, *inputs())
    (op,) = ops(gm)
    assert ("indices" in op.kwargs) == taken
    assert (out - fn(*inputs())).abs().max() < 1e-12
    assert finding.note.startswith(f"{k} of {S} keys by top-k" if taken else "")
    assert ("read all of them in order" in finding.note) != taken


def masked(scores):
    best, picks = scores.topk(K, -1)
    return picks, best < 1


def filled_within(scores):
    picks, low = masked(scores)
    return picks.masked_fill(low, 3)


def replaced_within(scores):
    picks, low = masked(scores)
    return torch.where(low, torch.full_like(picks, 3), picks)


def written(scores):
    picks = scores.topk(K, -1)[1]
    picks[..., 0] = picks[..., 1]
    return picks


DISTINCT = {
    "topk": lambda x: x.topk(K, -1)[1],
    "sort": lambda x: x.sort(-1)[1][..., :K],
    "argsort": lambda x: x.argsort(-1, descending=True)[..., -K:],
    "every other": lambda x: x.topk(2 * K, -1)[1][..., ::2],
    "one row for all": lambda x: x[:, :1].topk(K, -1)[1].expand(B, L, K),
    "reshaped": lambda x: x.flatten(0, 1).topk(K, -1)[1].view(B, L, K),
    "columns of dims in front": lambda x: x[:, None].topk(K, -1)[1][:, 0],
}
REPEATED = {
    "of another dim": lambda x: x[..., :K].topk(L, 1)[1],
    "modulo": lambda x: x.topk(K, -1)[1] % 3,
    "transposed": lambda x: x.topk(L, -1)[1].transpose(1, 2),
    "one for all": lambda x: x.topk(K, -1)[1][..., :1].expand(B, L, K),
    "columns as rows": lambda x: x[:, None].topk(K, -1)[1].expand(B, K, L, K)[..., 0].transpose(1, 2),
    "filled within": filled_within,
    "replaced within": replaced_within,
    "written": written,
    "too narrow": lambda x: x.topk(K, -1)[1].to(torch.int8).long(),
    "values": lambda x: x.topk(K, -1)[0].long().clamp(0, 5),
}


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", {**DISTINCT, **REPEATED})
def test_each_key_counts_once(name: str) -> None:
    def mask(scores, base):
        return torch.zeros(B, L, S, dtype=torch.bool).scatter(-1, {**DISTINCT, **REPEATED}[name](scores), True)[:, None]

    _, gm, out = run_rewritten(attend(mask), *inputs())
    (op,) = ops(gm)
    assert "indices" in op.kwargs
    assert any(x.target is without_duplicates for x in gm.graph.nodes) == (name in REPEATED)
    assert (out - attend(mask)(*inputs())).abs().max() < 1e-12


def layers(query, key, value, scores, base):
    """Two layers share the indices, as in GLM 5: each makes a mask of its own."""
    picks, base = torch.cat((top(scores, base), top(scores, base)), dim=-1).to(torch.int32), base[:, None]
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    for _ in range(2):
        query = F.scaled_dot_product_attention(query, key, value, base & ~but(picks, scores))
    return query


def test_layers_share_indices() -> None:
    findings, gm, out = run_rewritten(layers, *inputs())
    first, second = ops(gm)
    assert first.kwargs["indices"] is second.kwargs["indices"]
    assert first.args[3] is second.args[3]
    assert sum(x.target is without_duplicates for x in gm.graph.nodes) == 1
    assert (out - layers(*inputs())).abs().max() < 1e-12
    assert all(x.note.startswith(f"{2 * K} of {S} keys by top-k") for x in findings)


def two_readers(query, key, value, scores, base):
    """The mask and what is scattered into have readers besides attention, which keep all of it alive."""
    kept = torch.zeros(B, L, S, dtype=torch.bool)
    kept.scatter_(-1, top(scores, base), True)
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, kept[:, None] & base[:, None]), kept


def test_other_readers_of_a_mask_find_it() -> None:
    _, gm, (out, kept) = run_rewritten(two_readers, *inputs())
    (op,) = ops(gm)
    assert "indices" in op.kwargs
    want, want_kept = two_readers(*inputs())
    assert (out - want).abs().max() < 1e-12
    assert torch.equal(kept, want_kept)


def softmax_written_out(query, key, value, scores, base):
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    mask = torch.zeros(B, 1, L, S, dtype=torch.float64).masked_fill(~base[:, None], lowest())
    mask = mask.masked_fill(but(top(scores, base), scores), lowest())
    return (query @ key.mT * 0.25 + mask).softmax(-1) @ value


def infinities_written_out(query, key, value, scores, base):
    """A row whose keys are all excluded by -inf is NaN."""
    base = base.clone()
    base[0, 0] = False
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    mask = torch.zeros(B, 1, L, S, dtype=torch.float64).masked_fill(~base[:, None], -torch.inf)
    mask = mask.masked_fill(but(top(scores, base), scores), -torch.inf)
    return (query @ key.mT * 0.25 + mask).softmax(-1) @ value


@pytest.mark.parametrize("fn", [softmax_written_out, infinities_written_out])
def test_attention_written_out(fn) -> None:
    (finding,), gm, out = run_rewritten(fn, *inputs())
    (op,) = ops(gm)
    assert "indices" in op.kwargs, finding.note
    torch.testing.assert_close(out, fn(*inputs()), rtol=0, atol=1e-12, equal_nan=True)


def test_no_selection_is_no_remark() -> None:
    """The top-k of a router is no selection of keys."""

    def fn(query, key, value, scores, base):
        weights, experts = scores.topk(2, -1)
        routed = torch.zeros_like(scores).scatter(-1, experts, weights)
        query = query + routed.sum(-1)[:, None, :, None]
        key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, base[:, None])

    (finding,), gm, _ = run_rewritten(fn, *inputs())
    (op,) = ops(gm)
    assert "indices" not in op.kwargs
    assert not finding.note


class TestGraphs(expecttest.TestCase):
    def test_a_mask_and_not_the_rest(self) -> None:
        gm = capture(attend(pick_forms.and_not), *inputs())
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
unsqueeze_1 = unsqueeze(to, 1)
decode_attention_default = decode_attention.default(l_query_, l_key_, l_value_, getitem, None, None, None, indices=unsqueeze_1)
getitem_3 = getitem(decode_attention_default, 0)
return (getitem_3)""",
        )

    def test_blocks_of_each_kv_head(self) -> None:
        gm = capture(attend(pick_forms.in_blocks), *inputs())
        rewrite(gm)
        self.assertExpectedInline(
            listing(gm),
            """\
neg = neg(l_scores_)
stack = stack((l_scores_, neg), dim=1)
getitem = getitem(l_base_, (slice(None, None, None), None))
invert = invert(getitem)
blocks = masked_fill(stack, invert, -inf)
unflatten = unflatten(blocks, -1, (32, 4))
blocks_1 = amax(unflatten, -1)
topk = topk(blocks_1, 7, -1)
best = getitem(topk, 0)
picks = getitem(topk, 1)
eq = eq(best, -inf)
picks_1 = masked_fill(picks, eq, -1)
lt = lt(picks_1, 0)
places = masked_fill(picks_1, lt, 32)
getitem_5 = getitem(l_base_, (slice(None, None, None), None))
invert_2 = invert(getitem_5)
full_like = full_like(invert_2, 0.0, dtype=torch.float64)
masked_fill_4 = masked_fill(full_like, invert_2, -1.7976931348623157e+308)
to = to(places, torch.int32)
decode_attention_default = decode_attention.default(l_query_, l_key_, l_value_, masked_fill_4, None, None, None, indices=to, index_block=4, rest_bias=-1.7976931348623157e+308)
getitem_6 = getitem(decode_attention_default, 0)
return (getitem_6)""",
        )

    def test_duplicates_are_removed(self) -> None:
        gm = capture(attend(pick_forms.clamped), *inputs())
        rewrite(gm)
        self.assertExpectedInline(
            listing(gm),
            """\
invert = invert(l_base_)
masked_fill = masked_fill(l_scores_, invert, -inf)
topk = topk(masked_fill, 30, -1)
picks = getitem(topk, 1)
gather = gather(l_base_, -1, picks)
invert_1 = invert(gather)
picks_1 = masked_fill(picks, invert_1, -1)
clamp = clamp(picks_1, 0, 127)
ge = ge(picks_1, 0)
to = to(ge, torch.int32)
full_like = full_like(clamp, -1)
where = where(ge, clamp, full_like)
unsqueeze_1 = unsqueeze(where, 1)
to_1 = to(unsqueeze_1, torch.int32)
without_duplicates = without_duplicates(to_1, 128)
decode_attention_default = decode_attention.default(l_query_, l_key_, l_value_, None, None, None, None, indices=without_duplicates)
getitem_2 = getitem(decode_attention_default, 0)
return (getitem_2)""",
        )


def written_to_a_buffer(scores, base):
    """The result of `out=` and the buffer are one tensor."""
    kept = ~but(top(scores, base), scores)
    buffer = torch.zeros_like(kept)
    return torch.logical_and(kept, base[:, None], out=buffer), buffer


def scattered_into_a_cast(scores, base):
    """The cast is the tensor itself."""
    marks = torch.zeros(scores.shape, dtype=torch.float64)
    cast = marks.double()
    cast.scatter_(-1, top(scores, base), 1.0)
    return (cast > 0)[:, None], marks


@pytest.mark.parametrize("make", [written_to_a_buffer, scattered_into_a_cast])
def test_writes_that_something_else_reads_stay(make: Callable[..., tuple[Tensor, Tensor]]) -> None:
    def fn(q, k, v, scores, base):
        mask, other = make(scores, base)
        return attend(lambda *_: mask)(q, k, v, scores, base), other

    (finding,), gm, outs = run_rewritten(fn, *inputs())
    assert "indices" in ops(gm)[0].kwargs, finding.note
    for x, y in zip(outs, fn(*inputs()), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_counts_are_not_compared_with_a_keyword() -> None:
    """Keys that are named twice do not count, and those that are named three times do."""

    def mask(scores, base):
        picks = top(scores, base)
        picks = torch.cat((picks, picks[..., :4], picks[..., :2]), -1)
        counts = torch.zeros(scores.shape, dtype=torch.int64).scatter_add(-1, picks, torch.ones_like(picks))
        bias = torch.zeros(scores.shape, dtype=torch.float64)
        return (bias.masked_fill(counts.le(other=2), -torch.inf) + bias.masked_fill(~base, -torch.inf))[:, None]

    fn = attend(mask)
    (_finding,), _gm, out = run_rewritten(fn, *inputs())
    torch.testing.assert_close(out, fn(*inputs()), rtol=0, atol=1e-12, equal_nan=True)
