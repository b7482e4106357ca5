"""The kernels for shared pages in Triton's interpreter: they find what plain PyTorch finds, and attend to it."""

from __future__ import annotations

import os
import random
import re

import pytest
import torch
from compiled import compile_in_subprocess
from shared_tables import drawn, tree
from slow import slow_but

from tatten.ops.page_runs import shared_pages_reference

SCRIPT = """
import json, torch
from compiled import Recorder, compile_launch
from tatten.ops.cuda import shared_pages
launches = []
for name in ("_free_pages_kernel", "_own_pages_kernel", "_runs_kernel", "_cut_runs_kernel"):
    setattr(shared_pages, name, Recorder(getattr(shared_pages, name), launches))
shared_pages.has_early_launches = lambda device: True
for batch, columns, page, lens in ((256, 512, 16, torch.int32), (1024, 4096, 64, torch.int64), (2, 4096, 1, torch.int32)):
    table = torch.empty(batch, columns, dtype=torch.int32, device="meta")
    find = shared_pages.plan_shared_pages(table, 100_000, page, 1)
    find(table, torch.empty(batch, dtype=lens, device="meta"))
print(json.dumps([compile_launch(*x) for x in launches]))
"""

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs where no GPU is")


@interpreted
@pytest.mark.parametrize("n", slow_but([25], [25, 600]))
def test_finds_what_plain_pytorch_finds(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from tatten.ops.cuda import shared_pages
    from tatten.ops.cuda.shared_pages import plan_shared_pages

    allocate = shared_pages.allocate
    monkeypatch.setattr(shared_pages, "allocate", lambda *args: [x.fill_(-12345) for x in allocate(*args)])
    rng = random.Random(n)
    for _ in range(n):
        tables, q_length = drawn(rng), rng.choice((1, 1, 2, 5))
        table, lens = tables.table, tables.lens.to(rng.choice((torch.int32, torch.int64)))
        if rng.random() < 0.3:
            table = torch.stack((table, table + 1), dim=2).transpose(0, 1).contiguous()[..., 0].T
        given = tables.n_pages, tables.page, q_length
        got = plan_shared_pages(table, *given)(table, lens)
        assert torch.equal(got, shared_pages_reference(table, lens, *given))


@interpreted
def test_rows_longer_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from tatten.ops.cuda import shared_pages

    monkeypatch.setattr(shared_pages, "MOST_UNITS", 16)
    table = torch.arange(70, dtype=torch.int32).repeat(5, 1)
    table[3, 40:] += 100
    table[4, 50:] += 200
    lens = torch.tensor([70 * 64, 69 * 64, 33 * 64 + 5, 70 * 64, 16 * 64])
    got = shared_pages.plan_shared_pages(table, 300, 64, 1)(table, lens)
    assert torch.equal(got, shared_pages_reference(table, lens, 300, 64, 1))


@interpreted
def test_many_sequences() -> None:
    from tatten.ops.cuda.shared_pages import plan_shared_pages

    tables = tree(random.Random(0), 300)
    given = tables.n_pages, tables.page, 1
    got = plan_shared_pages(tables.table, *given)(tables.table, tables.lens)
    assert torch.equal(got, shared_pages_reference(tables.table, tables.lens, *given))


@pytest.mark.drawn(3, "compiled for Hopper")
def test_finding_compiles_for_sm_90() -> None:
    kernels = compile_in_subprocess(SCRIPT)
    assert len(kernels) == 12
    for kernel in kernels:
        assert kernel["stack"] == 0, kernel["kernel"]
        wait, release = (kernel["ptx"].find(x) for x in ("griddepcontrol.wait", "griddepcontrol.launch"))
        memory = re.search(r"(ld|st|atom|red)\.(relaxed\.gpu\.)?global", kernel["ptx"])
        assert memory is not None
        assert -1 < wait < release < memory.start(), kernel["kernel"]
