"""The private PyTorch APIs of `ops/*.py` and `ops/cpu`, each used in one file: if one moves, this says which."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

OPS = Path(__file__).parents[2] / "ops"
PRIVATE = re.compile(
    r"torch(?:\.[a-zA-Z]\w*)*\.(_[a-zA-Z]\w*)|from torch(?:\.\w+)*\.(_\w+)[\w.]* import|from torch\S* import (_\w+)"
)
USED = {"cpu/flash.py": {"_scaled_dot_product_flash_attention_for_cpu"}}


def private_names(source: str) -> set[str]:
    return {name for found in PRIVATE.findall(source) for name in found if name}


@pytest.mark.parametrize(
    "source, name",
    [
        ("torch._C._is_alias_of(a, b)", "_C"),
        ("torch.ops.aten._safe_softmax.default", "_safe_softmax"),
        ("from torch._subclasses.fake_tensor import FakeTensor", "_subclasses"),
        ("from torch.fx import _utils", "_utils"),
    ],
)
def test_what_counts_as_private(source: str, name: str) -> None:
    assert private_names(source) == {name}
    assert not private_names("torch.library.fallthrough_kernel; from torch.library import opcheck; x._spec")


def test_each_is_used_in_one_file() -> None:
    """Another one belongs here, with a test that fails when it moves."""
    files = sorted([*OPS.glob("*.py"), *OPS.glob("cpu/*.py")])
    found = {str(path.relative_to(OPS)): private_names(path.read_text()) for path in files}
    assert {path: names for path, names in found.items() if names} == USED


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
