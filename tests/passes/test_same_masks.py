"""Masks that each layer computes anew, as T5's do: found to be equal, so that their keys are looked for once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from graphs import capture, listing

from tatten.passes import rewrite

B, H, S, D = 2, 4, 300, 16


def tensors() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    bias, seen = torch.randn(1, H, 1, S), torch.rand(B, 1, 1, S) > 0.5
    return torch.randn(B, H, 1, D), torch.randn(B, H, S, D), torch.randn(B, H, S, D), bias, seen


def searches(fn) -> int:
    gm = capture(fn, *tensors())
    rewrite(gm)
    assert listing(gm).count("decode_attention.default(") == 2
    return listing(gm).count("block_mask.default(")


def t5(q, k, v, bias, seen):
    """T5's: each layer adds the padding to the position bias."""
    for _ in range(2):
        mask = torch.where(seen, bias, torch.finfo(bias.dtype).min).contiguous()
        q = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return q


def sliced(q, k, v, bias, seen):
    """As layers slice the mask that they are given, and repeat it over the batch."""
    for _ in range(2):
        mask = (bias + torch.zeros(1, device=bias.device))[:, :, :, : k.shape[2]].expand(B, -1, -1, -1).to(q.dtype)
        q = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return q


@pytest.mark.parametrize("fn", [t5, sliced], ids=lambda fn: fn.__name__)
def test_equal_masks_are_searched_once(fn) -> None:
    assert searches(fn) == 1
    want, got = fn(*tensors()), torch.compile(fn, backend="tatten", options={"inner": "eager"})(*tensors())
    torch.testing.assert_close(got, want)


def other_bias(q, k, v, bias, seen):
    for i in range(2):
        q = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.where(seen, bias, -1e4 * (i + 1)))
    return q


def another_dtype(q, k, v, bias, seen):
    first = F.scaled_dot_product_attention(q, k, v, attn_mask=bias + seen)
    return F.scaled_dot_product_attention(first, k, v, attn_mask=bias.double().float() + seen)


def random_bias(q, k, v, bias, seen):
    for _ in range(2):
        q = F.scaled_dot_product_attention(q, k, v, attn_mask=F.dropout(bias, 0.5))
    return q


def bias_written_between(q, k, v, bias, seen):
    for _ in range(2):
        q = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.where(seen, bias, -1e4))
        bias.add_(1)
    return q


def mask_written_between(q, k, v, bias, seen):
    for _ in range(2):
        mask = torch.where(seen, bias, -1e4)
        q = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        mask.add_(torch.arange(S))
    return q


def part_written_between(q, k, v, bias, seen):
    """The first mask is made of what was copied before the write, the second of what was copied after it."""
    first = bias * 2
    bias.neg_()
    for x in (first, bias * 2):
        q = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.where(seen, x, -1e4))
    return q


def alias_written_between(q, k, v, bias, seen):
    row = bias[0]
    for _ in range(2):
        q = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.where(seen, bias, -1e4))
        row.mul_(3)
    return q


OTHERS = [
    *(other_bias, another_dtype, random_bias, bias_written_between, mask_written_between),
    *(part_written_between, alias_written_between),
]


@pytest.mark.parametrize("fn", OTHERS, ids=lambda fn: fn.__name__)
def test_others_are_not(fn) -> None:
    assert searches(fn) == 2
    if fn is not random_bias:
        want, got = fn(*tensors()), torch.compile(fn, backend="tatten", options={"inner": "eager"})(*tensors())
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("index", [True, [0]], ids=str)
def test_an_index_that_copies_is_no_view(index) -> None:
    """A mask that is copied again after a write is another one."""

    def fn(q, k, v, bias, seen):
        mask = bias * 1
        first = (q @ k.mT * 0.25 + mask[index][..., :S]).softmax(-1) @ v
        mask.mul_(3)
        return first, (q @ k.mT * 0.25 + mask[index][..., :S]).softmax(-1) @ v

    q, k, v, bias, seen = tensors()
    args = q, k, v, bias[0, 0], seen
    got = torch.compile(fn, backend="tatten", options={"inner": "eager"})(*args)
    torch.testing.assert_close(got, fn(*args))
