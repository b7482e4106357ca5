"""The Triton kernels under the interpreter, on shapes small enough for it. conftest.py turns it on where no GPU is."""

from __future__ import annotations

import os

import pytest
import torch
from attention_cases import Case, assert_state

from tatten.ops.packing import fold_sequences, pack_heads, unfold_sequences
from tatten.ops.states import merge, merge_parts

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs where no GPU is")

MASKS = ["none", "causal", "broadcast", "2d", "keys", "per_head", "empty_rows", "all_false", "one_key"]
MASKS += ["additive", "additive_f32", "finfo_min", "alibi", "one_column"]


def run(case: Case, n_splits: int | None) -> None:
    from tatten.ops.triton_decode import decode_attention_triton

    inputs = case.inputs(poison=case.mask != "finfo_min")
    scale = inputs["query"].shape[3] ** -0.5 if case.scale is None else case.scale
    out, lse = decode_attention_triton(**{**inputs, "scale": scale}, n_splits=n_splits)
    assert_state(out, lse, inputs)


@pytest.mark.parametrize("n_splits", [1, 3])
@pytest.mark.parametrize("lens", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str, lens: bool, n_splits: int) -> None:
    run(Case(mask=mask, q_len=2, kv_len=70, head_dim=16, lens=lens), n_splits)


@pytest.mark.parametrize(
    "case",
    [
        Case(dtype=torch.bfloat16, head_dim=16, mask="causal"),
        Case(dtype=torch.float16, head_dim=24, mask="causal", value_dim=40),
        Case(q_heads=17, kv_heads=1, q_len=5, head_dim=16, kv_len=40),
        Case(kv_len=0, head_dim=16),
        Case(kv_len=1, head_dim=16, scale=0.5),
        Case(batch=1, kv_heads=4, head_dim=80, kv_len=35),
    ],
    ids=str,
)
@pytest.mark.parametrize("n_splits", [None, 2, 7])
def test_shapes(case: Case, n_splits: int | None) -> None:
    run(case, n_splits)


def test_holes_may_hold_nan() -> None:
    """What no query attends to is not read even in the middle of a block."""
    from tatten.ops.triton_decode import decode_attention_triton

    inputs = Case(mask="2d", q_len=1, kv_len=50, head_dim=16).inputs(poison=False)
    mask = torch.rand(2, 1, 1, 50) > 0.4
    inputs["attn_mask"] = mask
    for name in ("key", "value"):
        inputs[name] = inputs[name].masked_fill(~mask.transpose(2, 3), float("nan"))
    assert_state(*decode_attention_triton(**{**inputs, "scale": 0.25}, n_splits=2), inputs)


@pytest.mark.parametrize("n_splits", [1, 3])
def test_nan_in_keys_that_count_comes_out(n_splits: int) -> None:
    from tatten.ops.triton_decode import decode_attention_triton

    inputs = Case(kv_len=100, head_dim=16).inputs()
    inputs["key"][0, 1, 7] = float("nan")
    out, lse = decode_attention_triton(**{**inputs, "scale": 0.25}, n_splits=n_splits)
    assert out[0, 2:].isnan().all()
    assert lse[0, 2:].isnan().all()
    assert out[0, :2].isfinite().all()


@pytest.mark.parametrize("n_states", [1, 2, 9, 20])
@pytest.mark.parametrize("dim", [16, 24])
def test_merge(n_states: int, dim: int) -> None:
    from tatten.ops.triton_merge import merge_states_triton

    out = torch.randn(n_states, 2, 3, dim)
    lse = torch.randn(n_states, 2, 3) * 10
    lse[:, 0, 0] = float("-inf")
    for i, empty in enumerate((float("-inf"), float("inf"), float("nan"))):
        lse[i % n_states, 1, i] = empty
        out[i % n_states, 1, i] = float("nan")
    got, want = merge_states_triton(out, lse), merge(out, lse)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("rows", [(1, 6), (6, 6), (2, 6, 1), (1,) * 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_merge_parts(rows: tuple[int, ...], q_len: int, dtype: torch.dtype) -> None:
    """States of segments with other numbers of rows and kv heads, laid out as attention leaves them, some empty."""
    from tatten.ops.triton_merge import merge_parts_triton

    batch, heads, dim = 6, 4, 24
    outs, lses, wanted = [], [], []
    for i, n in enumerate(rows):
        kv_heads = (2, 4, 1, 2)[i]
        out = torch.randn(n, heads // kv_heads * batch // n * q_len, kv_heads, dim).transpose(1, 2).to(dtype)
        lse = torch.randn(out.shape[:3]) * 5
        out[0, 0, 0], lse[0, 0, 0] = 0, float("-inf")
        if i == 1:
            out[0, -1, -1] = lse[0, -1, -1] = float("nan")  # of NaN in keys that count
        outs.append(out)
        lses.append(lse)
        wanted.append(
            [unfold_sequences(x.reshape(n, heads, batch // n * q_len, *x.shape[3:]), batch) for x in (out, lse)]
        )
    got = merge_parts_triton(outs, lses, (batch, heads, q_len, dim))
    want = merge_parts(*zip(*wanted, strict=True))
    assert got[0].dtype == dtype
    assert got[0].is_contiguous()
    assert got[0].isnan().any()
    torch.testing.assert_close(got[0], want[0], equal_nan=True)
    torch.testing.assert_close(got[1], want[1], equal_nan=True)


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize(("rows", "kv_heads"), [(1, 2), (2, 1), (6, 4), (3, 4)])
def test_pack_queries(rows: int, kv_heads: int, q_len: int) -> None:
    from tatten.ops.triton_pack import pack_queries_triton

    query = torch.randn(6, q_len, 4, 48).transpose(1, 2)[..., ::2]
    want = pack_heads(fold_sequences(query, rows), kv_heads)
    assert torch.equal(pack_queries_triton(query, rows, kv_heads), want)
