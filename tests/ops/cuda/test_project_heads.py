"""Products of each head's rows with a weight of its own: on a CPU, under the interpreter, for Hopper and on a GPU."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from compiled import compile_in_subprocess
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from tatten.ops.cuda.project_heads import plan_project_heads

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs where no GPU is")
op = torch.ops.tatten.project_heads.default

LAYOUTS = ("dense", "strided", "transposed")

# batch, heads, q_length, rank, columns
TINY = [(1, 1, 1, 1, 1), (2, 3, 1, 20, 5), (1, 2, 3, 16, 65), (3, 1, 12, 33, 64), (5, 2, 7, 8, 70)]
LARGE = [
    *[(1, 128, 1, 512, 128), (8, 128, 1, 512, 128), (3, 16, 16, 512, 256)],
    *[(65, 5, 1, 384, 192), (130, 3, 1, 77, 40), (7, 4, 1, 1024, 128), (8, 128, 1, 128, 512), (9, 16, 1, 128, 512)],
]
SCRIPT = """
import json, sys, torch
from compiled import Recorder, compile_launch
from tatten.ops.cuda import combine, project_heads
from tatten.ops.cuda.kernels import project_heads as kernels
kernel, launches = kernels._project_heads_kernel, []
kernels._project_heads_kernel = Recorder(kernel, launches)
combine.INTERPRETED = False
project_heads.multiprocessors = lambda device: 132
for way, batch, heads, q_len, rank, columns in json.loads(sys.argv[1]):
    weight = torch.empty(heads, rank + columns, max(rank, columns), device="meta", dtype=torch.bfloat16)
    if way == "values":
        x, weight, out_dtype = torch.empty(batch, heads, q_len, rank, device="meta"), weight[:, rank:], None
    else:
        x = torch.empty(batch, heads, q_len, rank, device="meta", dtype=torch.bfloat16)
        weight, out_dtype = weight[:, :rank].mT, torch.float32 if way == "unrounded queries" else None
    project_heads.plan_project_heads(x, weight, out_dtype)(x, weight)
print(json.dumps([compile_launch(*x) for x in launches]))
"""


def inputs(
    shape: tuple[int, ...],
    device: str = "cpu",
    layout: str = "dense",
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Rows and a weight: strided, columns of a wider one with NaN around it; transposed, rows of one, as `W_uk` is."""
    batch, heads, q_len, rank, columns = shape
    generator = torch.Generator(device).manual_seed(0)
    x = (torch.randn(batch, heads, q_len, rank, generator=generator, device=device) * scale).to(dtype)
    weight = torch.randn(heads, columns, rank, generator=generator, device=device).bfloat16()
    if layout == "dense":
        return x, weight
    x = x.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
    if layout == "strided":
        around = weight.new_full((heads, 2 * columns + 1, rank + 2), float("nan"))
        inside = around[:, columns:-1, 1:-1]
    else:
        around = weight.new_full((heads, 2 * rank + 1, columns), float("nan"))
        inside = around[:, 1 : rank + 1].mT
    inside.copy_(weight)
    return x, inside


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("bhlr,hcr->bhlc", x.double(), weight.double())


def assert_rounded_once(
    got: Tensor, x: Tensor, weight: Tensor, cut_off: bool = False, out_dtype: torch.dtype | None = None
) -> None:
    """Within half a unit in the last place of the result, and of what 16 bits leave of each term of a sum.

    `cut_off`: conversions cut off what bfloat16 has no room for, as those of Triton's interpreter do.
    """
    units, rest = (1.0, 2**-14) if cut_off else (0.5, 2**-16)
    if x.dtype == torch.bfloat16:  # of which nothing is left
        rest = 2**-20
    want = exact(x, weight)
    terms = torch.einsum("bhlr,hcr->bhlc", x.double().abs(), weight.double().abs())
    assert got.shape == want.shape
    assert got.dtype == (out_dtype or torch.bfloat16)
    assert got.is_contiguous()
    within = want.abs() * torch.finfo(got.dtype).eps * 1.01 * units + terms * rest
    off = (got.double() - want).abs()
    assert (off <= within).all(), (off / within).max()


