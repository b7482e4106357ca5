"""On a GPU: programs that gather keys through a block table, compiled, give what they give in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from page_forms import FORMS, HKV, PAGE, B, D, Form, N, P, S, attend, in_order, inputs, step
from torch import Tensor
from torch._dynamo.utils import counters

import tatten

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def on_device(args: list[Tensor]) -> list[Tensor]:
    return [x.to(DEVICE) for x in args]


def exactly(fn: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """The result in float64 and eager mode; `args` stay as they are."""
    return fn(*(x.double() if x.is_floating_point() else x.clone() for x in args))


def assert_near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=1e-2)


def run(compiled: Callable[..., Tensor], *args: Tensor) -> tuple[Tensor, tatten.Report]:
    with torch.no_grad(), tatten.recording() as report:
        return compiled(*args), report


def compile_anew(fn: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(fn, backend="tatten", fullgraph=True, **options)


def poison_unread(form: Form, args: list[Tensor]) -> None:
    """Write NaN to each page that no sequence reads by the mask."""
    _, key, value, table, mask = args
    dim = 2 if form.layout == "one row" else 0
    read = mask[:, 0, 0].unflatten(1, (table.shape[1], -1)).any(dim=2)
    unread = torch.ones(key.shape[dim], dtype=torch.bool, device=DEVICE)
    unread[table[read].long()] = False
    for x in (key, value):
        x.index_fill_(dim, unread.nonzero().flatten(), torch.nan)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str, dtype: torch.dtype) -> None:
    form = FORMS[name]
    compiled = compile_anew(step(form), dynamic=False)
    for q_len in (1, 4):
        args = on_device(inputs(form, q_len=q_len, dtype=dtype))
        want = exactly(step(form), *args)
        poison_unread(form, args)
        got, report = run(compiled, *args)
        assert_near(got, want)
        assert f"in pages of {form.page} key" in report.rewritten[0].note


@pytest.mark.parametrize("name", ["pool[table]", "heads first", "slots", "slots of a table", "gather"])
def test_without_a_mask(name: str) -> None:
    form = FORMS[name]
    args = on_device(inputs(form, dtype=torch.bfloat16))[:4]
    got, report = run(compile_anew(step(form)), *args)
    assert_near(got, exactly(step(form), *args))
    assert f"in pages of {form.page} key" in report.rewritten[0].note


def test_a_query_whose_keys_are_all_excluded_by_a_finite_bias() -> None:
    """It gets the mean of all values, those of stale pages included."""
    form = FORMS["pool[table]"]
    args = on_device(inputs(form, dtype=torch.bfloat16))
    bias = torch.where(args[4], 0.0, torch.finfo(torch.bfloat16).min).bfloat16()
    bias[0] = torch.finfo(torch.bfloat16).min
    got, report = run(compile_anew(step(form)), *args[:4], bias)
    assert_near(got, exactly(step(form), *args[:4], bias))
    assert "in pages of 4 keys" in report.rewritten[0].note


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["pool[table]", "index_select", "slots", "flat slots of a table", "gather"])
def test_dynamic_batch_pages_and_columns(name: str, masked: bool) -> None:
    form, compiled, notes = FORMS[name], compile_anew(step(FORMS[name])), list[str]()
    for seed, (batch, columns, n_pages) in enumerate([(3, 6, 23), (5, 8, 40), (4, 3, 9)]):
        args = on_device(inputs(form, seed, batch=batch, columns=columns, n_pages=n_pages, dtype=torch.bfloat16))
        want = exactly(step(form), *args if masked else args[:4])
        if masked:
            poison_unread(form, args)
        pools = [(x, 2 if form.layout == "one row" else 0) for x in args[1:3]]
        for x, dim in ((args[0], 0), *pools, (args[3], 0), (args[3], 1), (args[4], 0), (args[4], 3)):
            torch._dynamo.mark_dynamic(x, dim)
        got, report = run(compiled, *args if masked else args[:4])
        assert_near(got, want)
        notes += [x.note for x in report.rewritten]
    (note,) = notes
    assert f"in pages of {form.page} key" in note


def wide_inputs(page: int, columns: int) -> list[Tensor]:
    """A query, two pools and a table of 4 sequences, with widths of real models, and lengths."""
    n_pages = 5 * columns
    pools = torch.randn(2, n_pages, page, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    table = torch.randperm(n_pages, device=DEVICE)[: 4 * columns].view(4, columns).int()
    lens = torch.randint(1, columns * page + 1, (4,), device=DEVICE)
    return [torch.randn(4, 32, 1, 128, device=DEVICE, dtype=torch.bfloat16), *pools, table, lens]


def of_lengths(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    """Two layers over pages, with a mask of lengths that are on the device."""
    for _ in range(2):
        keys, values = in_order(k, table), in_order(v, table)
        mask = (torch.arange(keys.shape[2], device=lens.device) < lens[:, None])[:, None, None]
        q = attend(q, keys, values, mask)
    return q


@pytest.mark.parametrize("page", [1, 16, 256])
def test_reduce_overhead_serves_any_table_and_lengths(page: int) -> None:
    columns = 2048 // page
    args = wide_inputs(page, columns)
    compiled = compile_anew(of_lengths, mode="reduce-overhead", dynamic=False)
    counters.clear()
    for n in (1, 63, 64, 65, 1000, 2048):
        args[3] = torch.randperm(5 * columns, device=DEVICE)[: 4 * columns].view(4, columns).int()
        args[4] = torch.randint(1, n + 1, (4,), device=DEVICE)
        torch.compiler.cudagraph_mark_step_begin()
        got, _ = run(compiled, *args)
        assert_near(got, exactly(of_lengths, *args))
    assert counters["tatten"]["rewritten"] == 2
    assert counters["inductor"]["cudagraph_skips"] == 0
    torch._dynamo.reset()


def decode(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor, new: Tensor) -> Tensor:
    """A step that writes a token to both pools, and then gathers them."""
    index, page = torch.arange(len(table), device=lens.device), k.shape[1]
    entry, offset = table[index, lens // page].long(), lens % page
    k[entry, offset] = new
    v[entry, offset] = new * 0.5
    return of_lengths(q, k, v, table, lens + 1)


@pytest.mark.parametrize("page", [1, 16, 64])
def test_a_captured_step_that_writes_before_it_gathers(page: int) -> None:
    """Tables, lengths and tokens change between replays; pages that no sequence reads are NaN."""
    columns = 1024 // page
    args = [*wide_inputs(page, columns), torch.randn(4, 8, 128, device=DEVICE, dtype=torch.bfloat16)]
    _, key, value, table, lens, new = args
    lens.fill_(5)
    compiled = compile_anew(decode, dynamic=False)
    _, report = run(compiled, *args)
    assert all(f"in pages of {page} key" in x.note for x in report.rewritten)
    assert len(report.rewritten) == 2
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = compiled(*args)
    for n in (1, 64, 500, 1024):
        table.copy_(torch.randperm(len(key), device=DEVICE)[: 4 * columns].view(4, columns))
        lens.random_(0, n)
        new.normal_()
        key.normal_()
        value.normal_()
        pools = key.clone(), value.clone()
        want = decode(args[0].double(), *(given := [x.double() for x in pools]), table, lens, new.double())
        unread = torch.ones(len(key), dtype=torch.bool, device=DEVICE)
        unread[table[torch.arange(columns, device=DEVICE) * page <= lens[:, None]].long()] = False
        for x in (key, value):
            x[unread] = torch.nan
        graph.replay()
        assert_near(out, want)
        for x, y in zip((key, value), given, strict=True):
            assert torch.equal(x[~unread].double(), y[~unread])
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["pool[table]", "index_select", "flat slots of a table"])
def test_writes_before_the_gather_stay(name: str) -> None:
    form = FORMS[name]

    def fn(q: Tensor, k: Tensor, v: Tensor, table: Tensor, mask: Tensor, where: Tensor, new: Tensor) -> Tensor:
        for _ in range(2):
            k.view(-1, HKV, D).index_copy_(0, where, new)
            v.view(-1, HKV, D).index_copy_(0, where, new)
            q = attend(q, form.gather(k, table), form.gather(v, table), mask)
            new = new * 2
        return q

    where, new = torch.tensor([5, 60, 17], device=DEVICE), torch.randn(B, HKV, D, device=DEVICE).bfloat16()
    args = [*on_device(inputs(form, dtype=torch.bfloat16)), where, new]
    want = exactly(fn, *args)
    got, report = run(compile_anew(fn), *args)
    assert_near(got, want)
    assert ["in pages of 4 keys" in x.note for x in report.rewritten] == [True] * 2
    assert torch.equal(args[1].view(-1, HKV, D)[where], new * 2)


def pool_written(q: Tensor, k: Tensor, v: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    keys, values = in_order(k, table), in_order(v, table)
    k.mul_(2)
    return attend(q, keys, values, mask)


def read_twice(q: Tensor, k: Tensor, v: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    keys = in_order(k, table)
    return attend(q, keys, in_order(v, table), mask) + keys.amax()


def part_of_a_page(q: Tensor, k: Tensor, v: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    keys, values = (x[table][:, :, : PAGE // 2].flatten(1, 2).transpose(1, 2) for x in (k, v))
    return attend(q, keys, values, mask[..., : S // 2])


@pytest.mark.parametrize(
    "fn, reason", [(pool_written, "written_between"), (read_twice, "pages_used"), (part_of_a_page, "pages")]
)
def test_gathers_that_stay(fn: Callable[..., Tensor], reason: str) -> None:
    args = on_device(inputs(FORMS["pool[table]"], dtype=torch.bfloat16))
    args[3] = torch.arange(B * P, device=DEVICE).view(B, P).int() % N
    want = exactly(fn, *args)
    got, report = run(compile_anew(fn), *args)
    assert_near(got, want)
    assert f"not read in pages [{reason}]" in report.rewritten[0].note
