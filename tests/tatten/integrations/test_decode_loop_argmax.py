"""The argmax of a step: in chunks, for a GPU, the same as in one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tatten.integrations.transformers.loop.argmax import CHUNK, argmax, argmax_of_chunks

LENGTHS = [1, 7, CHUNK, CHUNK + 1, 2 * CHUNK, 5 * CHUNK - 1, 50257]


def ties(x: Tensor) -> Tensor:
    return x.round()


def none_allowed(x: Tensor) -> Tensor:
    return torch.full_like(x, float("-inf"))


def one_allowed(x: Tensor) -> Tensor:
    return none_allowed(x).index_fill(-1, torch.tensor([x.shape[-1] - 1], device=x.device), -5.0)


def nans(x: Tensor) -> Tensor:
    """In the last chunk alone, or in two chunks."""
    x[..., -1] = float("nan")
    x[0, x.shape[-1] // 2] = float("nan")
    return x


def infinite(x: Tensor) -> Tensor:
    x[..., x.shape[-1] // 2 :: 3] = float("inf")
    return x


KINDS = [torch.clone, ties, none_allowed, one_allowed, nans, infinite]


def scores(length: int, device: str = "cpu") -> Tensor:
    return torch.randn(3, length, generator=torch.Generator().manual_seed(length)).to(device)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_first_of_the_largest(kind: Callable[[Tensor], Tensor], length: int) -> None:
    x = kind(scores(length))
    assert torch.equal(argmax_of_chunks(x), x.argmax(-1))
    assert torch.equal(argmax_of_chunks(x[0]), x[0].argmax(-1))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_under_inductor(kind: Callable[[Tensor], Tensor]) -> None:
    compiled = torch.compile(argmax_of_chunks, dynamic=False)
    x = kind(scores(2 * CHUNK + 5))
    assert torch.equal(compiled(x), x.argmax(-1))


@pytest.mark.parametrize("device, chunked", [("cpu", False), ("cuda", True)])
def test_only_long_rows_on_a_gpu_are_cut(device: str, chunked: bool) -> None:
    with FakeTensorMode():
        for n, cut in ((CHUNK, False), (CHUNK + 1, chunked)):
            graph = make_fx(argmax)(torch.empty(2, n, device=device)).graph
            assert (torch.ops.aten.amax.default in {node.target for node in graph.nodes}) == cut


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_on_a_gpu(kind: Callable[[Tensor], Tensor]) -> None:
    """As Inductor compiles it."""
    compiled = torch.compile(argmax, dynamic=False)
    for length in (CHUNK, CHUNK + 1, 50257):
        x = kind(scores(length, "cuda"))
        assert torch.equal(compiled(x).cpu(), x.cpu().argmax(-1))
