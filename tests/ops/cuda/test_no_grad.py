"""Ops on CUDA refuse gradients at each call, also where the layout was planned for tensors without gradients."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs where no GPU is")
bf16 = torch.bfloat16
CALLS: dict[str, tuple[tuple[Any, ...], Callable[..., tuple[Any, ...]]]] = {
    "fused_linear": (((1, 16), (4, 16)), lambda x, weight: (x.to(bf16), [weight.to(bf16)])),
    "index_scores": (((1, 1, 2, 16), (1, 40, 16), (1, 1, 2)), lambda *x: x),
    "project_heads": (((1, 2, 1, 16), (2, 8, 16)), lambda x, weight: (x, weight.to(bf16))),
    "skinny_linear": (((2, 16), (4, 16)), lambda x, weight: (x.to(bf16), [weight.to(bf16)])),
    "top_picks": (((2, 50),), lambda scores: (scores, 3)),
}


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_refused_whatever_ran_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"tatten.ops.cuda.{name}")
    monkeypatch.setattr(module, "on_device_of", lambda x, run, *args: run(*args))
    shapes, arguments = CALLS[name]
    tensors = [torch.randn(shape) for shape in shapes]
    op = getattr(module, name)
    op(*arguments(*tensors))
    for tensor in tensors:
        tensor.requires_grad_()
        with pytest.raises(NotImplementedError, match="must not require grad"):
            op(*arguments(*tensors))
        with torch.no_grad():
            assert isinstance(op(*arguments(*tensors)), (Tensor, list))
        tensor.requires_grad_(False)
