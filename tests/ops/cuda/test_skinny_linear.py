"""Linear layers of few rows: on a CPU, under the interpreter, for Hopper and on a GPU."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled import compile_in_subprocess
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from tatten.ops.cuda.skinny_linear import ONE_ROW_TILES, by_cublas, one_row_tile, plan_skinny_linear
from tatten.ops.skinny_linear import BLOCK_IN, MOST_ROWS, ONE_ROW_FEATURES, choose_parts, part_bounds

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs where no GPU is")
op = torch.ops.tatten.skinny_linear.default
bf16 = torch.bfloat16

# leading dims of x, in_features, out_features of each weight, parts
Case = tuple[tuple[int, ...], int, tuple[int, ...], int]
TINY: list[Case] = [
    ((2,), 16, (1,), 1),
    ((3, 1), 40, (5, 70), 1),
    ((1, 5), 136, (64, 3, 65), 2),
    ((17,), 300, (40, 130), 3),
    ((66,), 129, (9,), 2),
    ((2,), 650, (330,), 1),  # programs begin at each of 6 tiles, and the last one has 10 features
    ((2, 2), 260, (1, 1, 1), 5),  # more parts than blocks of input features
    ((), 24, (7,), 1),
    ((1,), 136, (5, 3, 70), 1),
    ((1, 1), 130, (3, 0, 9), 1),  # features that are no multiple of 8
    ((1, 1), 5000, (3, 1), 1),
    ((1,), ONE_ROW_FEATURES, (2,), 1),
    ((1,), ONE_ROW_FEATURES + 1, (2,), 1),
]
LARGE: list[Case] = [
    ((8, 1), 4096, (4096, 1024, 1024), 1),
    ((1, 8), 14336, (4096,), 2),
    ((64, 1), 4096, (1024,), 4),
    ((33,), 2048, (5632, 5632), 1),
    ((2,), 4096, (32000,), 1),
    ((1, 1), 4096, (4096, 1024, 1024), 1),
    ((1, 1), 14336, (4096,), 1),
    ((1,), 896, (896, 128, 128), 1),
    ((1,), 28672, (100,), 1),
    ((1,), 4096, (128256,), 1),
    ((100,), 512, (384,), 2),
    ((130,), 512, (384, 100), 1),
]
SCRIPT = """
import json, sys, torch
from compiled import Recorder, compile_launch
from tatten.ops.cuda import combine, skinny_linear
from tatten.ops.cuda.kernels import skinny_linear as kernels
launches = []
for name in ("_skinny_linear_kernel", "_one_row_linear_kernel"):
    setattr(kernels, name, Recorder(getattr(kernels, name), launches))
combine.INTERPRETED = False
for rows, features, outs, parts in json.loads(sys.argv[1]):
    x = torch.empty(rows, features, device="meta", dtype=torch.bfloat16)
    weights = [torch.empty(n, features, device="meta", dtype=torch.bfloat16) for n in outs]
    skinny_linear.plan_skinny_linear(x, weights, parts, torch.float32)(x, weights)
print(json.dumps([compile_launch(*x) for x in launches]))
"""


def inputs(case: Case, device: str = "cpu", dtype: torch.dtype = bf16, strided: bool = False) -> tuple[Any, list[Any]]:
    """`strided`: `x` and the weights have NaN around them."""
    lead, features, outs, _ = case
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, device=device).to(dtype)
        if not strided:
            return values
        around = values.new_full((*shape[:-1], shape[-1] + 3), float("nan"))
        around[..., 1:-2] = values
        return around[..., 1:-2]

    return draw(*lead, features), [draw(n, features) for n in outs]


def check(got: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], parts: int, dtype: torch.dtype) -> None:
    """Each part is within half a unit in its last place, and of what a float32 sum loses of its terms."""
    bounds = [min(i * BLOCK_IN, x.shape[-1]) for i in part_bounds(x.shape[-1], parts)]
    for product, weight in zip(got, weights, strict=True):
        assert product.shape == (parts, *x.shape[:-1], weight.shape[0])
        assert product.dtype == dtype
        assert product.is_contiguous()
        for part, (start, stop) in zip(product, itertools.pairwise(bounds), strict=True):
            a, b = x[..., start:stop].double(), weight[:, start:stop].double()
            want, terms = a @ b.T, a.abs() @ b.abs().T
            within = want.abs() * torch.finfo(dtype).eps * 0.501 + terms * 2**-20
            off = (part.double() - want).abs()
            assert (off <= within).all(), (off / within).max()


DTYPES = [(x, out) for x in (bf16, torch.float16) for out in (None, torch.float32)]


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("case", TINY, ids=str)
def test_on_a_cpu(case: Case, dtypes: tuple[torch.dtype, torch.dtype | None]) -> None:
    dtype, out_dtype = dtypes
    for strided in (False, True):
        x, weights = inputs(case, dtype=dtype, strided=strided)
        check(op(x, weights, case[3], out_dtype), x, weights, case[3], out_dtype or dtype)


@interpreted
@pytest.mark.parametrize("dtype", [bf16, torch.float16], ids=str)
@pytest.mark.parametrize("case", TINY, ids=str)
def test_by_the_kernel(case: Case, dtype: torch.dtype) -> None:
    """In float32: conversions of Triton's interpreter cut off what 16 bits have no room for."""
    for strided in (False, True):
        x, weights = inputs(case, dtype=dtype, strided=strided)
        got = plan_skinny_linear(x, weights, case[3], torch.float32)(x, weights)
        check(got, x, weights, case[3], torch.float32)