DTYPES = [(x, out) for x in (torch.float32, torch.bfloat16) for out in (None, torch.float32)]


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("shape", TINY, ids=str)
def test_on_a_cpu(shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype | None]) -> None:
    dtype, out_dtype = dtypes
    for layout in LAYOUTS:
        x, weight = inputs(shape, layout=layout, dtype=dtype)
        assert_rounded_once(op(x, weight, out_dtype=out_dtype), x, weight, out_dtype=out_dtype)


@interpreted
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", TINY, ids=str)
def test_by_the_kernel(shape: tuple[int, ...], layout: str, scale: float) -> None:
    x, weight = inputs(shape, layout=layout, scale=scale)
    assert_rounded_once(plan_project_heads(x, weight)(x, weight), x, weight, cut_off=True)


@interpreted
@pytest.mark.parametrize("dtypes", DTYPES[1:], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", TINY, ids=str)
def test_dtypes_by_the_kernel(shape: tuple[int, ...], layout: str, dtypes: tuple[torch.dtype, Any]) -> None:
    dtype, out_dtype = dtypes
    x, weight = inputs(shape, layout=layout, dtype=dtype)
    got = plan_project_heads(x, weight, out_dtype)(x, weight)
    assert_rounded_once(got, x, weight, cut_off=True, out_dtype=out_dtype)


@interpreted
def test_the_kernel_sums_what_rounding_leaves() -> None:
    """A sum of only the first half of each number would be off by far more."""
    x, weight = torch.full((1, 1, 1, 64), 1 + 2**-9), torch.ones(1, 1, 64).bfloat16()
    weight[..., 32:] = -1
    x[..., 32:] = 1
    (got,) = plan_project_heads(x, weight)(x, weight).flatten().tolist()
    assert got == 32 * 2**-9


@interpreted
def test_a_stride_of_more_than_32_bits() -> None:
    memory = torch.empty((1 << 31) + 16, dtype=torch.bfloat16)  # of which three pages are written
    x, weight = inputs((2, 1, 1, 16, 3))
    far = memory.as_strided((1, 3, 16), (0, 1 << 30, 1))
    far.copy_(weight)
    assert torch.equal(plan_project_heads(x, far)(x, far), plan_project_heads(x, weight)(x, weight))


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_infinity(device: str) -> None:
    x, weight = (tensor.abs() for tensor in inputs((2, 3, 1, 20, 5), device))
    x[0, 1, 0, 3], x[1, 2, 0, 4] = float("inf"), float("-inf")
    for got in (op(x, weight), plan_project_heads(x, weight)(x, weight)):
        assert (got[0, 1] == float("inf")).all()
        assert (got[1, 2] == float("-inf")).all()
        assert int(got.isfinite().sum()) == 4 * 5


@pytest.mark.parametrize("shape", [(0, 2, 1, 8, 4), (2, 0, 1, 8, 4), (2, 2, 1, 0, 4), (2, 2, 1, 8, 0)], ids=str)
def test_sums_of_nothing_are_zero(shape: tuple[int, ...]) -> None:
    x, weight = inputs(shape)
    for got in (op(x, weight), plan_project_heads(x, weight)(x, weight)):
        assert torch.equal(got, torch.zeros(*shape[:3], shape[4], dtype=torch.bfloat16))


X, WEIGHT = inputs((2, 3, 1, 8, 4))


@pytest.mark.parametrize(
    "x, weight, error, says",
    [
        (X.half(), WEIGHT, TypeError, "`x` must be float32 or bfloat16, got torch.float16"),
        (X, WEIGHT.half(), TypeError, "`weight` must be bfloat16, got torch.float16"),
        (X[0], WEIGHT, ValueError, r"`x` must be .* got shape \(3, 1, 8\)"),
        (X, WEIGHT[:2], ValueError, r"`weight` must be \[3, columns, 8\].* got shape \(2, 4, 8\)"),
        (X, WEIGHT[..., :7], ValueError, r"`weight` must be \[3, columns, 8\].* got shape \(3, 4, 7\)"),
        (X.clone().requires_grad_(), WEIGHT, NotImplementedError, "`x` must not require grad"),
    ],
)
def test_bad_input(x: Tensor, weight: Tensor, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        op(x, weight)
    with pytest.raises(error, match=says):
        plan_project_heads(x, weight)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(error, match=says):
        op(x, weight)


def test_a_bad_dtype_of_the_result() -> None:
    for project in (op, lambda x, weight, out_dtype: plan_project_heads(x, weight, out_dtype)):
        with pytest.raises(TypeError, match=r"`out_dtype` must be float32 or bfloat16, got torch\.float16"):
            project(X, WEIGHT, out_dtype=torch.float16)


def test_two_devices() -> None:
    with pytest.raises(ValueError, match="`weight` must be on the device of `x`, cpu, got meta"):
        plan_project_heads(X, WEIGHT.to("meta"))


def test_autocast_rounds_nothing() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        got = op(X, WEIGHT)
    assert torch.equal(got, op(X, WEIGHT))


def test_opcheck() -> None:
    opcheck(op, (X, WEIGHT))
    opcheck(op, (X.bfloat16(), WEIGHT), {"out_dtype": torch.float32})


@pytest.mark.drawn(2, "compiled for Hopper")
def test_compiles_for_hopper() -> None:
    """On its tensor cores, without spills, and with nothing but prefetches before the wait for the launch before."""
    shapes = [("values", rows, heads, 1, 512, 128) for rows, heads in ((1, 128), (64, 16), (64, 128))]
    shapes += [(way, rows, 128, 1, 128, 512) for way in ("queries", "unrounded queries") for rows in (1, 64)]
    for (way, rows, *_), built in zip(shapes, compile_in_subprocess(SCRIPT, shapes), strict=True):
        load = (
            "ld.global" if way != "values" and rows == 64 else "cp.async.cg"
        )  # of 128 numbers at once no loop is left
        assert built["stack"] == 0
        assert "wgmma" in built["ptx"]
        seen = r"prefetch\.global|griddepcontrol\.wait|griddepcontrol\.launch|cp\.async\.cg|ld\.global|st\.global"
        order = re.findall(seen, built["ptx"])
        assert [x for i, x in enumerate(order) if x != order[i - 1] or i == 0] == [
            "prefetch.global",
            "griddepcontrol.wait",
            "griddepcontrol.launch",
            load,
            "st.global",
        ]


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [*TINY, *LARGE], ids=str)
def test_on_a_gpu(shape: tuple[int, ...], layout: str, scale: float) -> None:
    for dtype, out_dtype in DTYPES:
        x, weight = inputs(shape, "cuda", layout, scale, dtype)
        assert_rounded_once(op(x, weight, out_dtype=out_dtype), x, weight, out_dtype=out_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [4, 128])
def test_a_row_depends_on_nothing_else(heads: int) -> None:
    """To the bit, and however many rows there are, in blocks of any size; NaN in one stays there."""
    x, weight = inputs((70, heads, 2, 512, 128), "cuda")
    x[3, 1, 1] = float("nan")
    got = op(x, weight)
    assert got.isnan().any(-1).nonzero().tolist() == [[3, 1, 1]]
    for batch in (1, 3, 16, 17, 33, 66):  # without the one that has NaN
        assert torch.equal(op(x[-batch:].clone(), weight), got[-batch:])


@pytest.mark.gpu
def test_replays() -> None:
    x, weight = inputs((8, 16, 1, 512, 128), "cuda")
    op(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(x, weight)
    for seed in range(3):
        x.copy_(torch.randn(x.shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda"))
        graph.replay()
        assert_rounded_once(out, x, weight)
