"""Rows that an index selects are read where they are stored, however they were selected, and no copy is left."""

from __future__ import annotations

import expecttest
import fuzz
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from graphs import capture, listing
from hypothesis import given
from slow import slow_after
from torch.fx import Node

from tatten.passes import Rewritten, rewrite
from tatten.passes.calls import op_name
from tatten.passes.reasons import Reason
from tatten.passes.rows import SELECTS
from tatten.passes.symbolic import tensor_of

pytestmark = pytest.mark.drawn(8)

B, R, HQ, HKV, P, S, D = 5, 3, 6, 2, 11, 5, 8
OP = torch.ops.tatten.bifurcated_attention.default
GROUPS = torch.ops.tatten.row_groups.default
sdpa = F.scaled_dot_product_attention
ROWS = torch.tensor([2, 0, 2, 2, 1])
COUNTS = torch.tensor([1, 0, 4])


def repeat_kv(x):
    return x[:, :, None].expand(-1, -1, HQ // HKV, -1, -1).reshape(x.size(0), HQ, x.size(2), D)


# A row for each number of an index.
BY_INDEX = {
    "index_select": lambda x, i: x.index_select(0, i),
    "index_select_function": lambda x, i: torch.index_select(x, dim=-4, index=i),
    "indexed": lambda x, i: x[i],
    "ellipsis": lambda x, i: x[i, ...],
    "slices": lambda x, i: x[i, :, :],
    "gather": lambda x, i: x.gather(0, i.view(-1, 1, 1, 1).expand(-1, *x.shape[1:])),
    "gather_function": lambda x, i: torch.gather(
        x, dim=0, index=i[:, None, None].unsqueeze(-1).expand(-1, HKV, x.size(2), D)
    ),
    "take_along_dim": lambda x, i: x.take_along_dim(i.reshape(-1, 1, 1, 1), 0),
    "take_along_dim_expanded": lambda x, i: torch.take_along_dim(
        x, indices=i.view(-1, 1, 1, 1).expand(-1, *x.shape[1:]), dim=0
    ),
    "embedding": lambda x, i: F.embedding(i, x.flatten(1)).view(-1, *x.shape[1:]),
    "embedding_of_a_view": lambda x, i: F.embedding(i, x.reshape(x.size(0), -1)).unflatten(1, x.shape[1:]),
    "torch_embedding": lambda x, i: torch.embedding(x.flatten(1), i).reshape(-1, *x.shape[1:]),
    "flat_indexed": lambda x, i: x.flatten(1)[i].view(-1, *x.shape[1:]),
    "copied": lambda x, i: x[i].contiguous().clone(),
    "transposed": lambda x, i: x.transpose(1, 2)[i].transpose(1, 2),
    "batch_in_dim_1": lambda x, i: x.transpose(0, 1)[:, i].transpose(0, 1),
    "batch_last": lambda x, i: x.permute(1, 2, 3, 0)[..., i].permute(3, 0, 1, 2),
    "cast": lambda x, i: x[i.long()],
    "computed": lambda x, i: x[(i * 2 + 1) // 2],
}
# Any selection, made of others. Indexes are those of the rows that are left.
COMPOSED = {
    "repeated after": lambda x, i: x[i[:2]].repeat_interleave(2, 0),
    "expanded after": lambda x, i: x[i[:2]][:, None].expand(-1, 3, -1, -1, -1).flatten(0, 1),
    "tiled after": lambda x, i: x[i[:2]].repeat(2, 1, 1, 1),
    "tiled and repeated after": lambda x, i: x[i[:2]].repeat(2, 1, 1, 1).repeat_interleave(3, 0),
    "repeated before": lambda x, i: x.repeat_interleave(2, 0)[i + 1],
    "tiled before": lambda x, i: x.repeat(2, 1, 1, 1)[i + 1],
    "repeated and tiled before": lambda x, i: x.repeat_interleave(2, 0).repeat(2, 1, 1, 1)[i * 4],
    "nested": lambda x, i: x[i][i],
    "nested in another way": lambda x, i: x.index_select(0, i).gather(0, i.view(-1, 1, 1, 1).expand(-1, HKV, P, D)),
    "repeated between": lambda x, i: x[i].repeat_interleave(2, 0)[i * 3].repeat(2, 1, 1, 1),
    "nested negatives": lambda x, i: x[i[:2]].repeat_interleave(2, 0)[-i - 1],
    "counts": lambda x, i: x.repeat_interleave(i + 1, dim=0, output_size=12) if x.size(0) == 5 else x[i],
    "counts of rows": lambda x, i: x[i].repeat_interleave(i, dim=0, output_size=7),
    "rows of counts": lambda x, i: x.repeat_interleave(i[:3], dim=0, output_size=4)[i],
    "one for all": lambda x, i: x[i[:1]].expand(4, -1, -1, -1),
    "heads before": lambda x, i: repeat_kv(x)[i],
    "heads after": lambda x, i: repeat_kv(x[i]),
    "of every second": lambda x, i: x[i[::2]],
}


def inputs(rows=R, batch=B, n=1, dtype=torch.float32):
    torch.manual_seed(0)
    stored = torch.randn(2, rows, HKV, P, D, dtype=dtype)
    suffix = torch.randn(2, batch, HKV, S, D, dtype=dtype)
    return torch.randn(batch, HQ, n, D, dtype=dtype), *stored, *suffix


def forked(select, order="heads_last"):
    """Attention of selected rows and a suffix; of the rows alone without one."""

    def fn(q, pk, pv, sk, sv, index, mask=None):
        made = []
        for p, s in ((pk, sk), (pv, sv)):
            x = select(p, index)
            if sk.size(2):
                x = torch.cat([repeat_kv(x), repeat_kv(s)] if order == "heads_within" else [x, s], dim=2)
            made.append(repeat_kv(x) if order == "heads_last" else x)
        return sdpa(q, *made, attn_mask=mask, enable_gqa=True)

    return fn


def compiled(fn, *args):
    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(fn, backend="tatten", options={"inner": "eager"}, fullgraph=True)(*args)


def selections(gm) -> list[str]:
    """The nodes that still select from keys or values."""
    return [
        node.name
        for node in gm.graph.nodes
        if op_name(node) in SELECTS
        and (tensor := tensor_of(node)) is not None
        and tensor.is_floating_point()
        and (op_name(node) != "getitem" or any(isinstance(x, Node) for x in _flat(node.args[1])))
    ]


def _flat(index):
    return index if isinstance(index, (list, tuple)) else (index,)


def assert_selects(fn, *args, stored=(R, B), by_rows=(True, False)):
    """It reads segments of these rows where they are stored, some by rows, and the result is right."""
    gm = capture(fn, *args)
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Rewritten), finding
    assert finding.op == "tatten.bifurcated_attention.default", finding
    assert not finding.note or finding.note.startswith("weighed for "), finding.note
    gm.graph.lint()
    (op,) = gm.graph.find_nodes(op="call_function", target=OP)
    assert [int(tensor_of(x).shape[0]) for x in op.args[1]] == list(stored)
    assert [x is not None for x in op.args[6]] == list(by_rows)
    assert not selections(gm)
    assert len(gm.graph.find_nodes(op="call_function", target=GROUPS)) == sum(by_rows)
    with torch.no_grad():
        torch.testing.assert_close(compiled(fn, *args), fn(*args))
    return gm


@pytest.mark.drawn(2)
@pytest.mark.parametrize("order", slow_after(1, ["heads_last", "gqa", "heads_within"]))
@pytest.mark.parametrize("form", BY_INDEX)
def test_forms(form: str, order: str) -> None:
    assert_selects(forked(BY_INDEX[form], order), *inputs(), ROWS)


@pytest.mark.parametrize("form", slow_after(2, BY_INDEX))
def test_one_segment(form: str) -> None:
    """Without a suffix: one SDPA over selected rows, in float64."""
    args = inputs(dtype=torch.float64)
    args = (*args[:3], *(x[:, :, :0] for x in args[3:]), ROWS)
    assert_selects(forked(BY_INDEX[form]), *args, stored=(R,), by_rows=(True,))


@pytest.mark.parametrize("form", ["indexed", "take_along_dim"])
def test_negative_rows_count_from_the_last_one(form: str) -> None:
    assert_selects(forked(BY_INDEX[form]), *inputs(), ROWS - R)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("form", ["index_select", "indexed", "embedding", "take_along_dim"])
def test_int32(form: str) -> None:
    select = BY_INDEX[form]
    index = ROWS if form == "take_along_dim" else ROWS.int()
    assert_selects(forked(select), *inputs(), index)


def test_counts() -> None:
    def select(x, counts):
        return x.repeat_interleave(counts, dim=0, output_size=B)

    assert_selects(forked(select), *inputs(), COUNTS)
    assert_selects(forked(lambda x, n: torch.repeat_interleave(x, n, 0, output_size=B)), *inputs(), COUNTS.int())


@pytest.mark.parametrize("form", ["indexed", "ellipsis", "batch_in_dim_1"])
def test_negative_numbers_count_from_the_end(form: str) -> None:
    assert_selects(forked(BY_INDEX[form]), *inputs(), ROWS - R)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("order", slow_after(1, ["heads_last", "gqa"]))
@pytest.mark.parametrize("name", COMPOSED)
def test_compositions(name: str, order: str) -> None:
    rows = torch.tensor([2, 0, 2, 1, 2])
    with torch.no_grad():
        batch = COMPOSED[name](torch.zeros(R, HKV, P, D), rows).shape[0]
    if name.startswith("heads"):
        order = "gqa"
        args = inputs(batch=batch)
        args = (*args[:3], *(x.repeat_interleave(HQ // HKV, 1) for x in args[3:]))
    else:
        args = inputs(batch=batch)
    assert_selects(forked(COMPOSED[name], order), *args, rows, stored=(R, batch))


def test_segments_under_an_index() -> None:
    """A tree that was concatenated before its rows were selected: the root has one row, which needs no index."""

    def fn(q, root, branch, leaf, i, mask):
        k = torch.cat([torch.cat([root.expand(R, -1, -1, -1), branch], 2)[i], leaf], 2)
        return sdpa(q, repeat_kv(k), repeat_kv(k), attn_mask=mask)

    q, pk, _, sk, _ = inputs()
    mask = torch.rand(B, 1, 1, 3 + P + S) > 0.3
    gm = assert_selects(
        fn, q, torch.randn(1, HKV, 3, D), pk, sk, ROWS, mask, stored=(1, R, B), by_rows=(False, True, False)
    )
    (op,) = gm.graph.find_nodes(op="call_function", target=OP)
    assert all(op.args[4])


def test_levels_of_rows() -> None:
    """A leaf's branch and that branch's root, each by an index of its own."""

    def fn(q, root, branch, leaf, roots, branches):
        k = torch.cat([root[roots[branches]], branch.index_select(0, branches), leaf], 2)
        return sdpa(q, k, k.sin(), enable_gqa=True), sdpa(q, k, k, enable_gqa=True)

    q, pk, _, sk, _ = inputs(n=2)
    args = q, torch.randn(2, HKV, 3, D), pk, sk, torch.tensor([1, 0, 1]), ROWS
    gm = capture(fn, *args)
    first, second = rewrite(gm).findings
    assert first.op == "tatten.decode_attention.default"  # `sin` needs the copy
    assert second.op == "tatten.bifurcated_attention.default"
    torch.testing.assert_close(compiled(fn, *args), fn(*args))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("mask", ["one_column", "2d", "additive", "per_head", "one", "rows"])
def test_masks(mask: str) -> None:
    n = 3
    made = {
        "one_column": torch.rand(B, 1, n, 1) > 0.3,
        "2d": torch.rand(n, P + S) > 0.3,
        "additive": torch.randn(B, 1, n, P + S).masked_fill(torch.rand(B, 1, n, P + S) > 0.7, -torch.inf),
        "per_head": torch.rand(1, HQ, 1, P + S) > 0.3,
        "one": torch.rand(1, 1, 1, P + S) > 0.3,
        "rows": torch.arange(P + S) >= torch.arange(B)[:, None, None, None],
    }[mask]
    assert_selects(forked(BY_INDEX["indexed"]), *inputs(n=n), ROWS, made)


DYNAMIC = {
    "prefix": [(1, 2), (2, 2), (6, 3)],
    "rows": [(1, 0), (2, 0)],
    "batch": [(0, 0), (3, 0), (4, 0), (5, 0), (6, 0)],
    "all": [(1, 0), (2, 0), (1, 2), (2, 2), (6, 3), (0, 0), (3, 0), (4, 0), (5, 0), (6, 0)],
}


@pytest.mark.drawn(2, "dynamic shapes")
@pytest.mark.parametrize("form", ["indexed", "index_select", "gather", "embedding"])
@pytest.mark.parametrize("dynamic", DYNAMIC)
def test_dynamic_shapes(dynamic: str, form: str) -> None:
    args = (*inputs(), ROWS.clone(), torch.rand(B, 1, 1, P + S) > 0.3)
    for i, dim in DYNAMIC[dynamic]:
        torch._dynamo.mark_dynamic(args[i], dim)
    assert_selects(forked(BY_INDEX[form], "gqa"), *args)


def keys_and_values_by(select_key, select_value):
    def fn(q, pk, pv, sk, sv, i, j):
        k, v = torch.cat([select_key(pk, i, j), sk], 2), torch.cat([select_value(pv, i, j), sv], 2)
        return sdpa(q, k, v, enable_gqa=True)

    return fn


SAME = {
    "cast": lambda x, i, j: x[i.long()],
    "arange": lambda x, i, j: x[torch.arange(B) // 2],
    "literal": lambda x, i, j: x[torch.tensor([0, 2, 1, 0, 2])],
    "selected": lambda x, i, j: x[i[j]],
    "counts": lambda x, i, j: x.repeat_interleave(torch.tensor([3, 0, 2]), dim=0, output_size=B),
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", SAME)
def test_an_index_made_for_each(name: str) -> None:
    """Keys and values that each compute their index, of the same."""
    assert_selects(keys_and_values_by(SAME[name], SAME[name]), *inputs(), ROWS, ROWS.flip(0))


# What keys and values are made of, and why their copies are read.
COPIED = {
    "segments another index": (lambda x, i, j: x[i], lambda x, i, j: x[j]),
    "segments another way": (lambda x, i, j: x[i], lambda x, i, j: x.index_select(0, i)),
    "segments only keys": (lambda x, i, j: x[i], lambda x, i, j: x.flip(0)[i] * 2),
    "segments at random": (lambda x, i, j: x[torch.randint(0, R, (B,))] * 0 + 1,) * 2,
    "segments another literal": (
        lambda x, i, j: x[torch.tensor([0, 2, 1, 0, 2])],
        lambda x, i, j: x[torch.tensor([0, 2, 1, 1, 2])],
    ),
}


def copies_are_read(fn, *args, reason: str = "") -> None:
    """It is bifurcated attention of copies and suffix, and the report says why."""
    (finding,) = rewrite(capture(fn, *(x.clone() for x in args))).findings
    assert finding.op == "tatten.bifurcated_attention.default", finding
    assert finding.note.startswith(f"selected rows are copied [{Reason(reason).value}]: " if reason else ""), finding
    assert bool(finding.note) == bool(reason)
    gm = capture(fn, *(x.clone() for x in args))
    rewrite(gm)
    (op,) = gm.graph.find_nodes(op="call_function", target=OP)
    assert [int(tensor_of(x).shape[0]) for x in op.args[1]] == [B, B]
    assert len(op.args) == 6
    torch.testing.assert_close(compiled(fn, *(x.clone() for x in args)), fn(*(x.clone() for x in args)))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", COPIED)
def test_selections_that_differ(name: str) -> None:
    reason = "" if name == "segments at random" else "segments"  # arithmetic on the copy hides the selection
    copies_are_read(keys_and_values_by(*COPIED[name]), *inputs(), ROWS, ROWS.flip(0), reason=reason)


def test_random_rows_of_keys_and_values_are_not_the_same() -> None:
    def fn(q, pk, pv, sk, sv):
        k, v = (torch.cat([p[torch.randint(0, R, (B,))], s], 2) for p, s in ((pk, sk), (pv, sv)))
        return sdpa(q, k, v, enable_gqa=True)

    (finding,) = rewrite(capture(fn, *inputs())).findings
    assert finding.note.startswith("selected rows are copied [segments]")


def written(what, when):
    def fn(q, pk, pv, sk, sv, i):
        index = i.view(-1, 1, 1, 1).repeat(1, 1, 1, 1) if when == "before its use" else i
        if when == "before its use":
            i.copy_(i.flip(0))
            k, v = (torch.cat([p.take_along_dim(index, 0), s], 2) for p, s in ((pk, sk), (pv, sv)))
        else:
            k, v = (torch.cat([p[index], s], 2) for p, s in ((pk, sk), (pv, sv)))
            {"index": i, "keys": pk, "values": pv}[what].copy_({"index": i, "keys": pk, "values": pv}[what].flip(0))
        return sdpa(q, k, v, enable_gqa=True)

    return fn


@pytest.mark.parametrize("what", ["index", "keys", "values"])
def test_written_after_its_use(what: str) -> None:
    copies_are_read(written(what, "after its use"), *inputs(), ROWS, reason="written_between")


def test_a_copy_of_an_index_that_is_written_before_its_use() -> None:
    fn = written("index", "before its use")
    (finding,) = rewrite(capture(fn, *inputs(), ROWS.clone())).findings
    assert isinstance(finding, Rewritten)
    torch.testing.assert_close(compiled(fn, *inputs(), ROWS.clone()), fn(*inputs(), ROWS.clone()))


def test_an_index_that_is_written_between_keys_and_values() -> None:
    def fn(q, pk, pv, sk, sv, i):
        k = torch.cat([pk[i.long()], sk], 2)
        i.copy_(i.flip(0))
        return sdpa(q, k, torch.cat([pv[i.long()], sv], 2), enable_gqa=True)

    copies_are_read(fn, *inputs(), ROWS.int(), reason="written_between")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("form", ["indexed", "index_select"])
def test_an_index_that_is_written_between_layers(form: str, masked: bool) -> None:
    """Each layer reads the rows that the index held then."""

    def fn(q, pk, pv, sk, sv, i, mask):
        for _ in range(3):
            k, v = (torch.cat([BY_INDEX[form](p, i), s], 2) for p, s in ((pk, sk), (pv, sv)))
            q = sdpa(q, k, v, attn_mask=mask, enable_gqa=True)
            i.copy_((i + 1) % R)
        return q

    args, mask = inputs(), torch.rand(B, 1, 1, P + S) > 0.3 if masked else None
    gm = capture(fn, *args, ROWS.clone(), mask)
    assert all(not x.note for x in rewrite(gm).findings)
    assert len(gm.graph.find_nodes(op="call_function", target=GROUPS)) == 3
    torch.testing.assert_close(compiled(fn, *args, ROWS.clone(), mask), fn(*args, ROWS.clone(), mask))


PLAIN_COPIES = {  # Not a selection of rows that can be read where they are.
    "heads": lambda x, i: x[:, i % HKV][:, :HKV].expand(B, -1, -1, -1) if x.size(0) == 1 else x[i][:, i % HKV][:, :HKV],
    "length": lambda x, i: x[i][:, :, torch.arange(P)],
    "two indexes": lambda x, i: x[i[:, None], torch.arange(HKV)],
    "two dims": lambda x, i: x[torch.stack([i, i])].flatten(0, 1)[:B],
    "a list": lambda x, i: x[[2, 0, 2, 2, 1]],
    "gather of single numbers": lambda x, i: x.gather(0, (torch.zeros(B, HKV, P, D) + i.view(-1, 1, 1, 1)).long()),
    "one index of all": lambda x, i: torch.take_along_dim(x, i.view(-1, 1, 1, 1).expand(-1, HKV, -1, -1) % R, 0) + 0,
    "another view": lambda x, i: x[i].view(B, HKV, D, P).reshape(B, HKV, P, D),
    "flat in another shape": lambda x, i: F.embedding(i, x.transpose(1, 2).flatten(1)).view(B, HKV, P, D),
    "permuted index": lambda x, i: x.take_along_dim(i.view(1, -1, 1, 1).transpose(0, 1), 0),
    "scaled": lambda x, i: x[i] * 2,
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", PLAIN_COPIES)
def test_other_selections_are_copied(name: str) -> None:
    copies_are_read(forked(PLAIN_COPIES[name], "gqa"), *inputs(), ROWS)


def test_a_mask_of_bools_is_no_index() -> None:
    """It leaves an unknown number of rows, so Dynamo makes no whole graph of it; in parts the result is right."""
    keep = torch.tensor([True, False, True])
    fn, args = forked(lambda x, i: x[i]), (*inputs(batch=2), keep)
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(fn, backend="tatten", options={"inner": "eager"})(*args)
    torch.testing.assert_close(got, fn(*args))


def test_cost_counts_each_row_once_and_at_most_as_often_as_it_is_selected() -> None:
    for rows in (R, 4 * B):
        (finding,) = rewrite(capture(forked(BY_INDEX["indexed"], "gqa"), *inputs(rows=rows), ROWS)).findings
        assert finding.cost.read == 2 * 4 * HKV * D * (min(rows, B) * P + B * S)


def test_an_index_out_of_range_is_an_error() -> None:
    for form in ("indexed", "index_select"):
        with pytest.raises((IndexError, ValueError, RuntimeError)):
            compiled(forked(BY_INDEX[form]), *inputs(), ROWS + 1)


@st.composite
def trees(draw):
    """Levels `(rows, length)` from the root on, and for each level but the root the parent of each of its rows."""
    rows, levels, parents = draw(st.integers(1, 3)), [], []
    for _ in range(draw(st.integers(1, 4))):
        levels.append((rows, draw(st.integers(1, 5))))
        counts = [draw(st.integers(0, 4)) for _ in range(rows)]
        children = [i for i, n in enumerate(counts) for _ in range(n)] or [0]
        parents.append(draw(st.permutations(children)))
        rows = len(children)
    return (*levels, (rows, 3)), parents, draw(st.sampled_from(sorted(BY_INDEX.keys() - {"computed"})))


@fuzz.settings(12)
@given(tree=trees())
def test_random_trees(tree) -> None:
    """Groups of any size at any level, in eager mode with copies and compiled without."""
    levels, parents, form = tree
    torch.manual_seed(0)
    keys = [torch.randn(rows, HKV, length, D, dtype=torch.float64) for rows, length in levels]
    indexes = [torch.tensor(each) for each in parents]

    def fn(q, keys, indexes):
        whole = keys[0]
        for index, key in zip(indexes, keys[1:], strict=True):
            whole = torch.cat([BY_INDEX[form](whole, index), key], 2)
        return sdpa(q, whole, whole, enable_gqa=True)

    args = torch.randn(levels[-1][0], HQ, 2, D, dtype=torch.float64), keys, indexes
    gm = capture(fn, *args)
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Rewritten), finding
    if all(rows > 1 for rows, _ in levels):  # a copy of one row, once, is like any other copy
        assert not selections(gm)
    torch.testing.assert_close(compiled(fn, *args), fn(*args))


class Graphs(expecttest.TestCase):
    """Whole graphs after the rewrite."""

    def test_layers_share_rows(self) -> None:
        """Each layer expands its index itself."""

        def fn(q, pk, pv, sk, sv, i, mask):
            for _ in range(2):
                k, v = (
                    repeat_kv(torch.cat([p.gather(0, i.view(-1, 1, 1, 1).expand(-1, HKV, P, D)), s], 2))
                    for p, s in ((pk, sk), (pv, sv))
                )
                q = sdpa(q, k, v, attn_mask=mask)
            return q

        gm = capture(fn, *inputs(), ROWS, torch.ones(B, 1, 1, P + S, dtype=torch.bool))
        rewrite(gm)
        self.assertExpectedInline(
            listing(gm),
            """\
split = split(l_mask_, [11, 5], -1)
getitem_4 = getitem(split, 0)
getitem_5 = getitem(split, 1)
row_groups_default = row_groups.default(l_i_, 3, 3)
block_mask_default = block_mask.default(getitem_4, 3, l_i_)
block_mask_default_1 = block_mask.default(getitem_5)
bifurcated_attention_default = bifurcated_attention.default(l_q_, [l_pk_, l_sk_], [l_pv_, l_sv_], [getitem_4, getitem_5], [block_mask_default, block_mask_default_1], None, [row_groups_default, None])
getitem_6 = getitem(bifurcated_attention_default, 0)
bifurcated_attention_default_1 = bifurcated_attention.default(getitem_6, [l_pk_, l_sk_], [l_pv_, l_sv_], [getitem_4, getitem_5], [block_mask_default, block_mask_default_1], None, [row_groups_default, None])
getitem_7 = getitem(bifurcated_attention_default_1, 0)
return (getitem_7)""",
        )

    def test_nested_and_repeated(self) -> None:
        def fn(q, x, i, j):
            k = x.repeat_interleave(2, 0)[i].repeat(2, 1, 1, 1).index_select(0, j)
            return sdpa(q, k, k, enable_gqa=True)

        args = torch.randn(B, HQ, 1, D), torch.randn(R, HKV, P, D), ROWS, ROWS
        gm = capture(fn, *args)
        rewrite(gm)
        self.assertExpectedInline(
            listing(gm),
            """\
arange = arange(3, device=device(type='cpu'))
repeat_interleave_1 = repeat_interleave(arange, 2)
getitem_1 = getitem(repeat_interleave_1, l_i_)
repeat_1 = repeat(getitem_1, 2)
index_select_1 = index_select(repeat_1, 0, l_i_)
row_groups_default = row_groups.default(index_select_1, 3, 3)
bifurcated_attention_default = bifurcated_attention.default(l_q_, [l_x_], [l_x_], [None], [None], None, [row_groups_default])
getitem_2 = getitem(bifurcated_attention_default, 0)
return (getitem_2)""",
        )

    def test_dynamic_batches(self) -> None:
        q, x, _, _, _ = inputs()
        rows = ROWS.clone()
        for tensor in (q, x, rows):
            torch._dynamo.mark_dynamic(tensor, 0)
        gm = capture(lambda q, x, i: sdpa(q, x[i], x[i], enable_gqa=True), q, x, rows)
        rewrite(gm)
        self.assertExpectedInline(
            listing(gm),
            """\
size = size(l_x_, 0)
arange = arange(size, device=device(type='cpu'))
getitem_2 = getitem(arange, l_i_)
size_1 = size(l_x_, 0)
row_groups_default = row_groups.default(getitem_2, size_1, 3)
bifurcated_attention_default = bifurcated_attention.default(l_q_, [l_x_], [l_x_], [None], [None], None, [row_groups_default])
getitem_3 = getitem(bifurcated_attention_default, 0)
return (getitem_3)""",
        )