EDGES = [features + more for features, _ in ONE_ROW_TILES[:-1] for more in (-8, 0, 1)]


@interpreted
@pytest.mark.parametrize("features", EDGES)
def test_every_tile_of_one_row(features: int) -> None:
    case = ((1,), features, (3, 2), 1)
    x, weights = inputs(case)
    check(plan_skinny_linear(x, weights, 1, torch.float32)(x, weights), x, weights, 1, torch.float32)


def test_tiles_of_one_row_fit_their_programs() -> None:
    """The sweep measured each of them: a thread loads 16 bytes of a weight at a time, and holds 64 elements at most."""
    for features in (8, *EDGES, ONE_ROW_FEATURES):
        rows, width, warps = one_row_tile(features)
        assert rows in (1, 2, 4)
        assert width in (512, 1024, 2048, 4096, 8192)
        assert warps in (2, 4, 8)
        assert 8 <= rows * width // (32 * warps) <= 64
    assert [most for most, _ in ONE_ROW_TILES] == sorted({most for most, _ in ONE_ROW_TILES})


@interpreted
def test_the_kernel_in_16_bits() -> None:
    x, weights = inputs(TINY[2])
    exact = plan_skinny_linear(x, weights, 2, torch.float32)(x, weights)
    for a, b in zip(plan_skinny_linear(x, weights, 2, None)(x, weights), exact, strict=True):
        assert a.dtype == bf16
        torch.testing.assert_close(a.float(), b, rtol=2**-7, atol=0)  # cut off, not rounded


@interpreted
def test_rows_depend_on_no_other_row() -> None:
    x, weights = inputs(((5,), 40, (7,), 1))
    x[3] = float("nan")
    x[1, 2] = float("inf")
    (got,) = plan_skinny_linear(x, weights, 1, torch.float32)(x, weights)
    assert got.isfinite().all(-1).tolist() == [[True, False, True, False, True]]


@interpreted
@pytest.mark.parametrize("case", [((0, 2), 8, (4,), 1), ((2,), 0, (4, 3), 2), ((2,), 8, (0,), 1)], ids=str)
def test_sums_of_nothing_are_zero(case: Case) -> None:
    x, weights = inputs(case)
    for got in (op(x, weights, case[3]), plan_skinny_linear(x, weights, case[3], None)(x, weights)):
        for product, n in zip(got, case[2], strict=True):
            assert torch.equal(product, torch.zeros(case[3], *case[0], n, dtype=bf16))


def test_many_rows_are_a_tensor_like_few() -> None:
    """Not in the dtype of autocast, and not a view, which autograd would not let a program write to."""
    x, weights = inputs(((65,), 40, (5, 70), 1))
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        results = plan_skinny_linear(x, weights, 1, None)(x, weights)
    for result in results:
        assert result.dtype == bf16
        result.mul_(torch.ones(1, dtype=bf16, requires_grad=True))


