"""Steps of models with pages: what layers share, writes before a gather, dynamic sizes, results of whole programs."""

from __future__ import annotations

import expecttest
import pytest
import torch
import torch.nn.functional as F
from graphs import capture, listing, run_rewritten
from page_forms import FORMS, HKV, HQ, OP, PAGE, B, D, N, P, S, attend, in_order, inputs, paged, slots, step

import tatten
from tatten.passes import rewrite
from tatten.passes.byte_sizes import shown_bytes


class TestGraphs(expecttest.TestCase):
    def test_layers_share_the_table_and_the_block_mask(self) -> None:
        def two_layers(q, k, v, table, mask, where, new):
            for _ in range(2):
                k.view(-1, HKV, D).index_copy_(0, where, new)
                v.view(-1, HKV, D).index_copy_(0, where, new)
                q = attend(q, in_order(k, table.long()), in_order(v, table.long()), mask)
            return q

        args = *inputs(FORMS["pool[table]"]), torch.arange(B), torch.randn(B, HKV, D, dtype=torch.float64)
        gm = capture(two_layers, *args)
        rewrite(gm)
        self.assertExpectedInline(
            listing(gm),
            """\
view = view(l_k_, -1, 2, 8)
index_copy_ = index_copy_(view, 0, l_where_, l_new_)
view_1 = view(l_v_, -1, 2, 8)
index_copy__1 = index_copy_(view_1, 0, l_where_, l_new_)
block_mask_default = block_mask.default(l_mask_)
remainder = remainder(l_table_, 23)
decode_attention_default = decode_attention.default(l_q_, l_k_, l_v_, l_mask_, None, None, block_mask_default, block_table=remainder)
getitem_4 = getitem(decode_attention_default, 0)
view_2 = view(l_k_, -1, 2, 8)
index_copy__2 = index_copy_(view_2, 0, l_where_, l_new_)
view_3 = view(l_v_, -1, 2, 8)
index_copy__3 = index_copy_(view_3, 0, l_where_, l_new_)
decode_attention_default_1 = decode_attention.default(getitem_4, l_k_, l_v_, l_mask_, None, None, block_mask_default, block_table=remainder)
getitem_5 = getitem(decode_attention_default_1, 0)
return (getitem_5)""",
        )

    def test_slots_that_are_computed_of_a_table(self) -> None:
        gm = capture(step(FORMS["slots of a table"]), *inputs(FORMS["slots of a table"])[:4])
        rewrite(gm)
        self.assertExpectedInline(
            listing(gm),
            """\
view = view(l_k_, -1, 2, 8)
view_1 = view(l_v_, -1, 2, 8)
unflatten = unflatten(view, 0, (-1, 4))
unflatten_1 = unflatten(view_1, 0, (-1, 4))
remainder = remainder(l_table_, 23)
new_full = new_full(remainder, (3), 24)
decode_attention_default = decode_attention.default(l_q_, unflatten, unflatten_1, None, new_full, None, None, block_table=remainder)
getitem_4 = getitem(decode_attention_default, 0)
return (getitem_4)""",
        )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["pool[table]", "slots", "slots of a table"])
def test_negative_entries_count_from_the_last_page(name: str, masked: bool) -> None:
    q, k, v, table, mask = inputs(FORMS[name])
    table.fill_(-1)
    table[:, 0] = -len(k)
    mask = torch.rand(mask.shape) > 0.3 if masked else None
    _, _, out = paged(step(FORMS[name]), q, k, v, table, mask)
    torch.testing.assert_close(out, step(FORMS[name])(q, k, v, table, mask), rtol=0, atol=1e-12)


def test_numbers_of_take_along_dim_count_modulo_the_keys() -> None:
    form = FORMS["take_along_dim"]
    q, k, v, table, mask = inputs(form)
    table += torch.tensor([-2 * N, -N, 3 * N], dtype=torch.int32)[:, None]
    _, _, out = paged(step(form), q, k, v, table, mask)
    torch.testing.assert_close(out, step(form)(q, k, v, table, mask), rtol=0, atol=1e-12)


