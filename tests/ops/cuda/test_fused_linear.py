"""Linear layers of one row with the ops around them: on a CPU, under the interpreter, for Hopper and on a GPU."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled import compile_in_subprocess
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from tatten.ops.cuda import fused_linear
from tatten.ops.cuda.allocation import Dense
from tatten.ops.cuda.fused_linear import ELEMENTS, plan_fused_linear, tile_of_rows
from tatten.ops.fused_linear import GATES, MOST_FEATURES, MOST_GATED_FEATURES

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs where no GPU is")
op = torch.ops.tatten.fused_linear.default
bf16 = torch.bfloat16

# leading dims of x, in_features, out_features of each weight, the ops around the layers
Case = tuple[tuple[int, ...], int, tuple[int, ...], tuple[str, ...]]
TINY: list[Case] = [
    ((1,), 16, (1,), ("residual",)),
    ((1, 1), 40, (5, 70), ("norm",)),
    ((), 136, (9,), ("norm", "residual")),
    ((1, 1, 1), 300, (40, 40), ("norm", "silu")),
    ((1,), 1, (3, 3), ("gelu",)),
    ((1, 1), 130, (65, 65), ("norm", "gelu_tanh", "residual")),
    ((1,), 24, (7, 0, 3), ("norm",)),
    ((1, 1), 2048, (5,), ("norm", "residual")),
    ((1,), 2049, (3, 3), ("silu", "residual")),
    ((1,), 8200, (2,), ("norm",)),
    ((1,), MOST_FEATURES, (2, 2), ("norm",)),
    ((1,), MOST_GATED_FEATURES, (2, 2), ("norm", "silu")),
    ((1,), 64, (0,), ("norm",)),
    ((1, 1), 8, (33, 2, 1), ()),
]
LARGE: list[Case] = [
    ((1, 1), 4096, (4096, 1024, 1024), ("norm",)),
    ((1, 1), 4096, (14336, 14336), ("norm", "silu")),
    ((1, 1), 14336, (4096,), ("residual",)),
    ((1, 1), 1024, (3072, 3072), ("norm", "silu")),
    ((1, 1), 896, (4864, 4864), ("norm", "gelu_tanh")),
    ((1, 1), 2048, (128256,), ("norm",)),
    ((1, 1), 28672, (8192,), ("residual",)),
]
SCRIPT = """
import json, sys, torch
from compiled import Recorder, compile_launch
from tatten.ops.cuda import combine, fused_linear
from tatten.ops.cuda.kernels import fused_linear as kernels
launches = []
kernels._fused_linear_kernel = Recorder(kernels._fused_linear_kernel, launches)
combine.INTERPRETED = False
fused_linear.has_early_launches = lambda device: True
empty = lambda *shape: torch.empty(*shape, device="meta", dtype=torch.bfloat16)
for features, outs, norm, gate, residual, prefetch in json.loads(sys.argv[1]):
    around = empty(features) if norm else None, empty(1, outs[0]) if residual else None
    x, weights = empty(1, features), [empty(n, features) for n in outs]
    plan = fused_linear.plan_fused_linear(x, weights, around[0], 1e-5, gate, around[1], prefetch)
    plan(x, weights, *around)
