"""Sizes that only a run knows: nothing asks if they are 0 or 1, neither the passes nor the ops when they are traced."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked

import tatten
from tatten.passes import Declined, Rewritten
from tatten.passes.reasons import Reason

pytestmark = pytest.mark.drawn(3)

D = 16


def written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return ((q @ k.mT) * 0.25).masked_fill(~mask, -torch.inf).softmax(-1) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask)


def tiled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return sdpa(q, *(x[:, :2].repeat(1, 2, 1, 1) for x in (k, v)), mask)


def selected(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    rows = torch.arange(q.shape[0]) // 2
    return sdpa(q, *(torch.cat((x[rows], x), dim=2) for x in (k, v)), torch.cat((mask, mask), dim=-1))


def dequantised(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return sdpa(q, *((x * 40).to(torch.int8).to(q.dtype) * 0.025 for x in (k, v)), mask)


def unmasked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, *(x[:, :2].repeat_interleave(2, dim=1) for x in (k, v)))


def tensors(batch: int, length: int) -> list[Tensor]:
    torch.manual_seed(batch + length)
    mask = torch.rand(batch, 1, 1, length) < 0.7
    mask[..., 0] = True
    return [torch.randn(batch, 4, 1, D), *(torch.randn(batch, 4, length, D) for _ in "kv"), mask]


def marked(dim: str, batch: int, length: int) -> list[Tensor]:
    """Tensors whose batch or length of keys is unbacked."""
    args = tensors(batch, length)
    batches, lengths = [(x, 0) for x in args], [(args[1], 2), (args[2], 2), (args[3], 3)]
    for x, i in batches if dim == "batch" else lengths:
        mark_unbacked(x, i, shape_id=dim)
    return args


def run(fn, dim: str, sizes: list[tuple[int, int]]) -> Rewritten | Declined:
    """Compile once for all sizes, and return the finding. Skips what this PyTorch's Dynamo can't trace."""
    args = marked(dim, *sizes[0])
    torch._dynamo.reset()
    try:
        with torch.no_grad():
            torch.compile(fn, backend="eager", fullgraph=True)(*args)
    except torch._dynamo.exc.UserError as error:  # 2.11, at SDPA with a mask
        pytest.skip(f"Dynamo: {str(error).splitlines()[0]}")
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="tatten", options={"inner": "aot_eager"}, fullgraph=True)
    with torch.no_grad(), tatten.recording() as report:
        for size in sizes:
            args = marked(dim, *size)
            torch.testing.assert_close(compiled(*args), fn(*args))
    (graph,) = report.graphs
    (finding,) = graph.findings
    return finding


@pytest.mark.parametrize("fn", [sdpa, tiled, selected, dequantised, written_out], ids=lambda x: x.__name__)
def test_a_masked_batch_that_may_be_one(fn) -> None:
    finding = run(fn, "batch", [(2, 32), (3, 32), (1, 32)])
    assert isinstance(finding, Declined)
    assert finding.decline.reason is Reason.UNBACKED
    assert "have a size u" in finding.decline.detail


def test_a_masked_length_that_may_be_one() -> None:
    finding = run(written_out, "length", [(2, 32), (2, 40), (2, 1)])
    assert isinstance(finding, Declined)
    assert finding.decline.reason is Reason.UNBACKED


def test_nothing_is_asked_without_a_mask() -> None:
    assert isinstance(run(unmasked, "batch", [(2, 32), (3, 32), (1, 32)]), Rewritten)


@pytest.mark.parametrize("fn", [sdpa, tiled, selected, dequantised, written_out], ids=lambda x: x.__name__)
def test_a_batch_of_at_least_two_is_rewritten(fn) -> None:
    """The help of the reason."""

    def checked(*args: Tensor) -> Tensor:
        torch._check(args[0].shape[0] >= 2)
        return fn(*args)

    assert isinstance(run(checked, "batch", [(2, 32), (3, 32)]), Rewritten)
