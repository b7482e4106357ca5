"""The keys with the largest scores: on a CPU, under the interpreter, for Hopper and on a GPU."""

from __future__ import annotations

import os

import pytest
import torch
from compiled import compile_in_subprocess
from poison import fresh_memory_is_poison
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from tatten.ops.cuda import top_picks as plans

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs where no GPU is")
op = torch.ops.tatten.top_picks.default

INF, NAN = float("inf"), float("nan")
SHAPES = [((1,), 1), ((2, 3), 3), ((3, 1, 700), 10), ((2, 5, 300), 299), ((3000,), 513), ((2, 1000), 1000)]
KINDS = ("normal", "ties", "zeros", "equal", "masked", "special", "bits", "strided")
SCRIPT = """
import json, torch
from compiled import Recorder, compile_launch
from tatten.ops.cuda import combine, top_picks
from tatten.ops.cuda.kernels import top_picks as kernels
launches = []
for name in ("_count_scores_kernel", "_write_picks_kernel"):
    setattr(kernels, name, Recorder(getattr(kernels, name), launches))
combine.INTERPRETED = False
for n in (8192, 131072, 1 << 20):
    scores = torch.empty(2, 1, n, device="meta")
    top_picks.plan_top_picks(scores, 2048)(scores)
print(json.dumps([compile_launch(*x) for x in launches]))
"""


def draw(shape: tuple[int, ...], kind: str, device: str = "cpu") -> Tensor:
    """Return scores; `kind` says which ones are special."""
    x = torch.randn(shape, device=device)
    if kind == "ties":
        return x.mul(2).round()
    if kind == "zeros":
        return torch.where(x > 1, x, torch.where(x < 0, -0.0, 0.0))
    if kind == "equal":
        return torch.full(shape, -1.5, device=device)
    if kind == "masked":  # fewer scores than picks
        return torch.where(torch.rand(shape, device=device) < 0.1, x, -INF)
    if kind == "special":
        values = torch.tensor([INF, -INF, NAN, -NAN, 1e-45, -1e-45, 3e38, 1.0], device=device)
        return values[torch.randint(8, shape, device=device)]
    if kind == "bits":
        return torch.randint(-(2**31), 2**31, shape, device=device).int().view(torch.float32)
    if kind == "strided":
        return torch.stack((x, torch.full_like(x, NAN)), dim=-1)[..., 0]
    return x


def expected(scores: Tensor, k: int) -> Tensor:
    """Sort pairs of a score and an index in Python, row by row."""
    rows = []
    for row in scores.reshape(-1, scores.shape[-1]).tolist():
        order = sorted(range(len(row)), key=lambda i: (row[i] == row[i], -row[i] if row[i] == row[i] else 0, i))
        rows.append(sorted(order[:k]))
    return torch.tensor(rows, dtype=torch.int32).view(*scores.shape[:-1], k)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "k"), SHAPES)
def test_cpu(shape: tuple[int, ...], k: int, kind: str) -> None:
    scores = draw(shape, kind)
    picks = op(scores, k)
    assert picks.dtype == torch.int32
    assert picks.is_contiguous()
    assert torch.equal(picks, expected(scores, k))


@pytest.mark.drawn(12)
@interpreted
@pytest.mark.parametrize(
    ("kind", "most_chunks"), [*((kind, 64) for kind in KINDS), ("normal", 3), ("ties", 3), ("special", 3)]
)
@pytest.mark.parametrize(("shape", "k"), SHAPES)
def test_interpreted(
    shape: tuple[int, ...], k: int, kind: str, most_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "MOST_CHUNKS", most_chunks)  # a program then has several blocks
    scores = draw(shape, kind)
    with fresh_memory_is_poison():
        picks = plans.plan_top_picks.__wrapped__(scores, k)(scores)  # type: ignore[attr-defined]
    assert torch.equal(picks, expected(scores, k))


def test_empty_batches() -> None:
    assert op(torch.empty(0, 7), 3).shape == (0, 3)
    assert plans.plan_top_picks(torch.empty(0, 7), 3)(torch.empty(0, 7)).shape == (0, 3)


def test_picks_are_those_of_topk_without_ties() -> None:
    scores = torch.randperm(5000).float().view(5, 1000)
    assert torch.equal(op(scores, 77), scores.topk(77).indices.sort().values.int())


def test_opcheck() -> None:
    opcheck(op, (torch.randn(2, 3, 50), 7))
    opcheck(op, (torch.randn(2, 50, 3).transpose(1, 2), 7))


def test_fake() -> None:
    with FakeTensorMode():
        picks = op(torch.empty(2, 3, 50, device="cuda"), 7)
    assert (picks.shape, picks.dtype, picks.device.type) == ((2, 3, 7), torch.int32, "cuda")


@pytest.mark.parametrize(
    ("scores", "k", "error", "message"),
    [
        (torch.zeros(3, dtype=torch.float64), 1, TypeError, "`scores` must be float32, got torch.float64"),
        (torch.zeros(()), 1, ValueError, "`scores` must have at least one dimension, got none"),
        (torch.zeros(2, 3), 4, ValueError, "`k` must be from 1 to the 3 scores of a row, got 4"),
        (torch.zeros(2, 3), 0, ValueError, "`k` must be from 1 to the 3 scores of a row, got 0"),
        (torch.zeros(3, requires_grad=True), 1, NotImplementedError, "grad"),
    ],
)
def test_errors(scores: Tensor, k: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        op(scores, k)


def test_compiled_for_hopper() -> None:
    for built in compile_in_subprocess(SCRIPT):
        assert built["stack"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "k"), [*SHAPES, ((64, 1, 131072), 2048), ((2, 3_000_000), 4096), ((3, 8192), 2048)])
def test_gpu(shape: tuple[int, ...], k: int, kind: str) -> None:
    scores = draw(shape, kind, "cuda")
    want = op(scores.cpu(), k)
    assert torch.equal(op(scores, k).cpu(), want)
    assert torch.equal(op(scores, k).cpu(), want)


@pytest.mark.gpu
def test_replay() -> None:
    scores = draw((4, 1, 40_000), "normal", "cuda")
    op(scores, 2048)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        picks = op(scores, 2048)
    for kind in ("ties", "masked", "special"):
        scores.copy_(draw(scores.shape, kind, "cuda"))
        graph.replay()
        assert torch.equal(picks.cpu(), op(scores.cpu(), 2048))
