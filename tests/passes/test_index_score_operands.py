"""The operands that an indexer's scores are read from: before casts and copies, and without gradients."""

from __future__ import annotations

import index_forms
import pytest
import torch
from graphs import capture, run_rewritten
from index_forms import B, L, S, exact, inputs
from index_graphs import assert_scores, ops, tensor_of

from tatten.passes import Rewritten, rewrite


def test_keys_of_two_dtypes_are_read_in_the_wider_one() -> None:
    """The queries are in float32 already, so that the keys' copy stays."""
    query, key, weights, mask = inputs()
    query = query.float() / 3
    _, gm, out = run_rewritten(index_forms.deepseek_v32, query, key, weights, mask)
    (op,) = ops(gm)
    assert tensor_of(op.args[1]).dtype == torch.float32
    assert_scores(out, exact(query, key, weights, mask))


def test_keys_that_something_else_reads_widened_stay() -> None:
    def fn(q, k, w, m):
        wide = k.mT.float()
        scores = torch.matmul(q.float(), wide[:, None]).relu()
        return index_forms.left(index_forms.weighted(w, scores), m), wide.sum()

    args = inputs()
    _, gm, (out, total) = run_rewritten(fn, *args)
    (op,) = ops(gm)
    assert op.args[1].op == "placeholder"
    assert total == args[1].mT.float().sum()
    assert_scores(out, exact(*args, scale=1))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_queries_and_weights_in_8_bits_are_read_from_wider_copies(dtype: torch.dtype) -> None:
    """Keys, too, in the dtype that the op doesn't take."""
    query, key, weights, mask = inputs()
    args = query.to(dtype), key.to(dtype), weights.to(dtype)
    _, gm, out = run_rewritten(index_forms.deepseek_v32, *args, mask)
    (op,) = ops(gm)
    of_keys = torch.float8_e4m3fn if dtype == torch.float8_e4m3fn else torch.float32
    assert [tensor_of(x).dtype for x in op.args] == [torch.float32, of_keys, torch.float32]
    assert_scores(out, exact(*args, mask))


@pytest.mark.parametrize("learned", [False, True])
def test_mask_outside_no_grad(learned: bool) -> None:
    """Where the op stands, gradients are enabled. That of a bias is kept."""

    def fn(q, k, w, bias):
        with torch.no_grad():
            scores = index_forms.weighted(w, torch.relu(index_forms.products(q, k)))
        return scores + bias

    (query, key, weights, _), bias = inputs(torch.float32), torch.randn(B, L, S).requires_grad_(learned)
    args = query.requires_grad_(), key, weights, bias
    gm = capture(fn, *args, grad=True)
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Rewritten)
    (op,) = ops(gm)
    assert ("attn_mask" in op.kwargs) == (not learned)
    (out,) = gm(*args)
    assert out.requires_grad == learned
    torch.testing.assert_close(out, fn(*args), rtol=1e-5, atol=2e-5)
