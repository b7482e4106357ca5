"""Large results of a graph, for which Inductor must not combine kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import capture
from torch import Tensor

from tatten.passes import large_results
from tatten.passes.large_results import has_large_results

MOST = 64


@pytest.fixture(autouse=True)
def _small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_results, "MOST_ELEMENTS", MOST)


def one_dim(x: Tensor) -> Tensor:
    return torch.cat([x[:1], x[:1]], 1) + 1


def views(x: Tensor) -> Tensor:
    return x.T.unflatten(0, (2, -1))[0, 0, 0] + 1


def in_place(x: Tensor) -> Tensor:
    x.t().add_(1)
    return x[0, 0] + 1


def copied(x: Tensor) -> Tensor:
    return x.T.contiguous()[:1, :1]


def in_a_list(x: Tensor) -> Tensor:
    return torch.stack([x, x])[:, 0, 0]


@pytest.mark.parametrize("fn, large", [(one_dim, False), (views, False), (in_place, False), (copied, True)])
def test_results(fn: Callable[..., Any], large: bool) -> None:
    assert has_large_results(capture(fn, torch.ones(2, MOST))) == large


@pytest.mark.parametrize("elements", [MOST, MOST + 2])
def test_the_limit(elements: int) -> None:
    assert has_large_results(capture(lambda x: x + 1, torch.ones(2, elements // 2))) == (elements > MOST)
    assert has_large_results(capture(in_a_list, torch.ones(2, elements // 4))) == (elements // 4 * 4 > MOST)


def test_a_dynamic_size_counts() -> None:
    x = torch.ones(3, 2)
    torch._dynamo.mark_dynamic(x, 0)
    assert has_large_results(capture(lambda x: x + 1, x))
    assert not has_large_results(capture(lambda x: x.T, x))


def test_the_body_of_an_operator_counts() -> None:
    def branches(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: (x * 2).sum(), lambda x: (x + 1).sum(), (x,))

    assert has_large_results(capture(branches, torch.ones(2, MOST)))
    assert not has_large_results(capture(branches, torch.ones(2, MOST // 2)))
