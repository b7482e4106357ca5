"""`options={"batch_invariant": True}`: what is rewritten to the op with that argument, what is left, and the bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from graphs import capture
from random_batches import Sequences, SharedSequences
from torch import Tensor

import tatten  # noqa: F401  (the backend)
from tatten.passes import cost, rewrite
from tatten.passes.findings import Declined, Rewritten

pytestmark = pytest.mark.drawn(4)


def sdpa(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask, enable_gqa=True)


def shared(query: Tensor, prefix: Tensor, key: Tensor) -> Tensor:
    keys = torch.cat((prefix.expand(query.shape[0], -1, -1, -1), key), dim=2)
    return F.scaled_dot_product_attention(query, keys, keys, enable_gqa=True)


def all_shared(query: Tensor, prefix: Tensor) -> Tensor:
    keys = prefix.expand(query.shape[0], -1, -1, -1)
    return F.scaled_dot_product_attention(query, keys, keys, enable_gqa=True)


def chosen(
    query: Tensor, keys: list[Tensor], values: list[Tensor], masks: list[Tensor], rows: list[Tensor | None]
) -> Tensor:
    """Each sequence reads a row of the first segment."""
    key, value = (torch.cat((x[0].index_select(0, rows[0]), x[1]), dim=2) for x in (keys, values))
    return F.scaled_dot_product_attention(query, key, value, torch.cat(masks, dim=3), enable_gqa=True)


def capped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = 5.0 * torch.tanh(query @ key.transpose(2, 3) * 0.25 / 5.0)
    return scores.softmax(-1) @ value


H, RANK, NOPE, ROPE, V = 4, 24, 12, 8, 16


def latents(query: Tensor, weight: Tensor, latent: Tensor, rope: Tensor, mask: Tensor) -> Tensor:
    """Keys and values are expanded from latents, of which sequences may share some."""
    latent, rope = (x.expand(query.shape[0], -1, -1, -1) for x in (latent, rope))
    kv = F.linear(latent, weight).view(query.shape[0], -1, H, NOPE + V).transpose(1, 2)
    own, values = kv.split((NOPE, V), dim=-1)
    keys = torch.cat((own, rope.expand(-1, H, -1, -1)), dim=-1)
    return F.scaled_dot_product_attention(query, keys, values, mask, scale=0.3)


def of_latents(batch: int, rows: int, length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = (batch, H, 1, NOPE + ROPE), (H * (NOPE + V), RANK), (rows, 1, length, RANK), (rows, 1, length, ROPE)
    used = torch.arange(length) < torch.randint(1, length + 1, (batch, 1, 1, 1))
    return [*(torch.randn(shape).to(dtype) for shape in shapes), used]


def invariant_calls(gm: torch.fx.GraphModule) -> list[tuple[str, object]]:
    ops = [torch.ops.tatten.decode_attention.default, torch.ops.tatten.bifurcated_attention.default]
    found = [node for op in ops for node in gm.graph.find_nodes(op="call_function", target=op)]
    return [(node.target.name().removeprefix("tatten::"), node.kwargs.get("batch_invariant")) for node in found]


@pytest.mark.parametrize(
    "fn, shapes, op",
    [
        (sdpa, [(2, 4, 1, 16), (2, 2, 50, 16), (2, 2, 50, 16), (2, 1, 1, 50)], "decode"),
        # SDPA reads each key once, but isn't invariant
        (sdpa, [(2, 2, 1, 16), (2, 2, 50, 16), (2, 2, 50, 16)], "decode"),
        (shared, [(3, 4, 1, 16), (1, 2, 50, 16), (3, 2, 50, 16)], "bifurcated"),
        (shared, [(1, 4, 1, 16), (1, 2, 50, 16), (1, 2, 50, 16)], "bifurcated"),
        (all_shared, [(3, 4, 1, 16), (1, 2, 500, 16)], "decode"),
        (all_shared, [(1, 4, 1, 16), (1, 2, 500, 16)], "decode"),
    ],
    ids=["gqa", "no_gain", "shared", "shared_alone", "all_shared", "all_shared_alone"],
)
def test_is_rewritten_whether_it_pays_or_not(fn, shapes, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs depend on the batch."""
    monkeypatch.setitem(cost.RATES, "cpu", cost.Rates(bytes_per_us=1.0, segment_us=1e9))
    inputs = [torch.randn(shape) for shape in shapes]
    with torch.no_grad():
        gm = capture(fn, *inputs)
        (finding,) = rewrite(gm, batch_invariant=True).findings
        assert isinstance(finding, Rewritten)
        assert invariant_calls(gm) == [(f"{op}_attention", True)]
        step = torch.compile(fn, backend="tatten", options={"batch_invariant": True, "inner": "eager"})
        torch.testing.assert_close(step(*inputs), fn(*inputs))


