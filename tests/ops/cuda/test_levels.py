"""Levels of a tree in one launch: equal to float64 attention, and chosen where states would take longer than keys."""

from __future__ import annotations

import os

import pytest
import torch
from attention_cases import assert_state
from compiled import compile_in_subprocess
from devices import GPU
from poison import fresh_memory_is_poison
from torch import Tensor

from tatten.ops.cuda import levels, segment_launches, segments
from tatten.ops.cuda.decode_grid import Place
from tatten.ops.cuda.gpu_rates import GpuRates, LevelsTile
from tatten.ops.cuda.levels import Levels, choose_levels, plan_levels
from tatten.ops.kernel_signatures import bifurcated_call

DEVICE = "cuda" if GPU else "cpu"
needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or the interpreter"
)
runs = pytest.mark.gpu if GPU else needs_interpreter
HALF = torch.float16
TILES = GpuRates().levels_tiles


def randn(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def question(query: Tensor, keys: list[Tensor], values: list[Tensor], scale: float) -> dict:
    """The same with a copy of all levels for each sequence."""
    batch, group = query.shape[0], query.shape[1] // keys[0].shape[1]

    def whole(xs: list[Tensor]) -> Tensor:
        return torch.cat([x.repeat_interleave(batch // x.shape[0], 0) for x in xs], 2).repeat_interleave(group, 1)

    return {
        "query": query,
        "key": whole(keys),
        "value": whole(values),
        "attn_mask": None,
        "kv_lens": None,
        "scale": scale,
    }


@pytest.mark.drawn(2)
@runs
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("max_and_sum", [False, True])
@pytest.mark.parametrize(
    "tree, batch, heads, q_len, dims",
    [
        (((1, 33), (2, 5), (4, 40)), 8, (4, 2), 2, (16, 16)),
        (((1, 1), (1, 70)), 3, (5, 1), 1, (24, 40)),
        (((2, 7), (6, 3), (12, 64)), 24, (2, 2), 3, (32, 16)),
        (((1, 5), (2, 2), (4, 31), (8, 1)), 8, (14, 1), 1, (16, 80)),
    ],
)
def test_states(
    tree: tuple, batch: int, heads: tuple, q_len: int, dims: tuple, max_and_sum: bool, tile: LevelsTile
) -> None:
    torch.manual_seed(0)
    query = randn(batch, heads[0], q_len, dims[0])
    keys, values = ([randn(rows, heads[1], n, dim) for rows, n in tree] for dim in dims)
    keys[0] = keys[0].transpose(1, 2).contiguous().transpose(1, 2)
    with fresh_memory_is_poison():
        call, place = bifurcated_call(query, keys, values, scale=0.3), Place(final=False, max_and_sum=max_and_sum)
        got = plan_levels(call, call.segments, tile, place)(call, *call.segments)
    lse = got.lse[..., 0] + got.lse[..., 1].log() if max_and_sum else got.lse
    assert got.out.dtype == torch.float32
    assert_state(got.out.to(HALF), lse, question(query, keys, values, 0.3))


@pytest.mark.drawn(1)
@runs
@pytest.mark.parametrize("chosen", [(0, 1), (0, 1, 2), (1, 2), (), (0, 1, 2, 3)])
def test_beside_other_segments(chosen: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        segment_launches, "choose_levels", lambda query, keys: Levels(chosen, TILES[0]) if chosen else None
    )
    torch.manual_seed(0)
    query = randn(8, 4, 1, 16)
    tree = ((1, 40), (2, 33), (4, 7), (8, 20))
    keys, values = ([randn(rows, 2, n, 16) for rows, n in tree] for _ in "kv")
    call = bifurcated_call(query, keys, values, scale=0.3)
    with fresh_memory_is_poison():
        planned = segments.plan_segments(call)
        out, lse = planned(call)
    assert sorted(i for numbers in planned.segments_by_launch for i in numbers) == [0, 1, 2, 3]
    assert (chosen in planned.segments_by_launch) == bool(chosen)
    assert (out.dtype, lse.dtype) == (HALF, torch.float32)
    assert_state(out, lse, question(query, keys, values, 0.3))


def choice(nodes: tuple[int, ...], lengths: tuple[int, ...], heads: tuple[int, int]) -> tuple[int, ...]:
    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    keys = {i: empty(rows, heads[1], n, 128) for i, (rows, n) in enumerate(zip(nodes, lengths, strict=True))}
    chosen = choose_levels(empty(nodes[-1], heads[0], 1, 128), keys)
    return chosen.segments if chosen else ()


def test_short_levels_of_many_queries_are_done_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "multiprocessors", lambda device: 132)
    deep = (1, 8, 16, 32, 64, 128, 1024), (256, 128, 64, 32, 32, 32, 32)
    assert choice(*deep, (64, 8)) == (0, 1, 2, 3, 4, 5)  # each leaf has a row of its own, and is left out
    assert choice((1, 1024), (2048, 32), (64, 8)) == ()
    assert choice((1, 2, 64), (8192, 4096, 256), (32, 8)) == ()  # few queries, long levels: these are split
    assert 0 not in choice((3, 4, 64), (64, 64, 64), (64, 1))  # its rows do not nest the others


SCRIPT = """
import json, sys
import torch
from compiled import Recorder, compile_launch
from tatten.ops.cuda import levels
from tatten.ops.cuda.decode_grid import Place
from tatten.ops.cuda.gpu_rates import GpuRates
from tatten.ops.kernel_signatures import bifurcated_call

launches = []
levels._levels_kernel = Recorder(levels._levels_kernel, launches)
dim = int(sys.argv[1])
def empty(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")
small, large = GpuRates().levels_tiles
for heads, follows, tile in ((64, False, small), (32, True, small), (64, True, large)):
    query, keys = empty(1024, heads, 1, dim), [empty(rows, 8, n, dim) for rows, n in ((1, 256), (8, 128), (128, 32))]
    call = bifurcated_call(query, keys, keys, scale=0.1)
    levels.plan_levels(call, call.segments, tile, Place(final=False, beside_previous=follows))(call, *call.segments)
print(json.dumps([compile_launch(*launch) for launch in launches]))
"""


@pytest.mark.drawn(2, "compiled for Hopper")
@pytest.mark.parametrize("dim", [64, 128])
def test_compiles_for_sm_90(dim: int) -> None:
    tiles = TILES[0], TILES[0], TILES[1]
    for built, tile, follows in zip(compile_in_subprocess(SCRIPT, dim), tiles, (False, True, True), strict=True):
        ptx = built["ptx"]
        assert built["stack"] == 0, "registers spill to local memory"
        assert built["registers"] * built["threads"] * tile.per_sm <= 65536
        assert built["shared"] * tile.per_sm <= 227 << 10
        assert "wgmma.mma_async" in ptx or "mma.sync" in ptx
        assert "cp.async.cg" in ptx, "the loop is not pipelined"
        wait, release = (ptx.find(x) for x in ("griddepcontrol.wait", "griddepcontrol.launch"))
        assert (release < wait) == follows
