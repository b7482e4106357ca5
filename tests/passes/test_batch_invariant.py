"""`options={"batch_invariant": True}`: what is rewritten to the op with that argument, what is left, and the bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from graphs import capture
from random_batches import Sequences
from torch import Tensor

import tatten  # noqa: F401  (the backend)
from tatten.passes import rewrite
from tatten.passes.findings import Declined, Rewritten


def sdpa(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask, enable_gqa=True)


def shared(query: Tensor, prefix: Tensor, key: Tensor) -> Tensor:
    keys = torch.cat((prefix.expand(query.shape[0], -1, -1, -1), key), dim=2)
    return F.scaled_dot_product_attention(query, keys, keys, enable_gqa=True)


def capped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = 5.0 * torch.tanh(query @ key.transpose(2, 3) * 0.25 / 5.0)
    return scores.softmax(-1) @ value


def invariant_calls(gm: torch.fx.GraphModule) -> list[object]:
    op = torch.ops.tatten.decode_attention.default
    return [node.kwargs.get("batch_invariant") for node in gm.graph.find_nodes(op="call_function", target=op)]


@pytest.mark.parametrize(
    "fn, shapes",
    [
        (sdpa, [(2, 4, 1, 16), (2, 2, 50, 16), (2, 2, 50, 16), (2, 1, 1, 50)]),
        (sdpa, [(2, 2, 1, 16), (2, 2, 50, 16), (2, 2, 50, 16)]),  # SDPA reads each key once, but isn't invariant
        (shared, [(3, 4, 1, 16), (1, 2, 500, 16), (3, 2, 50, 16)]),
    ],
    ids=["gqa", "no_gain", "shared"],
)
def test_is_rewritten_whether_it_pays_or_not(fn, shapes) -> None:
    inputs = [torch.randn(shape) for shape in shapes]
    with torch.no_grad():
        gm = capture(fn, *inputs)
        (finding,) = rewrite(gm, batch_invariant=True).findings
        assert isinstance(finding, Rewritten)
        assert invariant_calls(gm) == [True]
        step = torch.compile(fn, backend="tatten", options={"batch_invariant": True, "inner": "eager"})
        torch.testing.assert_close(step(*inputs), fn(*inputs))


def test_a_soft_cap_on_a_cpu_is_left() -> None:
    with torch.no_grad():
        gm = capture(capped, *(torch.randn(2, 2, n, 16) for n in (1, 50, 50)))
        (finding,) = rewrite(gm, batch_invariant=True).findings
    assert isinstance(finding, Declined)
    assert finding.decline.reason.value == "batch_invariant"
    assert "soft cap of 5.0 on a CPU" in finding.decline.detail


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_step_has_the_same_bits_in_every_batch(inner: str) -> None:
    torch._dynamo.reset()
    step = torch.compile(sdpa, backend="tatten", options={"batch_invariant": True, "inner": inner})
    call = Sequences(mask="holes", q_len=2, longest=400, head_dim=23)
    with torch.no_grad():
        want = None
        for alone, together, at in call.batches(20 if inner == "eager" else 5):
            want = step(**alone) if want is None else want
            assert torch.equal(step(**together)[at], want[0])