@pytest.mark.parametrize("rows", [3, 1])
def test_latents_are_attended_to_whether_it_pays_or_not(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs depend on the batch, and so does the choice of sequences that share latents."""
    monkeypatch.setitem(cost.RATES, "cpu", cost.Rates(bytes_per_us=1.0, segment_us=1e9))
    inputs = of_latents(3, rows, 60)
    with torch.no_grad():
        gm = capture(latents, *inputs)
        (finding,) = rewrite(gm, batch_invariant=True).findings
        assert isinstance(finding, Rewritten)
        op = torch.ops.tatten.latent_attention.default
        (call,) = gm.graph.find_nodes(op="call_function", target=op)
        assert call.kwargs["batch_invariant"]
        step = torch.compile(latents, backend="tatten", options={"batch_invariant": True, "inner": "eager"})
        torch.testing.assert_close(step(*inputs), latents(*inputs))


def test_a_compiled_step_over_latents_has_the_same_bits_beside_any_others() -> None:
    """In batches of one size: products with the weights are those of PyTorch."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    step = torch.compile(latents, backend="tatten", options={"batch_invariant": True, "inner": "eager"})
    first = of_latents(6, 6, 700, torch.bfloat16)
    with torch.no_grad():
        want = step(*first)
        for _ in range(20):
            others = of_latents(6, 6, 700, torch.bfloat16)
            others[1] = first[1]
            for x, y in zip(others, first, strict=True):
                x[4] = y[4]
            assert torch.equal(step(*others)[4], want[4])


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


def test_the_block_list_of_shared_keys_has_every_block() -> None:
    """The place of each block that some sequence attends to depends on all sequences."""
    call = SharedSequences(Sequences(mask="holes", longest=40), shared=70, rows=True, holes=True)
    (_, together, _), *_ = call.batches(1)
    with torch.no_grad():
        gm = capture(chosen, *as_arguments(together))
        rewrite(gm, batch_invariant=True)
    op = torch.ops.tatten.block_mask.default
    found = gm.graph.find_nodes(op="call_function", target=op)
    assert [node.kwargs.get("every_block") for node in found] == [True, None]


def as_arguments(call: dict) -> list:
    return [call[name] for name in ("query", "keys", "values", "attn_masks", "rows")]


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_so_has_a_step_over_shared_keys(inner: str) -> None:
    torch._dynamo.reset()
    step = torch.compile(chosen, backend="tatten", options={"batch_invariant": True, "inner": inner})
    call = SharedSequences(Sequences(mask="holes", q_len=2, longest=200), shared=700, rows=True, holes=True)
    with torch.no_grad():
        want = None
        for alone, together, at in call.batches(10 if inner == "eager" else 4, most=6):
            want = step(*as_arguments(alone)) if want is None else want
            assert torch.equal(step(*as_arguments(together))[at], want[0])


def concatenated(query: Tensor, prefix: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return the concatenated keys, too, as a cache does."""
    keys = torch.cat((prefix.expand(query.shape[0], -1, -1, -1), key), dim=2)
    return F.scaled_dot_product_attention(query, keys, keys, enable_gqa=True), keys


def shared_last(query: Tensor, prefix: Tensor, key: Tensor) -> tuple[Tensor]:
    keys = torch.cat((key, prefix.expand(query.shape[0], -1, -1, -1)), dim=2)
    return (F.scaled_dot_product_attention(query, keys, keys, enable_gqa=True),)


def unlike(query: Tensor, prefix: Tensor, key: Tensor) -> tuple[Tensor]:
    """Keys show that they are shared, and values don't."""
    prefixes = prefix.expand(query.shape[0], -1, -1, -1)
    keys, values = torch.cat((prefixes, key), dim=2), torch.cat((prefixes * 2.0, key), dim=2)
    return (F.scaled_dot_product_attention(query, keys, values, enable_gqa=True),)


@pytest.mark.parametrize("fn", [concatenated, shared_last, unlike])
def test_a_step_with_one_sequence_cuts_its_keys_as_one_with_many(fn) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    step = torch.compile(fn, backend="tatten", options={"batch_invariant": True, "inner": "eager"})
    query, prefix, key = torch.randn(8, 4, 1, 64), torch.randn(1, 2, 400, 64), torch.randn(8, 2, 300, 64)
    with torch.no_grad():
        together = step(query, prefix, key)[0]
        for i in range(8):
            assert torch.equal(step(query[i : i + 1], prefix, key[i : i + 1])[0][0], together[i])
