"""Windows, soft caps and sinks of a call reach the op, whichever it becomes: each sink counts once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from slow import slow_after
from torch import Tensor
from variant_calls import compiled

from tatten.ops.reference import decode_attention_reference
from tatten.passes import cost

HQ, HKV, D = 4, 2, 16
RANK, NOPE, ROPE = 24, 12, 8
LENGTHS = 11, 4, 6  # of what all, two and one of 4 sequences read


@pytest.fixture(autouse=True)
def _pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cost.RATES, "cpu", cost.Rates(1.0, 0.0, 1.0))


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def spread(x: Tensor) -> Tensor:
    return x[:, None].expand(-1, 4 // x.shape[0], *x.shape[1:]).flatten(0, 1)


def join(*parts: Tensor) -> Tensor:
    return torch.cat([spread(x) for x in parts], dim=2)


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Also returns the sinks, so that the graph has them."""
    return F.scaled_dot_product_attention(q, keys, values, mask, scale=0.3, enable_gqa=True), sinks * 1


def repeated(q, key, value, mask, sinks):
    keys, values = (x[:, :, None].expand(-1, -1, HQ // HKV, -1, -1).flatten(1, 2) for x in (key, value))
    return attend(q, keys, values, mask, sinks)


def tree(q, k1, k2, k3, v1, v2, v3, mask, sinks):
    return attend(q, join(k1, k2, k3), join(v1, v2, v3), mask, sinks)


def selected(q, stored, k3, stored_values, v3, rows, mask, sinks):
    keys, values = (torch.cat((x.index_select(0, rows), y), dim=2) for x, y in ((stored, k3), (stored_values, v3)))
    return attend(q, keys, values, mask, sinks)


def expand(w: Tensor, latents: Tensor, ropes: Tensor) -> tuple[Tensor, Tensor]:
    kv = F.linear(latents, w).view(4, -1, HQ, NOPE + D).transpose(1, 2)
    own, values = kv.split((NOPE, D), dim=-1)
    return torch.cat((own, ropes.expand(-1, HQ, -1, -1)), dim=-1), values


def latents(q, w, c, rope, mask, sinks):
    return attend(q, *expand(w, c, rope), mask, sinks)


def shared_latents(q, w, c1, c2, c3, rope1, rope2, rope3, mask, sinks):
    return attend(q, *expand(w, join(c1, c2, c3), join(rope1, rope2, rope3)), mask, sinks)


def inputs(form: str, q_len: int) -> tuple[Any, list[Tensor], Tensor, Tensor]:
    """A function, what it takes before mask and sinks, and the keys and values that it attends to."""
    torch.manual_seed(0)
    q, w, rows = randn(4, HQ, q_len, D), randn(HQ * (NOPE + D), RANK), torch.tensor([2, 0, 2, 2])
    pairs = [[randn(n, HKV, length, D) for n, length in zip((1, 2, 4), LENGTHS, strict=True)] for _ in "kv"]
    match form:
        case "decode":
            key, value = (join(*x) for x in pairs)
            return repeated, [q, key, value], key, value
        case "tree":
            return tree, [q, *pairs[0], *pairs[1]], join(*pairs[0]), join(*pairs[1])
        case "rows":
            (stored, stored_values), (k3, v3) = (randn(3, HKV, 15, D) for _ in "kv"), (x[2] for x in pairs)
            key, value = (torch.cat((x[rows], y), dim=2) for x, y in ((stored, k3), (stored_values, v3)))
            return selected, [q, stored, k3, stored_values, v3, rows], key, value
    q = randn(4, HQ, q_len, NOPE + ROPE)
    c, rope = ([randn(n, 1, length, d) for n, length in zip((1, 2, 4), LENGTHS, strict=True)] for d in (RANK, ROPE))
    fn, given = (latents, [q, w, join(*c), join(*rope)]) if form == "latents" else (shared_latents, [q, w, *c, *rope])
    return fn, given, *expand(w, join(*c), join(*rope))


OPS = {
    "decode": "decode_attention",
    "tree": "bifurcated_attention",
    "rows": "bifurcated_attention",
    "latents": "latent_attention",
    "shared latents": "latent_attention",
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("variant", slow_after(2, [{"softcap": 1.5}, {}, {"softcap": 2.0}]), ids=str)
@pytest.mark.parametrize("form", OPS)
def test_result(form: str, variant: dict[str, Any], q_len: int) -> None:
    fn, given, key, value = inputs(form, q_len)
    mask = torch.rand(4, 1, q_len, sum(LENGTHS)) < 0.7
    mask[0] = False  # a sequence has nothing but its sinks
    sinks = torch.tensor([0.0, 2.0, -1.0, float("-inf")], dtype=torch.float64)
    (got, _), found = compiled(fn, *given, mask, sinks, **variant)
    assert [op for op, _ in found] == [OPS[form]]
    want, _ = decode_attention_reference(given[0], key, value, mask, scale=0.3, **variant, sinks=sinks)
    torch.testing.assert_close(got, want)