@pytest.mark.parametrize("strided", [False, True])
def test_many_rows_call_cublas(strided: bool) -> None:
    """A plan of them runs anywhere, because it is PyTorch's own product."""
    x, weights = inputs(((5, 13), 40, (5, 70), 1), strided=strided)
    assert plan_skinny_linear(x, weights, 1, None) is by_cublas
    assert plan_skinny_linear(x[:4], weights, 1, None) is not by_cublas
    check(plan_skinny_linear(x, weights, 1, None)(x, weights), x, weights, 1, bf16)
    transposed = x.transpose(0, 1)
    check(plan_skinny_linear(transposed, weights, 1, None)(transposed, weights), transposed, weights, 1, bf16)


@interpreted
@pytest.mark.parametrize("outs", [(0, 3), (3, 0, 2), (3, 0)], ids=str)
def test_weights_without_rows(outs: tuple[int, ...]) -> None:
    x, weights = inputs(((2,), 8, outs, 1))
    check(plan_skinny_linear(x, weights, 1, torch.float32)(x, weights), x, weights, 1, torch.float32)


@pytest.mark.parametrize(
    "outs, features, parts",
    [
        ((4096, 1024, 1024), 4096, 1),
        ((2048, 512, 512), 2048, 2),
        ((4096,), 4096, 2),
        ((4096,), 14336, 2),
        ((2048,), 8192, 4),
        ((8192,), 28672, 4),  # 8192 features at most
        ((14336, 14336), 4096, 1),
        ((1024,), 4096, 4),
        ((132 * 64,), 4096, 1),
        ((2560,), 4096, 2),  # three parts were not measured
        ((), 4096, 4),
        ((8,), 256, 2),  # no part is empty
        ((8,), 0, 1),
    ],
    ids=str,
)
def test_parts_fill_the_gpu(outs: tuple[int, ...], features: int, parts: int) -> None:
    assert {choose_parts(outs, features, rows) for rows in (None, 2, 64)} == {parts}
    if features:
        bounds = part_bounds(features, parts)
        assert all(start < stop for start, stop in itertools.pairwise(bounds))


def test_one_row_has_one_part() -> None:
    """Unless it has more features than its kernel takes."""
    for features, parts in ((4096, 1), (ONE_ROW_FEATURES, 1), (ONE_ROW_FEATURES + 1, 9)):
        assert choose_parts((4096,), features, 1) == parts


X, WEIGHTS = inputs(((2, 3), 8, (4, 5), 1))


