"""`BlockList`, the block mask of CUDA: in PyTorch and in Triton, against a loop over the keys."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from attention_cases import NEG_INF, places_in_reach
from pairs import pairs
from slow import slow_after
from torch import Tensor
from torch.library import opcheck

from tatten.ops.masks import BlockList, block_list

pytestmark = pytest.mark.drawn(4)

interpreted = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if interpreted else "cuda"

# What is masked, and (batch, kv_batch, q_len).
SHAPES: list[tuple[tuple[int, ...], tuple[int, int, int]]] = [
    *(((2, 1, 1, n), (2, 2, 1)) for n in (1, 63, 64, 65, 128, 150)),
    *(((n,), (3, 3, 2)) for n in (64, 150)),
    ((2, 150), (3, 3, 2)),  # for each query
    ((1, 1, 1, 150), (3, 3, 2)),
    ((3, 2, 2, 150), (3, 3, 2)),
    ((1, 4, 1, 65), (2, 2, 1)),
    ((4, 1, 1, 150), (4, 2, 1)),  # of each sequence, two of which share a row
    ((2, 1, 1, 150), (4, 2, 1)),  # of each row
    ((4, 2, 3, 65), (4, 1, 3)),
    ((4, 1, 1, 130), (4, 1, 1)),
    ((1, 1, 1, 150), (1, 1, 1)),
    ((2, 5, 4, 70), (2, 1, 4)),  # 40 queries of a row
    ((1, 7, 9, 70), (1, 1, 9)),  # 63, which are as many as the list tells apart
    ((1, 1, 1, 1100), (1, 1, 1)),  # more blocks than a program of `_bits_kernel` does
]


def make_mask(shape: tuple[int, ...], kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    mask = torch.rand(shape, generator=generator) > 0.97
    match kind:
        case "bool":
            return mask
        case "additive":
            return torch.where(mask, torch.randn(shape, generator=generator), NEG_INF)
        case "bfloat16":
            return torch.where(mask, 0.0, NEG_INF).bfloat16()
        case "all_false":
            return torch.zeros_like(mask)
        case "all_true":
            return torch.ones_like(mask)
        case "last":  # the sign bit of a block, and all of a query but the last
            mask = torch.zeros_like(mask)
            mask[..., 63::64] = True
            mask.view(-1, shape[-1])[:-1] = False
            return mask
        case "full_behind":  # but for the first key of some query
            mask = torch.ones_like(mask)
            mask.view(-1)[0] = False
            return mask
        case "two_runs":
            mask = torch.ones_like(mask)
            mask[..., 70:71] = False
            return mask
        case "full_but_for_a_bias":
            bias = torch.zeros(shape)
            bias.view(-1)[-1] = 0.5
            return bias
        case "floors":  # padding as models write it, beside which each query has another key
            bias = torch.where(mask, torch.randn(shape, generator=generator), torch.finfo(torch.float32).min)
            bias[..., 0] = 0.25
            bias[..., 1:2] = NEG_INF
            return bias
        case "floors_of_a_query":  # the last of which averages what is at its floor
            bias = make_mask(shape, "floors")
            bias.view(-1, shape[-1])[-1] = torch.finfo(torch.bfloat16).min
            return bias
        case "strided":
            return mask.mT.contiguous().mT if mask.dim() > 1 else mask.repeat_interleave(2)[::2]
        case "expanded":
            narrow = mask[(slice(0, 1),) * (mask.dim() - 1)]
            return narrow.expand(shape)
    raise ValueError(kind)


KINDS = [
    "bool",
    "additive",
    "bfloat16",
    "all_false",
    "all_true",
    "last",
    "strided",
    "expanded",
    "full_behind",
    "two_runs",
    "full_but_for_a_bias",
    "floors",
    "floors_of_a_query",
]


def expected(mask: Tensor, batch: int, kv_batch: int, q_len: int, reach: Tensor | None = None) -> list[list]:
    """For each row of what `mask`, and `reach`, leave: the longest run of full blocks, and the list, key by key."""
    rows = 1 if reach is None and (mask.dim() < 4 or mask.shape[0] == 1) else kv_batch
    floor = torch.finfo(torch.float32).min / 2
    of_key = (mask, mask, mask) if mask.dtype == torch.bool else (mask != NEG_INF, mask == 0, ~(mask <= floor))
    of_key = tuple(x[(None,) * (4 - mask.dim())] for x in of_key)
    if of_key[0].shape[0] not in (1, batch):
        of_key = tuple(x.repeat_interleave(batch // x.shape[0], dim=0) for x in of_key)
    if reach is not None:
        of_key = tuple(x & reach for x in of_key)
    used, plain, above = (x.expand(batch, -1, -1, -1) for x in of_key)
    found = []
    for row in range(rows):
        shared = batch // rows
        of_row = slice(row * shared, (row + 1) * shared)
        each_has_one = bool(above[of_row].any(dim=3).all())
        keys = (above if each_has_one else used)[of_row].flatten(0, 2).any(dim=0).tolist()
        blocks: dict[int, int] = {}
        for key, counts in enumerate(keys):
            if counts:
                blocks[key // 64] = blocks.get(key // 64, 0) | 1 << key % 64
        of_all = plain[of_row].flatten(0, 2).all(dim=0)
        n_blocks = -(-len(keys) // 64)
        full = [len(of_all) >= 64 * (n + 1) and bool(of_all[64 * n : 64 * (n + 1)].all()) for n in range(n_blocks)]
        runs = [range(i, j) for i in range(n_blocks + 1) for j in range(i, n_blocks + 1) if all(full[i:j])]
        run = max(runs, key=len)
        order = sorted(range(n_blocks), key=lambda n: (n not in run, n not in blocks, n))
        found.append([(len(blocks), len(run)), *((n, blocks.get(n, 0)) for n in order)])
    return found


def listed(data: Tensor) -> list[list]:
    assert data.dtype == torch.int64
    found = BlockList(data, 0)
    columns = (x.tolist() for x in (found.counts, found.runs, found.blocks, found.keys))
    rows = zip(*columns, strict=True)
    return [[(n, run), *zip(blocks, [x % 2**64 for x in keys], strict=True)] for n, run, blocks, keys in rows]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape, sizes", SHAPES, ids=str)
def test_in_pytorch(shape: tuple[int, ...], sizes: tuple[int, int, int], kind: str) -> None:
    mask = make_mask(shape, kind)
    got = block_list(mask, sizes[1])
    assert got.shape[1] == -(-shape[-1] // 64) + 1
    assert listed(got) == expected(mask, *sizes)


def in_triton(mask: Tensor, kv_batch: int, kv_lens: Tensor | None = None, **given: Any) -> Tensor:
    from tatten.ops.cuda.block_mask import plan_block_list

    mask, kv_lens = mask.to(DEVICE), None if kv_lens is None else kv_lens.to(DEVICE)
    return plan_block_list(mask, kv_batch, kv_lens=kv_lens, **given)(mask, kv_lens).cpu()


@pytest.mark.parametrize(
    "shape, sizes, kind",
    slow_after(
        30,
        [(*shape, kind) for shape, kind in pairs(SHAPES, [x for x in KINDS if x not in ("bfloat16", "all_false")])],
    ),
    ids=str,
)
def test_in_triton(shape: tuple[int, ...], sizes: tuple[int, int, int], kind: str) -> None:
    mask = make_mask(shape, kind)
    got = in_triton(mask, sizes[1])
    assert got.shape == block_list(mask, sizes[1]).shape
    assert listed(got) == expected(mask, *sizes)


@pytest.mark.parametrize("kind", ["bool", "last", "additive"])
def test_more_queries_than_a_program_takes_at_once(kind: str) -> None:
    mask = make_mask((2, 7, 10, 70), kind)
    assert listed(in_triton(mask, 1)) == expected(mask, 2, 1, 10)


def test_more_blocks_than_a_grid_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a mask of 5 million keys has, for which programs look at more blocks at once."""
    from tatten.ops.cuda import block_mask

    long = torch.empty(1, 1, 32, 5_000_000, dtype=torch.bool, device="meta")
    assert block_mask.plan_block_list(long, 1).find_bits.grid[1] <= 65535
    monkeypatch.setattr(block_mask, "WIDEST_GRID", 3)
    mask = torch.rand(2, 1, 40, 700, generator=torch.Generator().manual_seed(0)) < 0.1
    assert block_mask.plan_block_list(mask, 2).find_bits.grid == (2, 3)
    assert torch.equal(in_triton(mask, 2), block_list(mask, 2))


