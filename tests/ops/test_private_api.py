"""The private PyTorch API of `ops/cpu`, used in `flash.py`: if it moves, this says so."""

from __future__ import annotations

import pytest
import torch


def flash(
    *tensors: torch.Tensor, mask: torch.Tensor | None = None, **given: float
) -> tuple[torch.Tensor, torch.Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    return op(*tensors, 0.0, False, attn_mask=mask, **given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_flash_on_a_cpu(dtype: torch.dtype) -> None:
    """It takes an additive mask and a scale, and returns the natural lse in the accumulator's dtype."""
    query, (key, value) = torch.randn(1, 2, 3, 8).to(dtype), torch.randn(2, 1, 2, 5, 8).to(dtype)
    mask = torch.randn(1, 1, 3, 5, dtype=torch.promote_types(dtype, torch.float32))
    out, lse = flash(query, key, value, mask=mask, scale=0.3)
    assert out.shape == query.shape
    assert lse.shape == query.shape[:3]
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    scores = 0.3 * query.double() @ key.double().mT + mask.double()
    tolerance = {"rtol": 0, "atol": 0.02 if dtype == torch.bfloat16 else 1e-5}
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), **tolerance)
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ value.double(), **tolerance)


def test_flash_on_a_cpu_packs_rows_and_broadcasts_the_mask() -> None:
    """More queries than a model has, one per query head, and a mask with one row for all of them."""
    query, (key, value) = torch.randn(2, 1, 24, 8), torch.randn(2, 2, 1, 7, 8)
    mask = torch.zeros(2, 1, 1, 7)
    mask[0, ..., 4:] = float("-inf")
    out, lse = flash(query, key, value, mask=mask)
    want, want_lse = flash(query[:1], key[:1, :, :4], value[:1, :, :4])
    torch.testing.assert_close(out[:1], want)
    torch.testing.assert_close(lse[:1], want_lse)
