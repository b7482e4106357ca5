"""The bifurcation pass: every way to share keys is seen, nothing else is, and the rest of the graph stays."""

from __future__ import annotations

import sys
from collections import Counter

import expecttest
import pytest
import torch
import torch.nn.functional as F
from graphs import capture, listing
from slow import slow_after

import tatten
from tatten.passes import Declined, Rewritten, cost, rewrite
from tatten.passes.reasons import Reason
from tatten.passes.segments import find_segments

pytestmark = pytest.mark.drawn(8)

B, HQ, HKV, P, S, D, G = 4, 6, 2, 11, 5, 8, 2
N = HQ // HKV
sdpa = F.scaled_dot_product_attention
OP = torch.ops.tatten.bifurcated_attention.default


def repeat_kv(x, n=N):
    b, h, s, d = x.shape
    return x[:, :, None, :, :].expand(b, h, n, s, d).reshape(b, h * n, s, d)


# One row for all sequences.
FOR_ALL = {
    "expand": lambda p: p.expand(B, -1, -1, -1),
    "expand_sizes": lambda p: p.expand(B, HKV, p.size(2), D),
    "expand_reshape": lambda p: p.unsqueeze(1).expand(-1, B, -1, -1, -1).reshape(B, HKV, p.size(2), D),
    "expand_flatten": lambda p: p[:, None].expand(1, B, HKV, p.size(2), D).flatten(0, 1),
    "expand_without_its_row": lambda p: p[:1].squeeze(0).expand(B, HKV, p.size(2), D),
    "expand_contiguous": lambda p: p.expand(B, -1, -1, -1).contiguous(),
    "repeat": lambda p: p.repeat(B, 1, 1, 1),
    "tile": lambda p: torch.tile(p, (B, 1, 1, 1)),
    "repeat_interleave": lambda p: p.repeat_interleave(B, dim=0),
    "repeat_interleave_function": lambda p: torch.repeat_interleave(p, repeats=B, dim=-4),
    "broadcast_to": lambda p: torch.broadcast_to(p, (B, HKV, p.size(2), D)),
    "expand_as": lambda p: p.expand_as(torch.empty(B, HKV, p.size(2), D)),
    "index_select": lambda p: p.index_select(0, torch.zeros(B, dtype=torch.int64)),
    "indexed": lambda p: p[torch.zeros(B, dtype=torch.int64)],
    "cat": lambda p: torch.cat([p] * B),
    "cat_dim": lambda p: torch.cat([p] * B, dim=0),
    "stack": lambda p: torch.stack([p.squeeze(0)] * B),
    "transposed": lambda p: p.transpose(1, 2).expand(B, -1, -1, -1).transpose(1, 2),
    "permuted": lambda p: p.permute(2, 0, 1, 3).repeat(1, B, 1, 1).permute(1, 2, 0, 3).clone(),
    "twice": lambda p: p.expand(2, -1, -1, -1).repeat_interleave(B // 2, dim=0),
}
# Two rows for two sequences each.
FOR_GROUPS = {
    "repeat_interleave": lambda p: p.repeat_interleave(B // G, dim=0),
    "expand_flatten": lambda p: p.unsqueeze(1).expand(-1, B // G, -1, -1, -1).flatten(0, 1),
    "expand_reshape": lambda p: p[:, None].expand(G, B // G, HKV, p.size(2), D).reshape(B, HKV, p.size(2), D),
    "repeat_5d": lambda p: p.unsqueeze(1).repeat(1, B // G, 1, 1, 1).view(B, HKV, p.size(2), D),
    "stack": lambda p: torch.stack([p] * (B // G), dim=1).flatten(0, 1),
    "transposed": lambda p: p.transpose(0, 2).repeat_interleave(B // G, dim=2).transpose(0, 2),
}


def join(p, s, share, order):
    """Prefix and suffix as one KV for all query heads: heads repeated after both are joined or before."""
    match order:
        case "heads_last":
            return repeat_kv(torch.cat([share(p), s], dim=2))
        case "heads_within":
            return torch.cat([repeat_kv(share(p)), repeat_kv(s)], dim=2)
        case "bshd":  # cached as [batch, length, heads, head_dim]
            return torch.cat([share(p).transpose(1, 2), s.transpose(1, 2)], dim=1).transpose(1, 2)
        case _:
            raise ValueError(order)


ORDERS = [("heads_last", False), ("heads_last", True), ("heads_within", False), ("bshd", False)]


def attention(share, order):
    def fn(q, pk, pv, sk, sv, mask):
        k, v = join(pk, sk, share, order), join(pv, sv, share, order)
        return sdpa(q, k, v, attn_mask=mask, enable_gqa=k.shape[1] != HQ)

    return fn


def inputs(rows=1, n=1):
    torch.manual_seed(0)
    shared = torch.randn(rows, HKV, P, D), torch.randn(rows, HKV, P, D)
    mask = torch.rand(B, 1, n, P + S) > 0.3
    return torch.randn(B, HQ, n, D), *shared, torch.randn(B, HKV, S, D), torch.randn(B, HKV, S, D), mask


def compiled(fn, *args):
    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(fn, backend="tatten", options={"inner": "eager"}, fullgraph=True)(*args)


def assert_bifurcates(fn, *args, rows=(1, B), dynamic=()) -> torch.fx.GraphModule:
    """It is rewritten into segments of these rows, and the result is right."""
    for i, dim in dynamic:
        torch._dynamo.mark_dynamic(args[i], dim)
    gm = capture(fn, *args)
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Rewritten), finding
    assert finding.op == "tatten.bifurcated_attention.default", finding
    (op,) = gm.graph.find_nodes(op="call_function", target=OP)
    assert [gm_rows(x) for x in op.args[1]] == list(rows)
    with torch.no_grad():
        want = fn(*args)
    torch.testing.assert_close(compiled(fn, *args), want)
    return gm


DYNAMIC = ((1, 2), (2, 2), (5, 3))  # the length of the prefix


def gm_rows(node) -> int:
    return int(node.meta["example_value"].shape[0])


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("order", "dynamic"), slow_after(1, ORDERS))
@pytest.mark.parametrize("spelling", FOR_ALL)
def test_a_prefix_for_all(spelling: str, order: str, dynamic: bool) -> None:
    gm = assert_bifurcates(attention(FOR_ALL[spelling], order), *inputs(), dynamic=DYNAMIC if dynamic else ())
    names = {str(node.target) for node in gm.graph.nodes}
    assert not names & {"expand", "repeat", "repeat_interleave", "flatten", "reshape"}
    assert not gm.graph.find_nodes(op="call_function", target=torch.cat)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("order", "dynamic"), ORDERS)
@pytest.mark.parametrize("spelling", slow_after(2, FOR_GROUPS))
def test_a_prefix_for_each_group(spelling: str, order: str, dynamic: bool) -> None:
    fn = attention(FOR_GROUPS[spelling], order)
    assert_bifurcates(fn, *inputs(G), rows=(G, B), dynamic=DYNAMIC if dynamic else ())


def test_heads_and_sequences_in_one_expand() -> None:
    def both(x):
        return x[:, None, :, None].expand(-1, B // x.size(0), -1, N, -1, -1).reshape(B, HQ, x.size(2), D)

    def fn(q, pk, pv, sk, sv, mask):
        return sdpa(q, torch.cat([both(pk), both(sk)], 2), torch.cat([both(pv), both(sv)], 2), attn_mask=mask)

    assert_bifurcates(fn, *inputs())
    assert_bifurcates(fn, *inputs(G), rows=(G, B))

    def mqa(q, p, s):
        k = torch.cat([p.expand(B, HQ, P, D), s.expand(B, HQ, S, D)], dim=2)
        return sdpa(q, k, k)

    assert_bifurcates(mqa, torch.randn(B, HQ, 1, D), torch.randn(1, 1, P, D), torch.randn(B, 1, S, D))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("nested", [False, True])
def test_levels(nested: bool, n: int) -> None:
    """A tree: the root for all, a level for two sequences each, and a suffix; beside each other or within."""

    def tree(a, b, c):
        if nested:
            return torch.cat([torch.cat([a.expand(G, -1, -1, -1), b], 2).repeat_interleave(B // G, 0), c], 2)
        return torch.cat([a.expand(B, -1, -1, -1), b.repeat_interleave(B // G, 0), c], 2)

    def fn(q, a, b, c, mask):
        k, v = tree(a, b, c), tree(a.cos(), b.cos(), c.cos())
        return sdpa(q, k, v, attn_mask=mask, enable_gqa=True)

    args = torch.randn(B, HQ, n, D), *(torch.randn(rows, HKV, s, D) for rows, s in ((1, P), (G, 3), (B, S)))
    assert_bifurcates(fn, *args, torch.rand(B, HQ, n, P + 3 + S) > 0.4, rows=(1, G, B))


def test_a_batch_of_one_for_all() -> None:
    """SDPA broadcasts it; nothing in the graph says so."""
    q, pk, pv, *_ = inputs()
    mask = torch.rand(B, 1, 1, P) > 0.3
    assert_bifurcates(lambda *a: sdpa(*a, enable_gqa=True), q, pk, pv, rows=(1,))
    assert_bifurcates(lambda *a: sdpa(*a, enable_gqa=True), q, pk, pv, mask, rows=(1,))


def test_sequences_may_see_different_keys_of_a_batch_of_one() -> None:
    q, pk, pv, *_ = inputs()
    mask = torch.zeros(B, 1, 1, P, dtype=torch.bool)
    for sequence in range(B):
        mask[sequence, ..., sequence : sequence + 2] = True
    assert_bifurcates(lambda *a: sdpa(*a, enable_gqa=True), q, pk, pv, mask, rows=(1,))


def test_a_learned_prefix() -> None:
    """It wants gradients, but was read without."""
    q, pk, _, sk, *_ = inputs()

    def fn(q, p, s):
        with torch.no_grad():
            k = torch.cat([p.expand(B, -1, -1, -1), s], dim=2)
        return sdpa(q, k, k, enable_gqa=True)

    prefix = torch.nn.Parameter(pk)
    torch._dynamo.reset()
    with tatten.recording() as report:
        got = torch.compile(fn, backend="tatten", options={"inner": "eager"})(q, prefix, sk)
    torch.testing.assert_close(got, fn(q, prefix, sk))
    assert len(report.rewritten) == 1


def test_a_mask_of_one_column_and_an_empty_suffix() -> None:
    q, pk, _, sk, *_ = inputs()
    args = q, pk, sk[:, :, :0], torch.ones(B, 1, 1, 1, dtype=torch.bool)
    assert_bifurcates(lambda *a: forked(*a), *args)


def test_expanded_before_the_graph() -> None:
    """A tensor that comes in with stride 0 over the batch."""
    q, pk, pv, sk, sv, mask = inputs()
    fn = attention(lambda p: p, "heads_last")
    gm = assert_bifurcates(fn, q, pk.expand(B, -1, -1, -1), pv.expand(B, -1, -1, -1), sk, sv, mask)
    assert gm.graph.find_nodes(op="call_method", target="narrow")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("mask", ["none", "one_column", "2d", "additive", "per_head"])
def test_masks(mask: str) -> None:
    n = 3
    made = {
        "none": None,
        "one_column": torch.rand(B, 1, n, 1) > 0.3,
        "2d": torch.rand(n, P + S) > 0.3,
        "additive": torch.randn(B, 1, n, P + S),
        "per_head": torch.rand(1, HQ, 1, P + S) > 0.3,
    }[mask]
    *args, _ = inputs(n=n)
    assert_bifurcates(attention(FOR_ALL["expand"], "heads_last"), *args, made)


def test_what_the_graph_returns_stays() -> None:
    def fn(q, pk, pv, sk, sv, mask):
        k, v = (torch.cat([p.expand(B, -1, -1, -1), s], 2) for p, s in ((pk, sk), (pv, sv)))
        return sdpa(q, k, v, attn_mask=mask, enable_gqa=True), k

    gm = assert_bifurcates(fn, *inputs())
    assert len(gm.graph.find_nodes(op="call_function", target=torch.cat)) == 1


def test_an_empty_cache_at_its_first_step() -> None:
    """transformers concatenates a 1-D tensor without elements."""

    def fn(q, p, s):
        k = torch.cat([torch.tensor([]), p.expand(B, -1, -1, -1), s], dim=-2)
        return sdpa(q, k, k, enable_gqa=True)

    q, pk, _, sk, *_ = inputs()
    assert_bifurcates(fn, q, pk, sk)


def test_parts_that_cat_converts_are_one_segment() -> None:
    q, pk, _, sk, _, mask = inputs()
    args = q, pk.half(), sk, mask
    (finding,) = rewrite(capture(forked, *args)).findings
    assert finding.op == "tatten.decode_attention.default"
    torch.testing.assert_close(compiled(forked, *args), forked(*args))


def test_concatenated_for_attention_alone() -> None:
    """Nothing is shared, but the copy is saved: also what batch 1 does to a prefix. What is returned is made anyway."""

    def fn(q, past, new, returned):
        k = torch.cat([past, new], dim=2)
        return sdpa(q, k, k, enable_gqa=True), (k if returned else None)

    args = torch.randn(1, HQ, 1, D), torch.randn(1, HKV, P, D), torch.randn(1, HKV, 1, D)
    assert_bifurcates(lambda *a: fn(*a, False)[0], *args, rows=(1, 1))
    (finding,) = rewrite(capture(lambda *a: fn(*a, True), *args)).findings
    assert finding.op == "tatten.decode_attention.default"
    assert not finding.note


def test_a_loop_that_appends_to_its_keys() -> None:
    """Each step's keys are read as one tensor, and the work of the passes grows with the number of steps alone."""

    def calls_made(steps: int) -> int:
        def fn(q, k, new):
            for _ in range(steps):
                k = torch.cat([k, new], dim=2)
                q = sdpa(q, k, k, enable_gqa=True)
            return q, k

        gm = capture(fn, torch.randn(1, HQ, 1, D), torch.randn(1, HKV, P, D), torch.randn(1, HKV, 1, D))
        events: Counter[str] = Counter()
        sys.setprofile(lambda frame, event, arg: events.update([event]))
        try:
            report = rewrite(gm)
        finally:
            sys.setprofile(None)
        assert [x.op for x in report.findings] == ["tatten.decode_attention.default"] * steps
        return events["call"]

    calls_made(20)  # imports
    assert calls_made(80) < 5 * calls_made(20)


OTHERS = {
    "tiled": lambda p: p.repeat(B // G, 1, 1, 1),  # sequence j reads row j % G
    "stack_first": lambda p: torch.stack([p] * (B // G)).flatten(0, 1),
    "cat": lambda p: torch.cat([p] * (B // G)),
    "scaled": lambda p: p.repeat_interleave(B // G, dim=0) * 2,
    "wrong_merge": lambda p: p[:, None].expand(-1, B // G, -1, -1, -1).transpose(0, 1).reshape(B, HKV, P, D),
    "other_heads": lambda p: p.unsqueeze(1).expand(-1, B // G, -1, -1, -1).reshape(B, HKV, D, P).reshape(B, HKV, P, D),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", OTHERS)
def test_nothing_else_is_shared(name: str) -> None:
    fn, args = attention(OTHERS[name], "heads_last"), inputs(G)
    gm = capture(fn, *args)
    (call,) = gm.graph.find_nodes(op="call_function", target=sdpa)
    assert not any(segment.shared for segment in find_segments(call.args[1]))
    rewrite(gm)
    (op,) = gm.graph.find_nodes(op="call_function", target=OP)
    assert [gm_rows(x) for x in op.args[1]] == [B, B]
    with torch.no_grad():
        torch.testing.assert_close(compiled(fn, *args), fn(*args))


def orders_differ(q, pk, pv, sk, sv, mask):
    k, v = torch.cat([pk.expand(B, -1, -1, -1), sk], 2), torch.cat([sv, pv.expand(B, -1, -1, -1)], 2)
    return sdpa(q, k, v, attn_mask=mask, enable_gqa=True)


def only_keys_are_shared(q, pk, pv, sk, sv, mask):
    k = torch.cat([pk.expand(B, -1, -1, -1), sk], 2)
    return sdpa(q, k, k * 2, attn_mask=mask, enable_gqa=True)


def only_the_rows_of_keys_are_shared(q, pk, pv, sk, sv, mask):
    k, v = torch.cat([pk.expand(B, -1, -1, -1), sk], 2), torch.cat([pv.expand(B, -1, -1, -1) * 2, sv], 2)
    return sdpa(q, k, v, attn_mask=mask, enable_gqa=True)


def written(what):
    def fn(q, pk, pv, sk, sv, mask):
        k, v = (torch.cat([p.expand(B, -1, -1, -1), s], 2) for p, s in ((pk, sk), (pv, sv)))
        {"prefix": pk, "suffix": sv, "copy": k}[what].mul_(2)  # SDPA sees what was concatenated before
        return sdpa(q, k, v, attn_mask=mask, enable_gqa=True)

    return fn


NOT_BIFURCATED = {
    "segments orders": orders_differ,
    "segments keys": only_keys_are_shared,
    "segments rows": only_the_rows_of_keys_are_shared,
    "written_between prefix": written("prefix"),
    "written_between suffix": written("suffix"),
    "written_between copy": written("copy"),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("code", NOT_BIFURCATED)
def test_declines(code: str) -> None:
    """It is decode attention of the whole, and the report says why it is no more."""
    fn, args = NOT_BIFURCATED[code], inputs()
    (finding,) = rewrite(capture(fn, *(x.clone() for x in args))).findings
    assert finding.op == "tatten.decode_attention.default"
    assert finding.note.startswith(f"not bifurcated [{Reason(code.split()[0]).value}]: ")
    torch.testing.assert_close(compiled(fn, *(x.clone() for x in args)), fn(*(x.clone() for x in args)))


@pytest.mark.parametrize("code", NOT_BIFURCATED)
def test_declines_where_decode_attention_gains_nothing(code: str) -> None:
    q, pk, pv, sk, sv, _ = inputs()
    q = q[:, :HKV]  # one kv head for each query head, and no mask
    (finding,) = rewrite(capture(NOT_BIFURCATED[code], q, pk, pv, sk, sv, None)).findings
    assert isinstance(finding, Declined)
    assert finding.decline.reason is Reason(code.split()[0])
    assert finding.decline.reason.help


def test_small_work_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fn, args = attention(FOR_ALL["expand"], "heads_last"), inputs()
    stored = 2 * 4 * HKV * D * (P + B * S)
    repeated = 2 * 4 * B * HQ * D * (P + S)
    monkeypatch.setitem(cost.RATES, "cpu", cost.Rates(bytes_per_us=100.0, segment_us=200.0))
    (finding,) = rewrite(capture(fn, *args)).findings
    assert finding.op == "tatten.bifurcated_attention.default"
    moved = 2 * repeated + stored
    assert finding.cost == cost.Cost(moved, stored, 2, 2 * repeated / 100, 400.0, moved / 100)
    free = cost.DecodeRates(numbers_per_us=100.0, call_us=0.0)
    monkeypatch.setitem(cost.RATES, "cpu", cost.Rates(bytes_per_us=100.0, segment_us=300.0, decode=free))
    (finding,) = rewrite(capture(fn, *args)).findings
    assert finding.op == "tatten.decode_attention.default"  # there is a mask: how much it leaves out, nobody knows
    assert "not bifurcated [small]: about 492 us saved" in finding.note
    assert "600 us more for 2 segments" in finding.note
    torch.testing.assert_close(compiled(fn, *args), fn(*args))
    monkeypatch.setitem(cost.RATES, "cpu", cost.Rates(bytes_per_us=100.0, segment_us=300.0))
    (finding,) = rewrite(capture(lambda q, k: sdpa(q, k, k, enable_gqa=True), args[0], args[3])).findings
    assert finding.decline.reason is Reason.SMALL


def test_lengths_with_symbols_of_their_own() -> None:
    """Two levels whose keys and values can't be proven equal in length: a guard, and a new graph where it fails."""

    def fn(q, k1, k2, k3, v1, v2, v3):
        k, v = (
            torch.cat([a.expand(B, -1, -1, -1), b.repeat_interleave(B // G, 0), c], 2)
            for a, b, c in ((k1, k2, k3), (v1, v2, v3))
        )
        return sdpa(q, k, v, enable_gqa=True)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(fn, backend="tatten", options={"inner": "aot_eager"})
    for keys, values in (((7, 5), (7, 5)), ((6, 9), (6, 9)), ((6, 4), (6, 4)), ((6, 4), (4, 6))):
        parts = [
            torch.randn(rows, HKV, n, D)
            for lengths in (keys, values)
            for rows, n in ((1, lengths[0]), (G, lengths[1]), (B, S))
        ]
        for i in (0, 1, 3, 4):
            torch._dynamo.mark_dynamic(parts[i], 2)
        args = torch.randn(B, HQ, 1, D), *parts
        with torch.no_grad():
            torch.testing.assert_close(compiled(*args), fn(*args))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert torch._dynamo.utils.counters["tatten"]["rewritten"] == 2


def forked(q, p, s, mask):
    k = torch.cat([p.expand(q.size(0), -1, -1, -1), s], 2)
    return sdpa(q, k, k, attn_mask=mask, enable_gqa=True)


class Graphs(expecttest.TestCase):
    """Whole graphs after the rewrite."""

    def test_a_static_suffix(self) -> None:
        """Two layers look at the columns of their mask once."""

        def fn(q, pk, pv, sk, sv, mask, position, new):
            for _ in range(2):
                sk.index_copy_(2, position, new)
                k, v = (
                    repeat_kv(torch.cat([p.unsqueeze(1).expand(-1, B // G, -1, -1, -1).flatten(0, 1), s], dim=2))
                    for p, s in ((pk, sk), (pv, sv))
                )
                q = sdpa(q, k, v, attn_mask=mask, scale=0.5)
            return q

        gm = capture(fn, *inputs(G), torch.tensor([3]), torch.randn(B, HKV, 1, D))
        rewrite(gm)
        self.assertExpectedInline(
            listing(gm),
            """\
index_copy_ = index_copy_(l_sk_, 2, l_position_, l_new_)
split = split(l_mask_, [11, 5], -1)
getitem_4 = getitem(split, 0)
getitem_5 = getitem(split, 1)
block_mask_default = block_mask.default(getitem_4, 2)
block_mask_default_1 = block_mask.default(getitem_5)
bifurcated_attention_default = bifurcated_attention.default(l_q_, [l_pk_, l_sk_], [l_pv_, l_sv_], [getitem_4, getitem_5], [block_mask_default, block_mask_default_1], 0.5)
getitem_6 = getitem(bifurcated_attention_default, 0)
index_copy__1 = index_copy_(l_sk_, 2, l_position_, l_new_)
bifurcated_attention_default_1 = bifurcated_attention.default(getitem_6, [l_pk_, l_sk_], [l_pv_, l_sv_], [getitem_4, getitem_5], [block_mask_default, block_mask_default_1], 0.5)
getitem_7 = getitem(bifurcated_attention_default_1, 0)
return (getitem_7)""",
        )

    def test_levels_without_a_mask(self) -> None:
        def fn(q, a, b, c):
            k = torch.cat([torch.cat([a.expand(G, -1, -1, -1), b], 2).repeat_interleave(B // G, 0), c], 2)
            return sdpa(q, k, k, enable_gqa=True)

        args = torch.randn(B, HQ, 1, D), *(torch.randn(rows, HKV, s, D) for rows, s in ((1, P), (G, 3), (B, S)))
        gm = capture(fn, *args)
        rewrite(gm)
        self.assertExpectedInline(
            listing(gm),
            """\
bifurcated_attention_default = bifurcated_attention.default(l_q_, [l_a_, l_b_, l_c_], [l_a_, l_b_, l_c_], [None, None, None], [None, None, None], None)
getitem = getitem(bifurcated_attention_default, 0)
return (getitem)""",
        )

    def test_dynamic_lengths(self) -> None:
        q, pk, _, sk, _, mask = inputs()
        torch._dynamo.mark_dynamic(pk, 2)
        torch._dynamo.mark_dynamic(mask, 3)
        gm = capture(forked, q, pk, sk, mask)
        rewrite(gm)
        self.assertExpectedInline(
            listing(gm),
            """\
size = size(l_p_, 2)
split = split(l_mask_, [size, 5], -1)
getitem = getitem(split, 0)
getitem_1 = getitem(split, 1)
block_mask_default = block_mask.default(getitem, 1)
block_mask_default_1 = block_mask.default(getitem_1)
bifurcated_attention_default = bifurcated_attention.default(l_q_, [l_p_, l_s_], [l_p_, l_s_], [getitem, getitem_1], [block_mask_default, block_mask_default_1], None)
getitem_2 = getitem(bifurcated_attention_default, 0)
return (getitem_2)""",
        )

    def test_expanded_before_the_graph(self) -> None:
        q, pk, *_ = inputs()
        gm = capture(lambda q, p: sdpa(q, p, p, enable_gqa=True), q, pk.expand(B, -1, -1, -1))
        rewrite(gm)
        self.assertExpectedInline(
            listing(gm),
            """\
narrow = narrow(l_p_, 0, 0, 1)
bifurcated_attention_default = bifurcated_attention.default(l_q_, [narrow], [narrow], [None], [None], None)
getitem = getitem(bifurcated_attention_default, 0)
return (getitem)""",
        )