print(json.dumps([compile_launch(*x, sass=True) for x in launches]))
"""


def inputs(case: Case, device: str = "cpu", dtype: torch.dtype = bf16, strided: bool = False) -> dict[str, Any]:
    """The arguments of the op. `strided`: tensors have NaN around them, and between their elements."""
    lead, features, outs, around = case
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, device=device).to(dtype)
        if not strided:
            return values
        padded = values.new_full((*shape[:-1], 2 * shape[-1] + 3), float("nan"))
        padded[..., 1:-2:2] = values
        return padded[..., 1:-2:2]

    call: dict[str, Any] = {"x": draw(*lead, features), "weights": [draw(n, features) for n in outs]}
    call |= {"norm_weight": draw(features), "eps": 1e-3} if "norm" in around else {}
    call |= {"residual": draw(*lead, outs[0])} if "residual" in around else {}
    gates = [name for name in GATES if name in around]
    return call | ({"gate": gates[0]} if gates else {})


def by_plan(x: Tensor, weights: list[Tensor], prefetch: bool = False, **call: Any) -> list[Tensor]:
    """The op as it is on CUDA."""
    norm_weight, residual = call.get("norm_weight"), call.get("residual")
    plan = plan_fused_linear(x, weights, norm_weight, call.get("eps", 0.0), call.get("gate"), residual, prefetch)
    return plan(x, weights, norm_weight, residual)


def check(got: Sequence[Tensor], call: dict[str, Any], roundings: float = 0.501) -> None:
    """Each result is within half a unit in its last place, and of what float32 loses of its terms."""
    x, weights = call["x"].double(), [w.double() for w in call["weights"]]
    if "norm_weight" in call:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + call["eps"]) * call["norm_weight"].double()
    wants = [x @ w.T for w in weights]
    terms = [x.abs() @ w.abs().T for w in weights]
    if "gate" in call:
        gate = GATES[call["gate"]]
        # The slope of the activation is at most 1.2.
        terms = [1.2 * terms[0] * wants[1].abs() + gate(wants[0]).abs() * terms[1]]
        wants = [gate(wants[0]) * wants[1]]
    if "residual" in call:
        added = call["residual"].double()
        wants, terms = [wants[0] + added], [terms[0] + added.abs()]
    assert len(got) == len(wants)
    for result, want, size in zip(got, wants, terms, strict=True):
        assert result.shape == want.shape
        assert result.dtype == call["x"].dtype
        assert result.is_contiguous()
        within = want.abs() * torch.finfo(result.dtype).eps * roundings + size * 2**-19 + torch.finfo(result.dtype).tiny
        off = (result.double() - want).abs()
        assert (off <= within).all(), (off / within).max()


@pytest.mark.parametrize("dtype", [bf16, torch.float16], ids=str)
@pytest.mark.parametrize("case", TINY, ids=str)
def test_on_a_cpu(case: Case, dtype: torch.dtype) -> None:
    for strided in (False, True):
        call = inputs(case, dtype=dtype, strided=strided)
        check(op(**call), call)


@interpreted
@pytest.mark.parametrize("dtype", [bf16, torch.float16], ids=str)
@pytest.mark.parametrize("case", TINY, ids=str)
def test_by_the_kernel(case: Case, dtype: torch.dtype) -> None:
    """Conversions of Triton's interpreter cut off what 16 bits have no room for: a whole unit in the last place."""
    for strided in (False, True):
        call = inputs(case, dtype=dtype, strided=strided)
        check(by_plan(**call), call, roundings=1.01)


def test_programs_hold_a_bounded_number_of_elements() -> None:
    """A thread holds up to `ELEMENTS` numbers of weights."""
    for n_weights, most in ((1, MOST_FEATURES), (2, MOST_GATED_FEATURES)):
        for features in (*range(1, most, 37), most):
            rows, width, warps = tile_of_rows(features, n_weights)
            assert features <= width < max(32, 2 * features)
            assert warps in (4, 8, 16)
            assert rows >= 1
            assert rows * width * n_weights <= 32 * warps * ELEMENTS
            assert rows & (rows - 1) == width & (width - 1) == 0


@pytest.mark.parametrize("gate", GATES)
def test_gates_are_those_of_pytorch(gate: str) -> None:
    x = torch.randn(100, dtype=torch.float64)
    want = {"silu": F.silu(x), "gelu": F.gelu(x), "gelu_tanh": F.gelu(x, approximate="tanh")}[gate]
    assert torch.equal(GATES[gate](x), want)


@interpreted
@pytest.mark.parametrize("gate", GATES)
def test_gates_of_the_kernel(gate: str) -> None:
    """At values of all sizes, times 1: each product has one term, so only the activation and the result are rounded."""
    values = torch.cat([torch.linspace(-6, 6, 61), torch.tensor([-100.0, -20, 0, 20, 100])]).to(bf16)
    weight, ones = torch.zeros(len(values), 8, dtype=bf16), torch.zeros(len(values), 8, dtype=bf16)
    weight[:, 3], ones[:, 3] = values, 1
    x = torch.zeros(1, 8, dtype=bf16)
    x[0, 3] = 1
    (got,) = by_plan(x, [weight, ones], gate=gate)
    want = GATES[gate](values.double())
    off = (got[0].double() - want).abs()
    assert (off <= want.abs() * 2**-7 * 1.01 + 1e-6).all(), off.max()


