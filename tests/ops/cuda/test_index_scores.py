"""The kernel that scores an indexer's keys: under the interpreter, compiled for Hopper, and on a GPU."""

from __future__ import annotations

import itertools
import os
import re
from typing import Any

import pytest
import torch
from compiled import TRITON_3_6, compile_in_subprocess
from fuzz import settings
from hypothesis import given
from hypothesis import strategies as st
from index_calls import INF, NAN, ORDER, IndexCall, assert_close_to_float64, draw_index_call
from torch import Tensor

import tatten
from tatten.ops.cuda import index_scores as planning
from tatten.ops.cuda.index_scores import IndexTiles, choose_tiles, plan_index_scores

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs where no GPU is")
EITHER = ["device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]]


def launch(call: dict[str, Any], tiles: IndexTiles | None = None) -> Tensor:
    """Launch the kernel, on a CPU in the interpreter. It is planned anew: tests change the number of programs."""
    tensors = [call.get(name) for name in ORDER]
    return plan_index_scores.__wrapped__(*tensors, call["scale"], tiles)(*tensors)


@pytest.mark.parametrize(*EITHER)
def test_random_calls(device: str) -> None:
    @settings(30 if device == "cpu" else 200)
    @given(st.composite(lambda draw: draw_index_call(lambda options: draw(st.sampled_from(options))))())
    def test(call: IndexCall) -> None:
        inputs = call.make(device)
        assert_close_to_float64(launch(inputs), inputs)

    test()


@pytest.mark.drawn(4)
@pytest.mark.parametrize(*EITHER)
@pytest.mark.parametrize("mask", [None, "bool", "prefix", "bias"])
@pytest.mark.parametrize("programs", [1, 3, 1000])
def test_programs_share_the_tiles(
    programs: int, mask: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also more tiles than a program finds in a mask at once."""
    monkeypatch.setattr(planning, "multiprocessors", lambda device: programs)
    call = IndexCall(batch=1, q_len=3, heads=4, dim=16, kv_len=1100, mask=mask, dtype=torch.bfloat16).make(device)
    tiles = choose_tiles(call["query"], call["key"])
    assert tiles is not None
    assert_close_to_float64(launch(call, tiles._replace(block_n=16, queries=2)), call)


@pytest.mark.parametrize(*EITHER)
def test_float64_and_many_heads_are_left_to_pytorch(device: str) -> None:
    for call in (
        IndexCall(heads=3, dtype=torch.float64, weights_dtype=torch.float64, mask="bool"),
        IndexCall(heads=300, dtype=torch.bfloat16, mask="bias"),
        IndexCall(heads=70, dim=128, mask="bool"),
        IndexCall(heads=40, dim=1000, dtype=torch.float16),
    ):
        inputs = call.make(device)
        assert choose_tiles(inputs["query"], inputs["key"]) is None
        assert_close_to_float64(launch(inputs), inputs)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tiles_fit_in_shared_memory(dtype: torch.dtype, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "has_large_shared_memory", lambda device: large)
    memory = planning.LARGE_MEMORY if large else planning.SMALL_MEMORY
    taken = []
    for heads, dim, q_len in itertools.product((1, 16, 64, 256), (64, 128, 256, 512, 1024, 2048, 4096), (1, 4)):
        query, key = torch.empty(1, q_len, heads, dim, dtype=dtype), torch.empty(1, 8, dim, dtype=dtype)
        tiles = choose_tiles(query, key)
        if tiles is not None:
            taken.append(dim)
            assert tiles.block_n >= 16
            assert tiles.num_stages >= 1
            rows = tiles.queries * tiles.block_h + tiles.block_n
            assert rows * tiles.block_d * dtype.itemsize <= memory, (heads, dim, q_len, tiles)
    assert max(taken) == 2048 // dtype.itemsize  # others are left to PyTorch


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [256, 512, 1024])
@pytest.mark.parametrize("heads", [1, 16, 64])
def test_wide_heads(heads: int, dim: int) -> None:
    call = IndexCall(batch=1, q_len=1, heads=heads, dim=dim, kv_len=1000, dtype=torch.float32).make("cuda")
    assert_close_to_float64(launch(call), call)


@pytest.mark.parametrize(*EITHER)
def test_a_key_that_is_infinite_has_an_infinite_score(device: str) -> None:
    """Heads and dims that fill a block up make no NaN of it."""
    call = IndexCall(heads=3, dim=20).make(device)
    call |= {name: call[name].abs() for name in ("query", "key", "weights")}
    call["key"][1, 7, 3], call["key"][0, 9, 0] = INF, NAN
    got = launch(call)
    assert got.isinf().nonzero().tolist() == [[1, 0, 7]]
    assert got.isnan().nonzero().tolist() == [[0, 0, 9]]


@interpreted
@pytest.mark.parametrize("key_dtype", [torch.bfloat16, torch.int8])
def test_tiles_without_a_key_are_not_read(key_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    load, read = InterpreterBuilder.create_masked_load, []

    def create_masked_load(self: Any, at: Any, mask: Any, *rest: Any) -> Any:
        if mask.data.shape == (tiles.block_n, tiles.block_d):
            read.append(int(mask.data.sum()))
        return load(self, at, mask, *rest)

    call = IndexCall(batch=1, q_len=2, heads=5, dim=30, kv_len=1000, dtype=torch.bfloat16, key_dtype=key_dtype).make()
    tiles = choose_tiles(call["query"], call["key"])
    assert tiles is not None
    call["attn_mask"] = torch.zeros(1, 2, 1000, dtype=torch.bool)
    call["attn_mask"][0, 0, 3 * tiles.block_n], call["attn_mask"][0, 1, 999] = True, True
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", create_masked_load)
    assert_close_to_float64(launch(call), call)
    assert sorted(x for x in read if x) == [30 * (1000 % tiles.block_n), 30 * tiles.block_n]


@interpreted
def test_strides_of_more_than_32_bits() -> None:
    memory = torch.empty((1 << 31) + 64, dtype=torch.bfloat16)  # of which a few pages are written
    call = IndexCall(batch=1, heads=2, dim=16, kv_len=3, dtype=torch.bfloat16).make()
    far = memory.as_strided((1, 3, 16), (0, 1 << 30, 1))
    far.copy_(call["key"])
    assert torch.equal(launch({**call, "key": far}), launch(call))


@pytest.mark.parametrize(*EITHER)
def test_a_sequence_depends_on_nothing_else(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, whatever the batch, and whatever keys follow."""
    monkeypatch.setattr(planning, "multiprocessors", lambda device: 5)
    call = IndexCall(batch=7, q_len=2, heads=4, dim=16, kv_len=200, dtype=torch.bfloat16).make(device)
    whole = launch(call)
    for batch, kv_len in ((1, 200), (3, 77), (7, 1)):
        parts = {name: call[name][:batch].clone() for name in ("query", "key", "weights")}
        parts["key"] = parts["key"][:, :kv_len].clone()
        assert torch.equal(launch({**parts, "scale": call["scale"]}), whole[:batch, :, :kv_len])


SCRIPT = """
import json, sys, torch
from compiled import Recorder, compile_launch
from tatten.ops.cuda import combine, index_scores
from tatten.ops.cuda.kernels import index_scores as kernels
kernel, launches = kernels._index_scores_kernel, []
kernels._index_scores_kernel = Recorder(kernel, launches)
combine.INTERPRETED = False
index_scores.multiprocessors = lambda device: 132
def empty(*shape, dtype="float32"):
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
for dtype, key_dtype, mask, q_len, heads, dim in json.loads(sys.argv[1]):
    query, key = empty(8, q_len, heads, dim, dtype=dtype), empty(8, 32768, dim, dtype=key_dtype)
    factors = empty(8, 32768) if key.dtype.itemsize == 1 else None
    args = query, key, empty(8, q_len, heads), None if mask is None else empty(8, q_len, 32768, dtype=mask), factors
    index_scores.plan_index_scores(*args, 0.1)(*args)
print(json.dumps([compile_launch(*x) for x in launches]))
"""
BF16, F32 = ("bfloat16", "bfloat16"), ("float32", "float32")
COMPILED = [
    *[(*BF16, mask, 1, 64, 128) for mask in (None, "bool", "float32")],
    *[(*BF16, "bool", q_len, 64, 128) for q_len in (2, 4)],
    *[(*BF16, "bool", 1, heads, dim) for heads, dim in ((4, 128), (32, 128), (16, 64), (128, 128), (64, 256))],
    ("float16", "float16", "bool", 1, 32, 128),
    *[("bfloat16", narrow, "bool", q_len, 64, 128) for narrow in ("int8", "float8_e4m3fn") for q_len in (1, 4)],
    *[
        (*F32, "bool", q_len, heads, dim)
        for q_len, heads, dim in ((1, 64, 128), (4, 4, 128), (1, 64, 256), (1, 16, 64))
    ],
]
SM_BYTES, RESERVED = 233472, 1024  # of an SM's shared memory, and of each program's


@pytest.mark.drawn(2, "compiled for Hopper")
@pytest.mark.parametrize("variant", COMPILED, ids=str)
def test_compiles_for_hopper(variant: tuple[Any, ...]) -> None:
    """Without spills, two programs to an SM, and with tiles of keys in flight while others are multiplied."""
    dtype, key_dtype, *_ = variant
    (built,) = compile_in_subprocess(SCRIPT, [variant])
    # Triton 3.6 spills four words of this one variant in float32, whose dots are FMAs.
    assert built["stack"] <= (16 if TRITON_3_6 and variant[:2] == F32 and variant[5] == 256 else 0)
    assert 2 * (built["shared"] + RESERVED) <= SM_BYTES
    assert 2 * built["threads"] * built["registers"] <= 65536
    assert ("wgmma.mma_async" in built["ptx"]) == (dtype != "float32")
    assert "cp.async" in built["ptx"]
    if dtype != "float32":
        ahead = [int(n) for n in re.findall(r"cp\.async\.wait_group\s+(\d+)", built["ptx"])]
        assert max(ahead) >= (1 if key_dtype == dtype else 3) or variant[5] > 128


@pytest.mark.gpu
@pytest.mark.parametrize("kv_len", [131072, 100003])
@pytest.mark.parametrize("mask", [None, "bool", "prefix", "bias"])
@pytest.mark.parametrize("q_len, heads", [(1, 64), (1, 32), (4, 64), (3, 4), (8, 64)])
def test_long_contexts(q_len: int, heads: int, mask: str | None, kv_len: int) -> None:
    call = IndexCall(batch=2, q_len=q_len, heads=heads, dim=128, kv_len=kv_len, dtype=torch.bfloat16, mask=mask)
    inputs = call.make("cuda")
    assert_close_to_float64(tatten.index_scores(**inputs), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("key_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("q_len", [1, 4])
def test_long_contexts_in_8_bits(q_len: int, key_dtype: torch.dtype) -> None:
    call = IndexCall(
        q_len=q_len,
        heads=64,
        dim=128,
        kv_len=50001,
        dtype=torch.bfloat16,
        key_dtype=key_dtype,
        scaled=True,
        mask="prefix",
    ).make("cuda")
    assert_close_to_float64(tatten.index_scores(**call), call)


@pytest.mark.gpu
def test_a_cache_beyond_32_bits() -> None:
    key = torch.zeros(1, 1 << 24, 256, dtype=torch.bfloat16, device="cuda")  # 8 GiB
    key[:, -300:] = torch.randn(300, 256, device="cuda").bfloat16()
    query, weights = torch.randn(1, 1, 16, 256, device="cuda").bfloat16(), torch.rand(1, 1, 16, device="cuda")
    got = tatten.index_scores(query, key, weights, scale=0.1)
    last = {"query": query, "key": key[:, -300:], "weights": weights, "scale": 0.1}
    assert_close_to_float64(got[..., -300:].contiguous(), last)
    assert (got[..., :-300] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [None, "prefix"])
def test_replays(mask: str | None) -> None:
    """With other queries, keys and masks than those that were captured."""
    shape = {"batch": 8, "heads": 64, "dim": 128, "kv_len": 8192, "dtype": torch.bfloat16, "mask": mask}
    call = IndexCall(**shape).make("cuda")
    tatten.index_scores(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tatten.index_scores(**call)
    for seed in range(1, 4):
        for name, x in IndexCall(**shape, seed=seed).make("cuda").items():
            if isinstance(x, Tensor):
                call[name].copy_(x)
        graph.replay()
        assert_close_to_float64(out, call)
