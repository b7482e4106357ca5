"""Products of each head's rows with a weight of its own: on a CPU, under the interpreter, for Hopper and on a GPU."""

from __future__ import annotations

import os
import re

import pytest
import torch
from compiled import compile_in_subprocess
from torch import Tensor
from torch.library import opcheck

from tatten.ops.cuda.project_heads import plan_project_heads

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs where no GPU is")
op = torch.ops.tatten.project_heads.default

# batch, heads, q_length, rank, columns
TINY = [(1, 1, 1, 1, 1), (2, 3, 1, 20, 5), (1, 2, 3, 16, 65), (3, 1, 12, 33, 64), (5, 2, 7, 8, 70)]
LARGE = [
    *[(1, 128, 1, 512, 128), (8, 128, 1, 512, 128), (3, 16, 16, 512, 256)],
    *[(65, 5, 1, 384, 192), (130, 3, 1, 77, 40), (7, 4, 1, 1024, 128)],
]
SCRIPT = """
import json, sys, torch
from compiled import Recorder, compile_launch
from tatten.ops.cuda import combine, project_heads
from tatten.ops.cuda.kernels import project_heads as kernels
kernel, launches = kernels._project_heads_kernel, []
kernels._project_heads_kernel = Recorder(kernel, launches)
combine.INTERPRETED, project_heads.capability = False, lambda device: (9, 0)
for (batch, heads, q_len, rank, columns), dtype in json.loads(sys.argv[1]):
    x = torch.empty(batch, heads, q_len, rank, device="meta")
    weight = torch.empty(heads, 2 * columns, rank, device="meta", dtype=getattr(torch, dtype))[:, columns:]
    project_heads.plan_project_heads(x, weight)(x, weight)
print(json.dumps([compile_launch(*x) for x in launches]))
"""


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu", strided: bool = False
) -> tuple[Tensor, Tensor]:
    """Sums and a weight; strided, the weight is columns of a wider one, with NaN around it."""
    batch, heads, q_len, rank, columns = shape
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(batch, heads, q_len, rank, generator=generator, device=device)
    weight = torch.randn(heads, columns, rank, generator=generator, device=device).to(dtype)
    if strided:
        x = x.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
        around = weight.new_full((heads, 2 * columns + 1, rank + 2), float("nan"))
        around[:, columns:-1, 1:-1] = weight
        weight = around[:, columns:-1, 1:-1]
    return x, weight


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("bhlr,hcr->bhlc", x.double(), weight.double())


def assert_rounded_once(got: Tensor, x: Tensor, weight: Tensor, units: float = 0.5) -> None:
    """Within so many units in the last place of the result, and of what 16 bits leave of each term of a sum."""
    want = exact(x, weight)
    terms = torch.einsum("bhlr,hcr->bhlc", x.double().abs(), weight.double().abs())
    assert got.shape == want.shape
    assert got.dtype == weight.dtype
    assert got.is_contiguous()
    within = want.abs() * torch.finfo(got.dtype).eps * 1.01 * units + terms * 2**-16
    off = (got.double() - want).abs()
    assert (off <= within).all(), (off / within).max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", TINY, ids=str)
def test_on_a_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for strided in (False, True):
        x, weight = inputs(shape, dtype, strided=strided)
        assert_rounded_once(op(x, weight), x, weight)


@interpreted
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", TINY, ids=str)
def test_by_the_kernel(shape: tuple[int, ...], dtype: torch.dtype, strided: bool) -> None:
    x, weight = inputs(shape, dtype, strided=strided)
    units = 1.0 if dtype == torch.bfloat16 else 0.5  # Triton's interpreter cuts off what bfloat16 has no room for
    assert_rounded_once(plan_project_heads(x, weight)(x, weight), x, weight, units)


@pytest.mark.parametrize("shape", [(0, 2, 1, 8, 4), (2, 0, 1, 8, 4), (2, 2, 1, 0, 4), (2, 2, 1, 8, 0)], ids=str)
def test_sums_of_nothing_are_zero(shape: tuple[int, ...]) -> None:
    x, weight = inputs(shape, torch.bfloat16)
    for got in (op(x, weight), plan_project_heads(x, weight)(x, weight)):
        assert torch.equal(got, torch.zeros(*shape[:3], shape[4], dtype=torch.bfloat16))


X, WEIGHT = inputs((2, 3, 1, 8, 4), torch.bfloat16)


@pytest.mark.parametrize(
    "x, weight, error, says",
    [
        (X.bfloat16(), WEIGHT, TypeError, "`x` must be float32, got torch.bfloat16"),
        (X, WEIGHT.float(), TypeError, "`weight` must be float16 or bfloat16, got torch.float32"),
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


def test_opcheck() -> None:
    opcheck(op, (X, WEIGHT))


def test_compiles_for_hopper() -> None:
    """On its tensor cores, without spills, and with nothing but prefetches before the wait for the launch before."""
    shapes = (1, 128, 1, 512, 128), (64, 16, 1, 512, 128), (64, 128, 1, 512, 128)
    given = [(shape, dtype) for shape in shapes for dtype in ("bfloat16", "float16")]
    for built in compile_in_subprocess(SCRIPT, given):
        assert built["stack"] == 0
        assert "wgmma" in built["ptx"]
        order = re.findall(r"prefetch\.global|griddepcontrol\.wait|cp\.async\.cg|ld\.global|st\.global", built["ptx"])
        assert [x for i, x in enumerate(order) if x != order[i - 1] or i == 0] == [
            "prefetch.global",
            "griddepcontrol.wait",
            "cp.async.cg",
            "st.global",
        ]


@needs_gpu
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [*TINY, *LARGE], ids=str)
def test_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype, strided: bool) -> None:
    x, weight = inputs(shape, dtype, "cuda", strided)
    assert_rounded_once(op(x, weight), x, weight)


@needs_gpu
def test_a_row_depends_on_nothing_else() -> None:
    """To the bit, and however many rows there are; NaN in one stays there."""
    x, weight = inputs((70, 4, 2, 512, 128), torch.bfloat16, "cuda")
    x[3, 1, 1] = float("nan")
    got = op(x, weight)
    assert got.isnan().any(-1).nonzero().tolist() == [[3, 1, 1]]
    for batch in (1, 3, 16, 17, 33, 66):  # without the one that has NaN
        assert torch.equal(op(x[-batch:].clone(), weight), got[-batch:])


@needs_gpu
def test_replays() -> None:
    x, weight = inputs((8, 16, 1, 512, 128), torch.bfloat16, "cuda")
    op(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(x, weight)
    for seed in range(3):
        x.copy_(torch.randn(x.shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda"))
        graph.replay()
        assert_rounded_once(out, x, weight)
