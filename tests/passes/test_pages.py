"""Keys that a program gathers through a block table are read in pages, where the pool has them."""

from __future__ import annotations

import pytest
import torch
from graphs import capture, run_rewritten
from page_forms import FORMS, HKV, OP, PAGE, D, N, P, S, attend, in_order, inputs, paged, step
from torch._subclasses.fake_tensor import FakeTensorMode

import tatten
from tatten.passes import Declined, Rewritten, cost, rewrite

CPU_RATES = cost.RATES["cpu"]  # tests/conftest.py replaces the rates in each test


@pytest.mark.drawn(9)
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("name", FORMS)
def test_is_read_in_pages(name: str, q_len: int) -> None:
    form = FORMS[name]
    args = inputs(form, q_len=q_len)
    finding, op, out = paged(step(form), *args)
    torch.testing.assert_close(out, step(form)(*args), rtol=0, atol=1e-12)
    assert "not read in pages" not in finding.note
    pools = [x.meta["example_value"] for x in op.args[1:3]]
    assert [x.shape[1] for x in pools] == [form.page] * 2
    table = op.kwargs["block_table"].meta["example_value"]
    assert table.dtype == torch.int32
    assert not any(x.meta["example_value"].numel() == args[1].numel() for x in op.graph.nodes if x.name == "index")


def left(fn, *args, reason: str = "pages", **options) -> str:
    """The remark on a call that is rewritten, but reads what the program gathers."""
    (finding,), gm, out = run_rewritten(fn, *(x.clone() for x in args), **options)
    assert isinstance(finding, Rewritten), finding
    (op,) = gm.graph.find_nodes(op="call_function", target=OP)
    assert "block_table" not in op.kwargs
    torch.testing.assert_close(out, fn(*(x.clone() for x in args)), rtol=0, atol=1e-12)
    head = f"not read in pages [{reason}]: "
    assert head in finding.note, finding.note
    return finding.note.partition(head)[2]


def by(gather_key, gather_value=None):
    gather_value = gather_value or gather_key
    return lambda q, k, v, t, m: attend(q, gather_key(k, t), gather_value(v, t), m)


def interleaved(x, t):
    return x[t].transpose(1, 2).flatten(1, 2).transpose(1, 2)


def part_of_a_page(x, t):
    return x[t][:, :, :2].flatten(1, 2).transpose(1, 2)


def some_keys(x, t):
    return x[t].flatten(1, 2)[:, :-1].transpose(1, 2)


def batch_last(x, t):
    return x[t].transpose(0, 1).flatten(1, 2).transpose(1, 2)


def cast(x, t):
    return x.float()[t].double().flatten(1, 2).transpose(1, 2)


def three_dims(x, t):
    return x[t.unflatten(1, (2, -1))].flatten(1, 3).transpose(1, 2)


def other_table(x, t):
    return in_order(x, t + 1)


def dense(x, t):
    return x.flatten(0, 1)[: t.shape[1] * x.shape[1]].transpose(0, 1).expand(len(t), -1, -1, -1)


LEFT = {
    "pages interleaved": (by(interleaved), "the keys of its pages are interleaved"),
    "three dims": (by(three_dims), "is gathered by int32[3, 2, 3], in a form that isn't known"),
    "part of a page": (by(part_of_a_page), "in a form that isn't known"),
    "not all keys": (by(some_keys), "in a form that isn't known"),
    "cast": (by(cast), "is gathered by int32[3, 6], and cast from torch.float32 to torch.float64"),
    "pages first": (lambda q, k, v, t, m: by(batch_last)(q, k, v, t.T, m), "but not one row for each sequence"),
    "two tables": (by(in_order, other_table), "key and value have block tables of their own"),
}


