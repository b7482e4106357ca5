"""RMS norms before linear layers of one row, and norms that are not taken for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from one_row_layers import EPS, WIDTH, arguments_of, check_same, kinds, launched, norm, search, take_any_size


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    take_any_size(monkeypatch)


def a_sum(x, weight):
    y = x.float()
    return weight * (y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + EPS)).to(x.dtype)


def no_square(x, weight):
    y = x.float()
    return weight * (y * torch.rsqrt(y.mul(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def of_a_float32_tensor(x, weight):
    y = x.float().sin()
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def a_computed_weight(x, weight):
    return norm(x, weight.sin())


def a_multiple_of_eps(x, weight):
    y = x.float()
    mean = y.pow(2).mean(-1, keepdim=True)
    return weight * (y * torch.rsqrt(torch.add(mean, 1e-2, alpha=30))).to(x.dtype)


def rsqrt_into_a_tensor(x, weight):
    y = x.float()
    scale = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS, out=torch.zeros(1, 1, 1))
    return weight * (y * scale).to(x.dtype)


def other_power(x, weight):
    y = x.float()
    return weight * (y * torch.rsqrt(y.pow(4).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def of_another_tensor(x, weight):
    y = x.float()
    return weight * (y * torch.rsqrt(x.cos().float().pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def over_another_dim(x, weight):
    y = x.float()
    return weight * (y * torch.rsqrt(y.pow(2).mean(1, keepdim=True) + EPS)).to(x.dtype)


def without_eps(x, weight):
    y = x.float()
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True))).to(x.dtype)


def with_a_tensor_as_eps(x, weight):
    y = x.float()
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + weight[0])).to(x.dtype)


def negative_eps(x, weight):
    y = x.float()
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + -1e-9)).to(x.dtype)


def in_16_bits(x, weight):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


def plus_one(x, weight):
    """Gemma's."""
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + weight.float())).to(x.dtype)


def by_one_number(x, weight):
    y = x.float()
    return weight[:1] * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def weight_of_float32(x, weight):
    y = x.float()
    return (weight.float() * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS))).to(x.dtype)


def eps_of_the_dtype(x, weight):
    return F.rms_norm(x, (WIDTH,), weight)


def without_weight(x, weight):
    return F.rms_norm(x, (WIDTH,), None, EPS)


def layer_norm(x, weight):
    return F.layer_norm(x, (WIDTH,), weight, None, EPS)


def read_between(x, weight):
    """The sum of squares is written in place."""
    y = x.float()
    mean = y.pow(2).mean(-1, keepdim=True)
    mean.mul_(2)
    return weight * (y * torch.rsqrt(mean + EPS)).to(x.dtype)


NORMS = [other_power, of_another_tensor, over_another_dim, without_eps, with_a_tensor_as_eps, negative_eps, in_16_bits]
NORMS += [a_sum, no_square, of_a_float32_tensor, a_computed_weight, a_multiple_of_eps]
NORMS += [rsqrt_into_a_tensor]
NORMS += [plus_one, by_one_number, weight_of_float32, eps_of_the_dtype, without_weight, layer_norm, read_between]


@pytest.mark.parametrize("form", NORMS, ids=lambda fn: fn.__name__)
def test_other_norms_are_left(form: Callable[..., Any]) -> None:
    def with_residual(x, g, a):
        x = launched(x).abs()  # so that means of other powers are positive
        return x + F.linear(form(x, g), a)

    args = arguments_of(with_residual)
    assert kinds(search(with_residual, *args)[1]) == ["residual+1"]
    check_same(with_residual, *args)