@pytest.mark.parametrize(
    "x, weights, options, error, says",
    [
        (X.float(), WEIGHTS, {}, TypeError, r"`x` must be bfloat16 or float16, got torch\.float32"),
        (X[0, 0, 0], WEIGHTS, {}, ValueError, r"`x` must be \[\.\.\., in_features\], got a tensor without dimensions"),
        (X, [], {}, ValueError, "`weights` must have one to 3 tensors, got 0"),
        (X, WEIGHTS * 2, {}, ValueError, "`weights` must have one to 3 tensors, got 4"),
        (X, [WEIGHTS[0], WEIGHTS[1].half()], {}, TypeError, r"`weights\[1\]` must have the dtype of `x`.*float16"),
        (X, [WEIGHTS[0][:, :7]], {}, ValueError, r"`weights\[0\]` must be \[out_features, 8\].* got shape \(4, 7\)"),
        (X, [WEIGHTS[0][0]], {}, ValueError, r"`weights\[0\]` must be \[out_features, 8\].* got shape \(8,\)"),
        (X, WEIGHTS, {"parts": 0}, ValueError, "`parts` must be at least 1, got 0"),
        (X, WEIGHTS, {"out_dtype": torch.float16}, TypeError, r"`out_dtype` must be float32 or .* got torch\.float16"),
        (X.clone().requires_grad_(), WEIGHTS, {}, NotImplementedError, "`x` must not require grad"),
        (X, [WEIGHTS[0].clone().requires_grad_()], {}, NotImplementedError, r"`weights\[0\]` must not require grad"),
    ],
)
def test_bad_input(x: Tensor, weights: list[Tensor], options: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        op(x, weights, **options)
    with pytest.raises(error, match=says):
        plan_skinny_linear(x, weights, options.get("parts", 1), options.get("out_dtype"))
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(error, match=says):
        op(x, weights, **options)


def test_two_devices() -> None:
    with pytest.raises(ValueError, match=r"`weights\[0\]` must be on the device of `x`, cpu, got meta"):
        plan_skinny_linear(X, [WEIGHTS[0].to("meta")], 1, None)


def test_opcheck() -> None:
    opcheck(op, (X, WEIGHTS))
    opcheck(op, (X, WEIGHTS[:1], 2, torch.float32))


@pytest.mark.parametrize("dynamic", [False, True])
def test_under_inductor(dynamic: bool) -> None:
    """Inductor sums the parts."""

    def layers(x: Tensor, weights: list[Tensor]) -> Tensor:
        a, b = op(x.relu(), weights, 2, torch.float32)
        return torch.cat((a.sum(0), b.sum(0)), -1).to(x.dtype)

    torch._dynamo.reset()
    x, weights = inputs(((3, 2), 300, (5, 4), 2))
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    torch.testing.assert_close(torch.compile(layers, fullgraph=True)(x, weights), layers(x, weights))


@pytest.mark.drawn(2, "compiled for Hopper")
def test_compiles_for_hopper() -> None:
    """The weight is the left operand of wgmma, nothing spills, and aligned rows are loaded ahead."""
    cases = [
        (8, 4096, [4096, 1024, 1024], 1),
        (64, 4096, [14336, 14336], 1),
        (64, 14336, [4096], 2),
        (2, 520, [100, 100], 1),
        (2, 333, [100], 1),
    ]
    for (rows, features, _, _), built in zip(cases, compile_in_subprocess(SCRIPT, cases), strict=True):
        assert built["stack"] == 0
        assert f"wgmma.mma_async.sync.aligned.m64n{max(16, rows)}k16" in built["ptx"]
        assert ("cp.async.cg" in built["ptx"]) == (features % 8 == 0)
        assert built["shared"] < 227 << 10


@pytest.mark.drawn(2, "compiled for Hopper")
def test_one_row_compiles_for_hopper() -> None:
    """Nothing spills, and each load of a weight has 16 bytes, which leave the L2 first."""
    cases = [(1, 4096, [4096, 1024, 1024], 1), (1, 14336, [4096], 1), (1, 28672, [8192], 1), (1, 1000, [8], 1)]
    cases += [(1, features - more, [100], 1) for features, _ in ONE_ROW_TILES[:-1] for more in (0, 8)]
    cases += [(1, ONE_ROW_FEATURES, [8], 1)]
    for built in compile_in_subprocess(SCRIPT, cases):
        assert built["stack"] == 0
        assert "mma" not in built["ptx"]
        assert "evict_first" in built["ptx"]
        assert not [x for x in built["ptx"].splitlines() if "evict_first" in x and "ld.global" in x and ".v4" not in x]


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*TINY, *LARGE], ids=str)
def test_on_a_gpu(case: Case, dtypes: tuple[torch.dtype, torch.dtype | None]) -> None:
    dtype, out_dtype = dtypes
    for strided in (False, True):
        x, weights = inputs(case, "cuda", dtype, strided)
        got = op(x, weights, case[3], out_dtype)
        if x[..., 0].numel() > MOST_ROWS and case[3] == 1 and out_dtype is None:  # cuBLAS may add parts in 16 bits
            assert [y.shape for y in got] == [(1, *x.shape[:-1], n) for n in case[2]]
            assert all(torch.equal(y[0], F.linear(x, w)) for y, w in zip(got, weights, strict=True))
        else:
            check(got, x, weights, case[3], out_dtype or dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("parts, fewest", [(4, 1), (1, 2)])
def test_a_row_depends_on_nothing_else(parts: int, fewest: int) -> None:
    """To the bit, with one row or more in several parts, and with two or more in one part. NaN stays in its row."""
    x, weights = inputs(((64,), 4096, (1024, 512), parts), "cuda")
    x[3] = float("nan")
    got = op(x, weights, parts, torch.float32)
    assert got[0].isnan().any(-1).any(0).nonzero().flatten().tolist() == [3]
    for rows in (fewest, 3, 16, 17, 33, 60):
        for a, b in zip(op(x[-rows:], weights, parts, torch.float32), got, strict=True):
            assert torch.equal(a, b[:, -rows:])


@pytest.mark.gpu
@pytest.mark.parametrize("rows, parts", [(8, 2), (1, 1)])
def test_replays(rows: int, parts: int) -> None:
    x, weights = inputs(((rows,), 4096, (1024,), parts), "cuda")
    op(x, weights, parts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(x, weights, parts)
    for seed in range(3):
        x.copy_(torch.randn(x.shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda"))
        graph.replay()
        check(out, x, weights, parts, bf16)