def test_a_query_whose_keys_are_all_excluded_by_a_finite_bias() -> None:
    """It gets the mean of all values, those of stale pages included."""
    q, k, v, table, mask = inputs(FORMS["pool[table]"])
    bias = torch.full(mask.shape, torch.finfo(torch.float32).min, dtype=torch.float64)
    table[:, -2:] = -1
    _, _, out = paged(step(FORMS["pool[table]"]), q, k, v, table, bias)
    torch.testing.assert_close(out, step(FORMS["pool[table]"])(q, k, v, table, bias), rtol=0, atol=1e-12)


def index_copy(x, where, new):
    x.view(-1, HKV, D).index_copy_(0, where, new)


def setitem(x, where, new):
    x[where // PAGE, where % PAGE] = new


def index_put(x, where, new):
    x.index_put_((where // PAGE, where % PAGE), new)


def flat_view_setitem(x, where, new):
    x.flatten(0, 1)[where] = new


@pytest.mark.drawn(4)
@pytest.mark.parametrize("write", [index_copy, setitem, index_put, flat_view_setitem])
@pytest.mark.parametrize("name", ["pool[table]", "index_select", "slots of a table", "flat slots of a table"])
def test_pools_written_before_the_gather(name: str, write) -> None:
    form = FORMS[name]

    def fn(q, k, v, table, mask, where, new):
        slot = slots(table)  # read before the pools are written
        table[:, -1] = 1
        for _ in range(2):
            write(k, where, new)
            write(v, where, new * 2)
            q = attend(q, form.gather(k, table), form.gather(v, table), mask)
            new = new + 1
        return q, k.clone(), slot

    args = *inputs(form), torch.tensor([5, 60, 17]), torch.randn(B, HKV, D, dtype=torch.float64)
    want = fn(*(x.clone() for x in args))
    findings, gm, out = run_rewritten(fn, *(x.clone() for x in args))
    for got, x in zip(out, want, strict=True):
        torch.testing.assert_close(got, x, rtol=0, atol=1e-12)
    assert all("in pages of 4 keys" in x.note for x in findings)
    ops = gm.graph.find_nodes(op="call_function", target=OP)
    assert len({x.kwargs["block_table"] for x in ops}) == 1
    assert len({x.args[6] for x in ops}) == 1


def test_a_table_that_is_written_between_layers() -> None:
    def fn(q, k, v, table, mask):
        q = attend(q, in_order(k, table), in_order(v, table), mask)
        table[:, 0] = 2
        return attend(q, in_order(k, table), in_order(v, table), mask)

    args = inputs(FORMS["pool[table]"])
    want = fn(*(x.clone() for x in args))
    _, gm, out = run_rewritten(fn, *(x.clone() for x in args))
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    tables = [x.kwargs["block_table"] for x in gm.graph.find_nodes(op="call_function", target=OP)]
    assert len(set(tables)) == 2


@pytest.mark.parametrize(
    "name", ["pool[table]", "index_select", "heads first", "slots", "flat slots of a table", "gather"]
)
@pytest.mark.parametrize("masked", [False, True])
def test_dynamic_batch_pages_and_columns(name: str, masked: bool) -> None:
    form, graphs = FORMS[name], []

    def backend(gm, example_inputs):
        graphs.append((rewrite(gm).findings, gm))
        return gm

    torch._dynamo.reset()
    compiled = torch.compile(step(form), backend=backend, fullgraph=True)
    for seed, (batch, columns, n_pages) in enumerate([(3, 6, 23), (5, 8, 40), (4, 3, 9)]):
        args = inputs(form, seed, batch=batch, columns=columns, n_pages=n_pages)
        want = step(form)(*args)
        pools = [(x, 2 if form.layout == "one row" else 0) for x in args[1:3]]
        for x, dim in ((args[0], 0), *pools, (args[3], 0), (args[3], 1), (args[4], 0), (args[4], 3)):
            torch._dynamo.mark_dynamic(x, dim)
        with torch.no_grad():
            got = compiled(*args if masked else args[:4])
        if masked:
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
        else:
            torch.testing.assert_close(got, step(form)(*args[:4]), rtol=0, atol=1e-12)
    ((findings, _),) = graphs
    assert f"in pages of {form.page} key" in findings[0].note


def test_one_sequence_with_a_table_of_one_dim() -> None:
    q, k, v, table, mask = inputs(FORMS["pool[table]"], batch=1)

    def fn(q, k, v, table, mask):
        return attend(q, *(x[table].flatten(0, 1).transpose(0, 1)[None] for x in (k, v)), mask)

    _, op, out = paged(fn, q, k, v, table[0], mask)
    torch.testing.assert_close(out, fn(q, k, v, table[0], mask), rtol=0, atol=1e-12)
    assert op.kwargs["block_table"].meta["example_value"].shape == (1, P)


@pytest.mark.drawn(9)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("n_pages", [1, 9])
@pytest.mark.parametrize("name", FORMS)
def test_sizes_of_one(name: str, batch: int, columns: int, n_pages: int) -> None:
    args = inputs(FORMS[name], batch=batch, columns=columns, n_pages=n_pages)
    _, _, out = run_rewritten(step(FORMS[name]), *args)
    torch.testing.assert_close(out, step(FORMS[name])(*args), rtol=0, atol=1e-12)


def test_queries_of_a_chunk_are_causal_by_their_mask() -> None:
    form = FORMS["index_select"]
    q, k, v, table, _ = inputs(form, q_len=4)
    lens = torch.tensor([9, 24, 4])
    mask = torch.arange(S) <= (lens[:, None] - 4 + torch.arange(4))[:, None, :, None]
    _, _, out = paged(step(form), q, k, v, table, mask)
    torch.testing.assert_close(out, step(form)(q, k, v, table, mask), rtol=0, atol=1e-12)


def test_pages_that_no_key_of_the_mask_is_in_may_hold_anything() -> None:
    q, k, v, table, mask = inputs(FORMS["pool[table]"])
    want = step(FORMS["pool[table]"])(q, k, v, table, mask)
    read = table[mask[:, 0, 0].view(B, P, PAGE).any(dim=2)].long().unique()
    unread = torch.ones(N, dtype=torch.bool).index_fill(0, read, False)
    for x in (k, v):
        x[unread] = torch.nan
    _, _, out = paged(step(FORMS["pool[table]"]), q, k, v, table, mask)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)


def test_batch_invariant() -> None:
    form = FORMS["pool[table]"]
    gm = capture(step(form), *inputs(form))
    rewrite(gm, batch_invariant=True)
    (op,) = gm.graph.find_nodes(op="call_function", target=OP)
    assert op.kwargs["batch_invariant"]
    assert "block_table" in op.kwargs


def test_attention_that_is_written_out() -> None:
    def fn(q, k, v, table, mask):
        keys, values = (in_order(x, table).repeat_interleave(HQ // HKV, 1) for x in (k, v))
        scores = (q @ keys.mT * D**-0.5).masked_fill(~mask, torch.finfo(torch.float32).min)
        return scores.softmax(-1) @ values

    args = inputs(FORMS["pool[table]"])
    finding, _, out = paged(fn, *args)
    assert finding.note.startswith("attention written out")
    torch.testing.assert_close(out, fn(*args), rtol=0, atol=1e-12)


def test_keys_in_8_bits_with_a_scale_per_head() -> None:
    def fn(q, k, v, table, mask, scale):
        return attend(q, *((in_order(x, table).to(q.dtype) * scale) for x in (k, v)), mask)

    q, k, v, table, mask = inputs(FORMS["pool[table]"])
    k, v = ((x * 40).round().clamp(-127, 127).to(torch.int8) for x in (k, v))
    args = q, k, v, table, mask, torch.rand(HKV, 1, 1, dtype=torch.float64) / 20
    finding, op, out = paged(fn, *args)
    assert "not read" not in finding.note
    assert op.args[1].meta["example_value"].dtype == torch.int8
    torch.testing.assert_close(out, fn(*args), rtol=0, atol=1e-12)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_steps_of_a_compiled_model(inner: str) -> None:
    """Tables and lengths change between steps; stale entries, poison in unused pages."""
    form, torch_dtype = FORMS["pool[table]"], torch.float32

    def fn(q, k, v, table, lens, new):
        index = torch.arange(len(table))
        page, offset = table[index, lens // PAGE].long(), lens % PAGE
        k[page, offset] = new
        v[page, offset] = new * 0.5
        mask = (torch.arange(S) <= lens[:, None])[:, None, None]
        return attend(q, form.gather(k, table), form.gather(v, table), mask)

    torch._dynamo.reset()
    q, k, v, _, _ = inputs(form, dtype=torch_dtype)
    compiled = torch.compile(fn, backend="tatten", options={"inner": inner}, fullgraph=True)
    lens, mine, theirs = torch.tensor([3, 17, 10]), (k.clone(), v.clone()), (k.clone(), v.clone())
    for seed in range(4):
        torch.manual_seed(seed)
        table = torch.randperm(N)[: B * P].view(B, P).int()
        table[torch.arange(P) > lens[:, None] // PAGE] = [-1, N - 1, 0, -N][seed]
        new = torch.randn(B, HKV, D)
        with torch.no_grad(), tatten.recording() as report:
            got = compiled(q, *mine, table, lens, new)
        torch.testing.assert_close(got, fn(q, *theirs, table, lens, new), rtol=1e-4, atol=1e-5)
        assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))
        if seed == 0:
            assert "in pages of 4 keys" in report.rewritten[0].note
        lens = lens + 1


def test_an_exported_program() -> None:
    form = FORMS["index_select"]

    class Model(torch.nn.Module):
        def forward(self, q, k, v, table, mask):
            return step(form)(q, k, v, table, mask)

    args = tuple(inputs(form))
    with torch.no_grad():
        program = tatten.rewrite(torch.export.export(Model(), args))
    ops = [x for x in program.graph.nodes if x.target is OP]
    assert "block_table" in ops[0].kwargs
    torch.testing.assert_close(program.module()(*args), step(form)(*args), rtol=0, atol=1e-12)
    program = program.run_decompositions(tatten.decompositions())
    assert not [x for x in program.graph.nodes if "tatten" in str(x.target)]
    torch.testing.assert_close(program.module()(*args), step(form)(*args), rtol=0, atol=1e-12)


def test_sequences_one_after_the_other_in_one_row() -> None:
    """transformers' continuous batching: keys of all sequences by their numbers, and a mask of a block for each."""

    def fn(q, k, v, index, mask):
        return attend(q, *(x.index_select(0, index).transpose(0, 1).unsqueeze(0) for x in (k, v)), mask)

    _, k, v, _, _ = inputs(FORMS["slots"])
    sequences, of_query = torch.arange(12) // 5, torch.tensor([0, 1, 1, 2])
    mask = torch.where(of_query[:, None] == sequences, 0.0, -torch.inf).double()[None, None]
    args = torch.randn(1, HQ, 4, D, dtype=torch.float64), k, v, torch.randperm(N)[:12], mask
    _, op, out = paged(fn, *args)
    assert op.kwargs["block_table"].meta["example_value"].shape == (1, 12)
    torch.testing.assert_close(out, fn(*args), rtol=0, atol=1e-12)


def test_the_report_of_explain() -> None:
    with torch.no_grad():
        report = str(tatten.explain(step(FORMS["pool[table]"]), *inputs(FORMS["pool[table]"])))
    assert "table int32[3, 6]" in report
    assert "k float64[23, 4, 2, 8]" in report
    size = 2 * 2 * B * S * HKV * D * 8
    assert (
        f"read by block table int32[3, 6] in pages of 4 keys; the gathers moved {shown_bytes(size)}, and are gone"
        in report
    )


def test_flex_attention_over_pages() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def fn(q, k, v, table):
        return flex_attention(q, in_order(k, table), in_order(v, table), enable_gqa=True)

    args = [x.float() if x.is_floating_point() else x for x in inputs(FORMS["pool[table]"])[:4]]
    _, _, out = paged(fn, *args)
    torch.testing.assert_close(
        out, F.scaled_dot_product_attention(args[0], *(in_order(x, args[3]) for x in args[1:3]), enable_gqa=True)
    )