@pytest.mark.parametrize("kind", ["bool", "last", "additive", "all_false"])
def test_every_block_in_order(kind: str) -> None:
    mask = make_mask((2, 1, 3, 300), kind)
    got = in_triton(mask, 2, every_block=True)
    assert torch.equal(got, block_list(mask, 2, every_block=True))
    found, default = BlockList(got, 300), BlockList(block_list(mask, 2), 300)
    assert found.blocks.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert found.counts.tolist() == [5, 5]
    assert not found.runs.any()
    assert torch.equal(found.keys, default.keys.gather(1, default.blocks.argsort(dim=1)))


@pytest.mark.slow
def test_a_run_through_a_long_mask() -> None:
    """More blocks than `_list_kernel` looks at together: runs before, behind and across block 1024, or equal ones."""
    for runs in ([(3, 9), (1020, 1030), (1050, 1058)], [(5, 40), (1024, 1059)], [(0, 1100)], [(1023, 1024)], []):
        blocks = torch.zeros(1100, 64, dtype=torch.bool)
        blocks[::7, 5] = True
        for start, stop in runs:
            blocks[start:stop] = True
        mask = blocks.view(1, 1, 1, -1)
        got = in_triton(mask, 1)
        assert torch.equal(got, block_list(mask, 1))
        assert BlockList(got, 64 * 1100).runs[0] == max((stop - start for start, stop in runs), default=0)


