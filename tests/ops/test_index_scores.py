"""Scores of an indexer's keys on a CPU, beside float64; and bad input, which all devices refuse in the same words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fuzz import settings
from hypothesis import given
from hypothesis import strategies as st
from index_calls import INF, NAN, IndexCall, assert_close_to_float64, draw_index_call
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import tatten
from tatten.ops.cpu import index_scores as on_cpu
from tatten.ops.cuda.index_scores import plan_index_scores

op = torch.ops.tatten.index_scores.default


@pytest.mark.parametrize("tile_bytes", [1, 20000, on_cpu.TILE_BYTES])
def test_random_calls(tile_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cpu, "TILE_BYTES", tile_bytes)

    @settings(30)
    @given(st.composite(lambda draw: draw_index_call(lambda options: draw(st.sampled_from(options))))())
    def test(call: IndexCall) -> None:
        inputs = call.make()
        assert_close_to_float64(tatten.index_scores(**inputs), inputs)

    test()


def test_scores_by_hand() -> None:
    query = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])
    key = torch.tensor([[[3.0, -1.0], [-2.0, 5.0], [4.0, 4.0]]])
    got = tatten.index_scores(query, key, torch.tensor([[[1.0, -10.0]]]), scale=2.0)
    assert got.tolist() == [[[6.0, -100.0, -72.0]]]


def test_float64() -> None:
    inputs = IndexCall(q_len=3, heads=5, dim=20, dtype=torch.float64, weights_dtype=torch.float64, mask="bool").make()
    assert_close_to_float64(tatten.index_scores(**inputs), inputs)


@pytest.mark.parametrize("shape", [(0, 1, 3, 8, 5), (2, 0, 3, 8, 5), (2, 1, 3, 8, 0)], ids=str)
def test_no_sequences_queries_or_keys(shape: tuple[int, ...]) -> None:
    batch, q_len, heads, dim, kv_len = shape
    args = torch.randn(batch, q_len, heads, dim), torch.randn(batch, kv_len, dim), torch.randn(batch, q_len, heads)
    for mask in (None, torch.ones(batch, q_len, kv_len, dtype=torch.bool)):
        for got in (
            tatten.index_scores(*args, attn_mask=mask),
            plan_index_scores(*args, mask, None, 1.0)(*args, mask, None),
        ):
            assert (got.shape, got.dtype) == ((batch, q_len, kv_len), torch.float32)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_key_that_is_not_finite_changes_its_own_score_alone(bad: float) -> None:
    inputs = IndexCall(heads=3, weights_dtype=torch.float32).make()
    inputs["weights"] = inputs["weights"].abs()
    inputs["query"] = inputs["query"].abs()
    want = tatten.index_scores(**inputs)
    inputs["key"][1, 7, 3] = bad
    got = tatten.index_scores(**inputs)
    assert torch.equal(got[1, 0, 7].isnan(), torch.tensor(bad != bad))
    assert bad != bad or got[1, 0, 7] == bad
    got[1, 0, 7] = want[1, 0, 7]
    torch.testing.assert_close(got, want)


def test_a_mask_of_one_query_leaves_the_key_to_the_others() -> None:
    inputs = IndexCall(q_len=2, mask="bool").make()
    inputs["attn_mask"] = torch.ones(2, 2, 300, dtype=torch.bool)
    inputs["attn_mask"][0, 1, 40:] = False
    got = tatten.index_scores(**inputs)
    assert (got[0, 1, 40:] == -INF).all()
    assert int(got.isinf().sum()) == 260


def test_a_finite_floor_is_added() -> None:
    inputs = IndexCall(kv_len=20).make()
    floor = torch.finfo(torch.bfloat16).min
    inputs["attn_mask"] = torch.full((1, 1, 20), floor, dtype=torch.bfloat16)
    got = tatten.index_scores(**inputs)
    assert (got == floor).all()


Q, K, W = torch.randn(2, 3, 4, 8), torch.randn(2, 9, 8), torch.randn(2, 3, 4)
BYTES = K.to(torch.int8)
BAD: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    ({"query": Q.int()}, TypeError, ["`query`", "float16, bfloat16, float32 or float64", "torch.int32"]),
    ({"query": Q[0]}, ValueError, ["`query`", "[batch, q_length, index_heads, dim]", "(3, 4, 8)"]),
    ({"query": Q[:, :, :0], "weights": W[..., :0]}, ValueError, ["`query`", "at least one head", "(2, 3, 0, 8)"]),
    ({"query": Q[..., :0], "key": K[..., :0]}, ValueError, ["`query`", "one dim", "(2, 3, 4, 0)"]),
    ({"key": K.half()}, TypeError, ["`key`", "torch.float32", "torch.int8", "torch.float16"]),
    ({"key": K[:1]}, ValueError, ["`key`", "[2, kv_length, 8]", "(1, 9, 8)"]),
    ({"key": K[..., :7]}, ValueError, ["`key`", "[2, kv_length, 8]", "(2, 9, 7)"]),
    ({"key": K[:, None]}, ValueError, ["`key`", "[2, kv_length, 8]", "(2, 1, 9, 8)"]),
    ({"weights": W.double()}, TypeError, ["`weights`", "torch.bfloat16 or torch.float32", "torch.float64"]),
    ({"weights": W[:, :1]}, ValueError, ["`weights`", "(2, 3, 4)", "(2, 1, 4)"]),
    ({"weights": W[..., None]}, ValueError, ["`weights`", "(2, 3, 4)", "(2, 3, 4, 1)"]),
    ({"attn_mask": torch.zeros(1, 1, 9).int()}, TypeError, ["`attn_mask`", "torch.bool", "torch.int32"]),
    ({"attn_mask": torch.zeros(9)}, ValueError, ["`attn_mask`", "[1 or 2, 1 or 3, 9]", "(9,)"]),
    ({"attn_mask": torch.zeros(2, 1, 3, 9)}, ValueError, ["`attn_mask`", "[1 or 2, 1 or 3, 9]", "(2, 1, 3, 9)"]),
    ({"attn_mask": torch.zeros(2, 3, 1)}, ValueError, ["`attn_mask`", "[1 or 2, 1 or 3, 9]", "(2, 3, 1)"]),
    ({"attn_mask": torch.zeros(2, 2, 9)}, ValueError, ["`attn_mask`", "[1 or 2, 1 or 3, 9]", "(2, 2, 9)"]),
    ({"key_scale": torch.ones(2, 9)}, TypeError, ["`key_scale`", "None unless", "torch.float32"]),
    ({"key": BYTES, "key_scale": torch.ones(2, 9).half()}, TypeError, ["`key_scale`", "torch.float32", "float16"]),
    ({"key": BYTES, "key_scale": torch.ones(2, 8)}, ValueError, ["`key_scale`", "(2, 9) or (2, 9, 1)", "(2, 8)"]),
    ({"key": BYTES, "key_scale": torch.ones(())}, ValueError, ["`key_scale`", "(2, 9) or (2, 9, 1)", "got ()"]),
    ({"key": K.clone().requires_grad_()}, NotImplementedError, ["no backward", "`key`"]),
    ({"weights": W.to("meta")}, ValueError, ["`weights`", "device of `query`, cpu", "meta"]),
]


@pytest.mark.parametrize("bad, error, says", BAD, ids=lambda x: ",".join(x) if isinstance(x, dict) else "")
def test_bad_input(bad: dict[str, Any], error: type[Exception], says: list[str]) -> None:
    call = {"query": Q, "key": K, "weights": W, "attn_mask": None, "key_scale": None, **bad}

    def plan(**given: Tensor) -> object:
        return plan_index_scores(*given.values(), 1.0)

    def fake(**given: Tensor) -> object:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return op(**given)

    on_one_device = all(x is None or x.device == Q.device for x in call.values())
    for run in (tatten.index_scores, plan, *([op, fake] if on_one_device else [])):
        with pytest.raises(error) as raised:
            run(**call)
        for part in says:
            assert part in str(raised.value)


def test_arguments_that_are_no_tensors() -> None:
    with pytest.raises(TypeError, match="`weights` must be a Tensor, got float"):
        tatten.index_scores(Q, K, 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`scale` must be passed by keyword"):
        tatten.index_scores(Q, K, W, 1.0)  # type: ignore[misc]


def test_autocast_rounds_nothing() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        got = tatten.index_scores(Q, K, W)
    assert torch.equal(got, tatten.index_scores(Q, K, W))


@pytest.mark.parametrize("mask", [None, "bool", "bias"])
def test_opcheck(mask: str | None) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        inputs = IndexCall(
            q_len=2, heads=3, dim=8, kv_len=20, dtype=dtype, key_dtype=torch.int8, scaled=True, mask=mask
        )
        call = inputs.make()
        opcheck(op, tuple(call.pop(name) for name in ("query", "key", "weights")), call)


class Indexer(torch.nn.Module):
    def forward(
        self, query: Tensor, key: Tensor, weights: Tensor, mask: Tensor | None, factors: Tensor | None
    ) -> Tensor:
        return tatten.index_scores(query, key, weights, scale=0.3, attn_mask=mask, key_scale=factors)


@pytest.mark.parametrize("mask", [None, "bool", "bias"])
def test_export(mask: str | None) -> None:
    """A decomposed program gives the op's scores for any number of keys."""
    call = IndexCall(q_len=2, heads=3, dim=20, key_dtype=torch.int8, scaled=True, mask=mask).make()
    args = tuple(call.get(name) for name in ("query", "key", "weights", "attn_mask", "key_scale"))
    keys = torch.export.Dim("keys", min=2)
    dynamic = None, {1: keys}, None, None if mask is None else {2: keys}, {1: keys}
    program = torch.export.export(Indexer(), args, dynamic_shapes=dynamic)
    assert op in [node.target for node in program.graph.nodes]
    program = program.run_decompositions(tatten.decompositions())
    assert not [node for node in program.graph.nodes if "tatten" in str(node.target)]
    for kv_len in (300, 77):
        other = IndexCall(q_len=2, heads=3, dim=20, key_dtype=torch.int8, scaled=True, mask=mask, kv_len=kv_len, seed=1)
        call = {**other.make(), "scale": 0.3}
        args = tuple(call.get(name) for name in ("query", "key", "weights", "attn_mask", "key_scale"))
        assert_close_to_float64(program.module()(*args), call)


def test_compiled() -> None:
    call = IndexCall(q_len=2, mask="prefix").make()
    torch._dynamo.reset()
    compiled = torch.compile(tatten.index_scores, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(**call), tatten.index_scores(**call))