@pytest.mark.parametrize("name", LEFT)
def test_is_gathered_and_the_report_says_why(name: str) -> None:
    fn, why = LEFT[name]
    q, k, v, table, mask = inputs(FORMS["pool[table]"])
    width = {"part of a page": S // 2, "not all keys": S - 1}.get(name, S)
    assert why in left(fn, q, k, v, table.clamp(0, N - 2), mask[..., :width])


def another_page(q, k, v, t, m):
    return attend(q, in_order(k, t), in_order(v.view(-1, 2, HKV, D), t.repeat_interleave(2, 1)), m)


def gathered_alone(q, k, v, t, m):
    return attend(q, in_order(k, t), dense(v, t), m)


def page_of_3(q, k, v, t, m):
    return attend(q, in_order(k[:, :3], t), in_order(v[:, :3], t), m[..., : P * 3])


def a_page_of_512(q, k, v, t, m):
    k, v = (x.repeat(1, 128, 1, 1) for x in (k, v))
    return attend(q, in_order(k, t), in_order(v, t), m.repeat(1, 1, 1, 128))


def rows_shared(q, k, v, t, m):
    return attend(q, *(in_order(x, t[:1]).expand(len(q), -1, -1, -1) for x in (k, v)), m)


def read_twice(q, k, v, t, m):
    keys = in_order(k, t)
    return attend(q, keys, in_order(v, t), m) + keys.sum()


def returned(q, k, v, t, m):
    keys, values = in_order(k, t), in_order(v, t)
    return attend(q, keys, values, m), values


def two_calls(q, k, v, t, m):
    keys, values = in_order(k, t), in_order(v, t)
    return attend(attend(q, keys, values, m), keys, values, m)


def pool_written(q, k, v, t, m):
    keys, values = in_order(k, t), in_order(v, t)
    k[3].mul_(2)
    return attend(q, keys, values, m)


def table_written(q, k, v, t, m):
    keys, values = in_order(k, t), in_order(v, t)
    t.zero_()
    return attend(q, keys, values, m)


def copy_written(q, k, v, t, m):
    keys, values = in_order(k, t), in_order(v, t)
    values[:, :, 2] = 1
    return attend(q, keys, values, m)


OTHERS = {
    "another page": (another_page, "pages", "block tables of their own"),
    "gathered alone": (gathered_alone, "pages", "key is gathered through a block table, value is not"),
    "page of 3": (page_of_3, "pages", "a page has 3 keys, no power of two up to 256"),
    "page of 512": (a_page_of_512, "pages", "a page has 512 keys"),
    "read twice": (read_twice, "pages_used", "is read by `sum_1`, too"),
    "pool written": (pool_written, "written_between", "the pool or the block table of key is written by `mul_`"),
    "copy written": (copy_written, "pages_used", "`values` is read by `setitem`, too"),
    "table written": (table_written, "written_between", "the pool or the block table of key is written by `zero_`"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_pages_that_are_known_but_not_read(name: str) -> None:
    fn, reason, why = OTHERS[name]
    assert why in left(fn, *inputs(FORMS["pool[table]"]), reason=reason)


def test_a_gathered_tensor_that_is_returned_is_made_anyway() -> None:
    args = inputs(FORMS["pool[table]"])
    (finding,), _, out = run_rewritten(returned, *args)
    assert "[pages_used]: `" in finding.note
    assert "is read by `output`" in finding.note
    for got, want in zip(out, returned(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_two_calls_that_share_what_is_gathered() -> None:
    args = inputs(FORMS["pool[table]"])
    findings, _, out = run_rewritten(two_calls, *args)
    assert ["pages_used" in x.note for x in findings] == [True, True]
    torch.testing.assert_close(out, two_calls(*args), rtol=0, atol=1e-12)


def test_keys_that_a_top_k_picks() -> None:
    def fn(q, k, v, t, m):
        scores = (q.sum(1) @ k.sum((1, 2))[t].transpose(1, 2)).repeat_interleave(PAGE, 2)
        picked = scores.masked_fill(~m[:, 0], -torch.inf).topk(3, -1).indices
        mask = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, picked, True)
        return attend(q, in_order(k, t), in_order(v, t), m & mask[:, None])

    args = inputs(FORMS["pool[table]"])
    assert "takes no block table beside indices" in left(fn, *args)


def test_scales_for_each_key() -> None:
    def fn(q, k, v, t, m, scale):
        return attend(q, *((in_order(x, t).to(q.dtype) * in_order(scale, t)) for x in (k, v)), m)

    q, k, v, t, m = inputs(FORMS["pool[table]"])
    k, v = ((x * 40).round().clamp(-127, 127).to(torch.int8) for x in (k, v))
    args = q, k, v, t, m, torch.rand(N, PAGE, HKV, 1, dtype=torch.float64) / 20
    assert "each key has a scale of its own" in left(fn, *args)


class OnCuda(torch.fx.Interpreter):
    """Runs a graph on fake tensors of a GPU and leaves their like with its nodes."""

    def run_node(self, n):
        result = super().run_node(n)
        n.meta["example_value"] = result
        return result


def on_a_gpu(fn, *args) -> torch.fx.GraphModule:
    gm = capture(fn, *args)
    values = [x.meta["example_value"] for x in gm.graph.find_nodes(op="placeholder")]
    with FakeTensorMode():
        OnCuda(gm).run(*(torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in values))
    return gm


BY_INDEX_SELECT = FORMS["index_select"]  # a PyTorch without CUDA runs no `x[table]` on fake tensors of a GPU


def test_a_gpu_finds_the_blocks_of_a_mask_once() -> None:
    def two_layers(q, *others):
        return step(BY_INDEX_SELECT)(step(BY_INDEX_SELECT)(q, *others), *others)

    gm = on_a_gpu(two_layers, *inputs(BY_INDEX_SELECT, dtype=torch.bfloat16))
    findings = rewrite(gm).findings
    assert [x.provider for x in findings] == ["triton"] * 2
    ops = gm.graph.find_nodes(op="call_function", target=OP)
    assert len({x.kwargs["block_table"] for x in ops}) == 1
    (blocks,) = {x.args[6] for x in ops}
    assert blocks.target is torch.ops.tatten.block_mask.default
    assert [x.args[4] for x in ops] == [None, None]


def test_a_gpu_without_a_mask_gathers_few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of the op may take longer than SDPA and the copy of few pages, as for other calls without a mask."""
    monkeypatch.delitem(cost.RATES, "cuda")
    for columns, is_paged in ((P, False), (16384, True)):
        args = inputs(BY_INDEX_SELECT, dtype=torch.bfloat16, columns=columns)
        gm = on_a_gpu(step(BY_INDEX_SELECT), *args[:4])
        (finding,) = rewrite(gm).findings
        assert is_paged if isinstance(finding, Rewritten) else finding.decline.reason == "small"
        ops = gm.graph.find_nodes(op="call_function", target=OP)
        assert ["block_table" in x.kwargs for x in ops] == [True] * is_paged


def read_on_a_cpu(
    dtype: torch.dtype, batch: int, heads: tuple[int, int], columns: int, dim: int
) -> Declined | Rewritten:
    """The finding for a gather of pages of 16."""
    q_heads, kv_heads = heads
    pools = torch.empty(2, batch * columns + 1, 16, kv_heads, dim, dtype=dtype)
    table = torch.arange(batch * columns, dtype=torch.int32).view(batch, columns)
    mask = torch.ones(batch, 1, 1, 16 * columns, dtype=torch.bool)
    query = torch.empty(batch, q_heads, 1, dim, dtype=dtype)
    (finding,) = rewrite(capture(step(FORMS["pool[table]"]), query, *pools, table, mask)).findings
    return finding


@pytest.mark.parametrize(
    ("dtype", "batch", "columns", "estimate"),
    [
        (torch.float32, 8, 32, "262 us saved by reading 4 MiB instead of moving 24 MiB, about 460 us more"),
        (torch.float32, 64, 32, None),
        (torch.bfloat16, 8, 8, "131 us saved by reading 512 KiB instead of moving 1.5 MiB, about 276 us more"),
        (torch.bfloat16, 8, 32, None),
    ],
)
def test_a_cpu_gathers_short_sequences(
    dtype: torch.dtype, batch: int, columns: int, estimate: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The op copies pages, and has a cost of its own. The reads that it saves must be worth both."""
    monkeypatch.setitem(cost.RATES, "cpu", CPU_RATES)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    finding = read_on_a_cpu(dtype, batch, (8, 2), columns, 64)
    if estimate is None:
        assert isinstance(finding, Rewritten)
    else:
        assert finding.decline.reason == "small"
        assert estimate in finding.decline.detail


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2, 4, 8, 16])
def test_any_cpu_reads_long_sequences_in_pages(
    dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cost.RATES, "cpu", CPU_RATES)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert isinstance(read_on_a_cpu(dtype, 8, (32, 8), 256, 128), Rewritten)


def test_what_is_no_table_gets_no_remark() -> None:
    args = inputs(FORMS["pool[table]"])
    for fn in (rows_shared, lambda q, k, v, t, m: attend(q, *(x[[2, 0, 1]] for x in (dense(k, t), dense(v, t))), m)):
        findings, _, out = run_rewritten(fn, *args)
        assert "pages" not in str(findings)
        torch.testing.assert_close(out, fn(*args), rtol=0, atol=1e-12)


def test_keys_that_want_gradients() -> None:
    q, k, v, table, mask = inputs(FORMS["pool[table]"])
    paged(step(FORMS["pool[table]"]), q, k.requires_grad_(), v, table, mask)


def test_pages_of_a_dynamic_size() -> None:
    """A size that only a guard makes a number is a `SymInt`, also where a page is as large as head_dim."""

    def attend(q, k, v, table, lens):
        k, v = (x.index_select(0, table.flatten()).view(2, -1, 2, 16).transpose(1, 2) for x in (k, v))
        mask = (torch.arange(k.shape[2]) < lens[:, None])[:, None, None]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    compiled, lens = torch.compile(attend, backend="tatten", options={"inner": "eager"}, dynamic=True), [40, 100]
    with tatten.recording() as report:
        for page in (16, 8, 12):
            pools = torch.randn(2, 40, page, 2, 16, dtype=torch.float64)
            args = torch.randn(2, 4, 1, 16, dtype=torch.float64), *pools, torch.randperm(40).view(2, 20)
            torch.testing.assert_close(compiled(*args, torch.tensor(lens)), attend(*args, torch.tensor(lens)))
    assert "in pages of 16 keys" in str(report)
    assert "tatten itself failed" not in str(report)
