"""Bad arguments of `paged_attention`: the error names the argument and both values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tatten

B, T, HQ, HKV, PAGES, PAGE, D = 2, 6, 4, 2, 7, 4, 8
QUERY, POOL = torch.randn(T, HQ, D), torch.randn(PAGES, PAGE, HKV, D)
TABLE, STARTS = torch.zeros(B, 3, dtype=torch.int32), torch.tensor([0, 1, 5], dtype=torch.int32)
LENS = torch.tensor([12, 5])

BAD: list[tuple[str, dict[str, Any], type[Exception], list[str]]] = [
    ("rank", {"query": QUERY[None]}, ValueError, ["`query`", "[tokens, q_heads, head_dim]", "(1, 6, 4, 8)"]),
    ("no tokens", {"query": QUERY[:0]}, ValueError, ["`query`", "no dimension of size 0", "(0, 4, 8)"]),
    ("integers", {"query": QUERY.long()}, TypeError, ["`query`", "float16", "torch.int64"]),
    ("starts' dtype", {"cu_seqlens_q": STARTS.long()}, TypeError, ["`cu_seqlens_q`", "int32", "torch.int64"]),
    ("starts' shape", {"cu_seqlens_q": STARTS[:2]}, ValueError, ["`cu_seqlens_q`", "(3,)", "2 sequences", "(2,)"]),
    ("starts decrease", {"cu_seqlens_q": STARTS[[0, 2, 1]]}, ValueError, ["`cu_seqlens_q`", "decrease", "5 before 1"]),
    ("first start", {"cu_seqlens_q": STARTS + 1}, ValueError, ["`cu_seqlens_q`", "begin with 0", "got 1"]),
    (
        "last start",
        {"cu_seqlens_q": 2 * STARTS},
        ValueError,
        ["`cu_seqlens_q`", "at most `query`'s 6 tokens", "got 10"],
    ),
    ("table's dtype", {"block_table": TABLE.long()}, TypeError, ["`block_table`", "int32", "torch.int64"]),
    ("table's rank", {"block_table": TABLE[0]}, ValueError, ["`block_table`", "[batch, max_pages]", "(3,)"]),
    ("no sequences", {"block_table": TABLE[:0]}, ValueError, ["`block_table`", "at least one sequence", "(0, 3)"]),
    ("lengths' shape", {"kv_lens": LENS[:1]}, ValueError, ["`kv_lens`", "(2,)", "(1,)"]),
    ("lengths' dtype", {"kv_lens": LENS.float()}, TypeError, ["`kv_lens`", "int32 or int64", "torch.float32"]),
    ("too long", {"kv_lens": LENS + 1}, ValueError, ["`kv_lens`", "12", "4 keys", "3 pages", "got 13"]),
    ("negative", {"kv_lens": LENS - 6}, ValueError, ["`kv_lens`", "between 0 and 12", "got -1"]),
    ("page of 3", {"key": POOL[:, :3], "value": POOL[:, :3]}, ValueError, ["`key`", "power of two", "256", "got 3"]),
    ("no pages", {"key": POOL[:0], "value": POOL[:0]}, ValueError, ["`key`", "at least one page", "(0, 4, 2, 8)"]),
    ("head_dim", {"key": POOL[..., :5]}, ValueError, ["`key`", "[pages, page, kv_heads, 8]", "(7, 4, 2, 5)"]),
    ("rank of key", {"key": POOL[0]}, ValueError, ["`key`", "[pages, page, kv_heads, 8]", "(4, 2, 8)"]),
    ("page counts", {"value": POOL[1:]}, ValueError, ["`value`", "[7, 4, 2, head_dim]", "(6, 4, 2, 8)"]),
    ("kv heads", {"key": POOL[:, :, [0, 1, 0]], "value": POOL[:, :, [0, 1, 0]]}, ValueError, ["`key`", "4", "got 3"]),
    ("dtype of key", {"key": POOL.double(), "value": POOL.double()}, TypeError, ["`key`", "float32", "torch.float64"]),
    ("window", {"window": 0}, ValueError, ["`window`", "at least 1", "got 0"]),
    ("soft cap", {"softcap": 0.0}, ValueError, ["`softcap`", "above 0", "got 0.0"]),
    ("sinks", {"sinks": torch.randn(3)}, ValueError, ["`sinks`", "(4,)", "(3,)"]),
    ("scale", {"key_scale": torch.rand(2)}, TypeError, ["`key_scale`", "float8_e4m3fn or int8", "torch.float32"]),
    (
        "scale's shape",
        {"key": POOL.to(torch.int8), "value": POOL.to(torch.int8), "value_scale": torch.rand(PAGES, HKV, PAGE)},
        ValueError,
        ["`value_scale`", "(2,)", "(7, 4, 2)", "(7, 2, 4)"],
    ),
    ("soft cap alone", {"softcap": 1.0, "batch_invariant": True}, NotImplementedError, ["`softcap`", "got 1.0"]),
    ("grad", {"key": POOL.clone().requires_grad_()}, NotImplementedError, ["paged_attention", "`key`", "=True"]),
]


@pytest.mark.parametrize("op", [False, True])
@pytest.mark.parametrize(("change", "error", "says"), [bad[1:] for bad in BAD], ids=[bad[0] for bad in BAD])
def test_bad_input(op: bool, change: dict[str, Any], error: type[Exception], says: list[str]) -> None:
    given = {"query": QUERY, "key": POOL, "value": POOL, "block_table": TABLE, "cu_seqlens_q": STARTS, "kv_lens": LENS}
    function = torch.ops.tatten.paged_attention if op else tatten.paged_attention
    with pytest.raises(error) as raised:
        function(**given | change)
    assert all(x in str(raised.value) for x in says), str(raised.value)


@pytest.mark.parametrize("name", ["query", "cu_seqlens_q"])
def test_other_things_than_tensors(name: str) -> None:
    given: dict[str, Any] = {"query": QUERY, "key": POOL, "value": POOL, "block_table": TABLE, "cu_seqlens_q": STARTS}
    with pytest.raises(TypeError, match=f"`{name}` must be a Tensor, got list"):
        tatten.paged_attention(**given | {"kv_lens": LENS, name: [1]})


def test_options_are_keywords() -> None:
    with pytest.raises(TypeError, match="`scale` must be passed by keyword"):
        tatten.paged_attention(QUERY, POOL, POOL, TABLE, STARTS, LENS, 0.3)  # type: ignore[misc]