@interpreted
@pytest.mark.parametrize("case", [TINY[1], TINY[3], TINY[6]], ids=str)
def test_nothing_is_written_beside_the_results(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    call, buffers = inputs(case), list[Tensor]()

    def allocate_amid(like: Tensor, *layouts: Dense) -> list[Tensor]:
        for layout in layouts:
            buffers.append(like.new_full((math.prod(layout.shape) + 32,), 7.0))
        return [x[16:-16].view(layout.shape) for x, layout in zip(buffers, layouts, strict=True)]

    monkeypatch.setattr(fused_linear, "allocate", allocate_amid)
    check(by_plan(**call), call, roundings=1.01)
    assert buffers
    for buffer in buffers:
        assert (buffer[:16] == 7).all()
        assert (buffer[-16:] == 7).all()


@interpreted
def test_nan_and_infinity_are_kept() -> None:
    call = inputs(((1,), 40, (5,), ("norm", "residual")))
    call["residual"][0, 2] = float("inf")
    assert by_plan(**call)[0].isinf().tolist() == [[False, False, True, False, False]]
    call["x"][0, 3] = float("nan")
    for compute in (op, by_plan):
        assert compute(**call)[0].isnan().all()


@interpreted
def test_a_row_of_zeros_has_a_norm() -> None:
    call = inputs(((1,), 40, (5,), ("norm",))) | {"x": torch.zeros(1, 40, dtype=bf16)}
    for compute in (op, by_plan):
        assert torch.equal(compute(**call)[0], torch.zeros(1, 5, dtype=bf16))


X, WEIGHT = torch.ones(1, 8).to(bf16), torch.ones(4, 8).to(bf16)
ROW = torch.ones(1, 4).to(bf16)


@pytest.mark.parametrize(
    "x, weights, options, error, says",
    [
        (X.float(), [WEIGHT], {}, TypeError, r"`x` must be bfloat16 or float16, got torch\.float32"),
        (X.expand(2, 8), [WEIGHT], {}, ValueError, r"`x` must have one row, got shape \(2, 8\)"),
        (X[:0], [WEIGHT], {}, ValueError, r"`x` must have one row, got shape \(0, 8\)"),
        (X[:, :0], [WEIGHT[:, :0]], {}, ValueError, "`x` must have 1 to 32768 features, got 0"),
        (X.new_ones(1, 32769), [X.new_ones(1, 32769)], {}, ValueError, "`x` must have 1 to 32768 features, got 32769"),
        (X, [], {}, ValueError, "`weights` must have one to 3 tensors, got 0"),
        (
            X,
            [WEIGHT.half()],
            {},
            TypeError,
            r"`weights\[0\]` must have the dtype of `x`, torch.bfloat16, got .*float16",
        ),
        (
            X.new_ones(1, 16385),
            [X.new_ones(1, 16385)] * 2,
            {"gate": "silu"},
            ValueError,
            "1 to 16384 features with `gate`, got 16385",
        ),
        (X, [WEIGHT], {"norm_weight": X[0, :7]}, ValueError, r"`norm_weight` must have shape \(8,\), got \(7,\)"),
        (X, [WEIGHT], {"norm_weight": X[0].float()}, TypeError, "`norm_weight` must have the dtype of `x`"),
        (X, [WEIGHT], {"norm_weight": X[0], "eps": -1.0}, ValueError, r"`eps` must be at least 0, got -1\.0"),
        (X, [WEIGHT] * 2, {"gate": "relu"}, ValueError, "`gate` must be one of silu, gelu, gelu_tanh, got 'relu'"),
        (X, [WEIGHT], {"gate": "silu"}, ValueError, r"`weights` must be two of one shape with `gate`.*\[\(4, 8\)\]"),
        (X, [WEIGHT, WEIGHT[:3]], {"gate": "silu"}, ValueError, r"`weights` must be two of one shape.*\(3, 8\)"),
        (X, [WEIGHT] * 2, {"residual": ROW}, ValueError, "`residual` must be None for several results"),
        (X, [WEIGHT], {"residual": ROW[0]}, ValueError, r"`residual` must have shape \(1, 4\), got \(4,\)"),
        (X, [WEIGHT], {"residual": ROW.half()}, TypeError, "`residual` must have the dtype of `x`"),
        (X, [WEIGHT], {"residual": ROW.clone().requires_grad_()}, NotImplementedError, "`residual` must not require"),
        (X.clone().requires_grad_(), [WEIGHT], {}, NotImplementedError, "fused_linear.* `x` must not require grad"),
    ],
)
def test_bad_input(x: Tensor, weights: list[Tensor], options: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        op(x, weights, **options)
    with pytest.raises(error, match=says):
        by_plan(x, weights, **options)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(error, match=says):
        op(x, weights, **options)


def test_two_devices() -> None:
    with pytest.raises(ValueError, match=r"`residual` must be on the device of `x`, cpu, got meta"):
        by_plan(X, [WEIGHT], residual=ROW.to("meta"))


def test_opcheck() -> None:
    opcheck(op, (X, [WEIGHT]))
    opcheck(op, (X, [WEIGHT] * 2), {"norm_weight": X[0], "eps": 1e-5, "gate": "silu", "residual": ROW})


def test_under_inductor() -> None:
    def layers(x: Tensor, weights: list[Tensor], norm_weight: Tensor) -> Tensor:
        a, b = op(x.relu(), weights, norm_weight=norm_weight, eps=1e-5)
        return torch.cat((a, b), -1) * 2

    torch._dynamo.reset()
    call = inputs(((1, 1), 300, (5, 4), ("norm",)))
    arguments = call["x"], call["weights"], call["norm_weight"]
    torch.testing.assert_close(torch.compile(layers, fullgraph=True)(*arguments), layers(*arguments))


def order(sass: str) -> list[str]:
    """The loads of weights, `LDG.E.EF`, the wait for the previous launch, and the start of the next one, in order."""
    names = {"LDG.E.EF": "load", "ACQBULK": "wait", "PREEXIT": "next", "STG": "store"}
    steps = [names[name] for line in sass.splitlines() for name in names if f" {name}" in line]
    return [x for i, x in enumerate(steps) if i == 0 or x != steps[i - 1]]


@pytest.mark.drawn(2, "compiled for Hopper")
def test_compiles_for_hopper() -> None:
    """Nothing spills, weights are loaded by 16 bytes, and with `prefetch` all of them before the wait."""
    cases = [
        (features, outs, norm, gate, residual, prefetch)
        for features in (1024, 2560, 4096, 8192)
        for outs, norm, gate, residual in (((64, 8, 8), True, None, False), ((64, 64), True, "silu", False))
        for prefetch in (True, False)
    ]
    cases += [(n, (64,), False, None, True, True) for n in (896, 3072, 8192, 14336, MOST_FEATURES)]
    cases += [(4096, (64, 64), True, gate, True, True) for gate in ("gelu", "gelu_tanh")]
    cases += [
        (MOST_GATED_FEATURES, (64, 64), True, "silu", True, True),
        (MOST_FEATURES, (64, 64, 8), True, None, False, True),
    ]
    for case, built in zip(cases, compile_in_subprocess(SCRIPT, cases), strict=True):
        assert built["stack"] == 0, case
        assert built["launch_pdl"]
        assert order(built["sass"]) == (
            ["load", "wait", "next", "store"] if case[-1] else ["wait", "next", "load", "store"]
        )
        assert "LDG.E.EF.128" in built["sass"]
        assert not [x for x in built["sass"].splitlines() if "LDG.E.EF" in x and ".128" not in x]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [bf16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [*TINY, *LARGE], ids=str)
def test_on_a_gpu(case: Case, dtype: torch.dtype) -> None:
    for strided in (False, True):
        call = inputs(case, "cuda", dtype, strided)
        for prefetch in (False, True):
            check(op(**call, prefetch=prefetch), call)


def chain(call: dict[str, Any], n: int, then: Callable[[Tensor], Tensor]) -> Tensor:
    """Layers that each read the result of the one before, launched one after the other."""
    x = call["x"]
    for _ in range(n):
        (x,) = op(**(call | {"x": then(x), "residual": x}), prefetch=True)
    return x


@pytest.mark.gpu
@pytest.mark.parametrize("between", [False, True])
def test_launches_wait_for_the_row(between: bool) -> None:
    """Weights may be loaded early, but not the row or the residual, which the previous launch writes."""
    call = inputs(((1, 1), 512, (512,), ("norm", "residual")), "cuda")
    then = torch.neg if between else lambda x: x
    want = chain(call, 32, lambda x: [torch.cuda.synchronize(), then(x)][1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(call, 32, then)
    for _ in range(200):
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, want)