@pytest.mark.parametrize(
    "shape, lens, window, left",
    slow_after(
        9,
        pairs(
            [(150,), (3, 150), (3, 1, 1, 150), (3, 2, 3, 150), (1, 1, 3, 1), (1,)],
            [None, (150, 64, 0), (1, 65, 400)],
            [None, 1, 70],
            [0.8, 1.0],
        ),
    ),
    ids=str,
)
def test_with_lengths_and_window(
    shape: tuple[int, ...], lens: tuple[int, ...] | None, window: int | None, left: float
) -> None:
    """The blocks that lengths and window leave are listed, and no others. A mask of one query stands for all."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < left
    kv_lens = None if lens is None else torch.tensor(lens)
    clamped = None if lens is None else kv_lens.clamp(0, 150)
    reach = places_in_reach(clamped, 3, 3, 150, window)
    got = in_triton(mask, 3, kv_lens, kv_len=150, q_len=3, window=window)
    want = expected(mask, 3, 3, 3, reach)
    if got.shape[0] == 1:  # no row differs
        want = want[:1]
    assert listed(got) == want


@pytest.mark.parametrize("kind", ["bool", "additive", "expanded"])
@pytest.mark.parametrize("shape, sizes", [SHAPES[0], SHAPES[5], SHAPES[6], SHAPES[12]], ids=str)
@pytest.mark.parametrize("device", ["cpu", *([] if interpreted else ["cuda"])])
def test_opcheck(shape: tuple[int, ...], sizes: tuple[int, int, int], kind: str, device: str) -> None:
    opcheck(torch.ops.tatten.block_list.default, (make_mask(shape, kind).to(device), sizes[1]))


def test_compiles_for_any_length() -> None:
    torch._dynamo.reset()
    find = torch.compile(lambda mask: torch.ops.tatten.block_list(mask, 2), backend="aot_eager", dynamic=True)
    for n in (63, 64, 65, 150):
        mask = make_mask((2, 1, 1, n), "bool")
        assert torch.equal(find(mask), block_list(mask, 2))
