"""Bad block tables, and arguments that have no meaning beside them: the error names the argument and both values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tatten

B, HQ, HKV, PAGES, PAGE, D = 2, 4, 2, 7, 4, 8
POOL = torch.randn(PAGES, PAGE, HKV, D)
TABLE = torch.zeros(B, 3, dtype=torch.int32)
LENS = torch.tensor([12, 5])

BAD: list[tuple[str, dict[str, Any], type[Exception], list[str]]] = [
    ("dtype", {"block_table": TABLE.long()}, TypeError, ["`block_table`", "int32", "torch.int64"]),
    ("rank", {"block_table": TABLE[0]}, ValueError, ["`block_table`", "[2, max_pages]", "(3,)"]),
    ("batch", {"block_table": TABLE[:1]}, ValueError, ["`block_table`", "[2, max_pages]", "(1, 3)"]),
    ("no lengths", {"kv_lens": None}, ValueError, ["`kv_lens`", "`block_table`", "got None"]),
    ("lengths' shape", {"kv_lens": LENS[:1]}, ValueError, ["`kv_lens`", "(2,)", "(1,)"]),
    ("lengths' dtype", {"kv_lens": LENS.float()}, TypeError, ["`kv_lens`", "int32 or int64", "torch.float32"]),
    ("too long", {"kv_lens": LENS + 1}, ValueError, ["`kv_lens`", "12", "4 keys", "3 pages", "got 13"]),
    ("negative", {"kv_lens": LENS - 6}, ValueError, ["`kv_lens`", "between 0 and 12", "got -1"]),
    ("page of 3", {"key": POOL[:, :3], "value": POOL[:, :3]}, ValueError, ["`key`", "power of two", "256", "got 3"]),
    ("page of 512", {"key": torch.empty(1, 512, 2, 8)}, ValueError, ["`key`", "power of two", "256", "got 512"]),
    ("page of 0", {"key": POOL[:, :0], "value": POOL[:, :0]}, ValueError, ["`key`", "power of two", "got 0"]),
    ("no pages", {"key": POOL[:0], "value": POOL[:0]}, ValueError, ["`key`", "at least one page", "(0, 4, 2, 8)"]),
    ("head_dim", {"key": POOL[..., :5]}, ValueError, ["`key`", "[pages, page, kv_heads, 8]", "(7, 4, 2, 5)"]),
    ("rank of key", {"key": POOL[0]}, ValueError, ["`key`", "[pages, page, kv_heads, 8]", "(4, 2, 8)"]),
    ("vector", {"key": POOL[0, 0, 0]}, ValueError, ["`key`", "[pages, page, kv_heads, 8]", "(8,)"]),
    ("page counts", {"value": POOL[1:]}, ValueError, ["`value`", "[7, 4, 2, head_dim]", "(6, 4, 2, 8)"]),
    ("pages differ", {"value": POOL[:, :2]}, ValueError, ["`value`", "[7, 4, 2, head_dim]", "(7, 2, 2, 8)"]),
    ("kv heads", {"key": POOL[:, :, [0, 1, 0]], "value": POOL[:, :, [0, 1, 0]]}, ValueError, ["`key`", "4", "got 3"]),
    ("dtype of key", {"key": POOL.double(), "value": POOL.double()}, TypeError, ["`key`", "float32", "torch.float64"]),
    ("mask", {"attn_mask": torch.ones(11, dtype=torch.bool)}, ValueError, ["`attn_mask`", "[2, 4, 1, 12]", "(11,)"]),
    (
        "scales",
        {"key": POOL.to(torch.int8), "value": POOL.to(torch.int8), "key_scale": torch.rand(PAGES, HKV, PAGE)},
        ValueError,
        ["`key_scale`", "(2,)", "(7, 4, 2)", "(7, 2, 4)"],
    ),
    (
        "indices",
        {"indices": torch.zeros(B, 1, 1, 3, dtype=torch.int32)},
        ValueError,
        ["`indices`", "None with `block_table`", "(2, 1, 1, 3)"],
    ),
    ("grad", {"key": POOL.clone().requires_grad_()}, NotImplementedError, ["`key`", "requires_grad=True"]),
]

LATENTS = torch.randn(PAGES, PAGE, 1, D + 3)
LATENT, ROPE = LATENTS.split((D, 3), dim=3)

BAD_LATENTS: list[tuple[str, dict[str, Any], type[Exception], list[str]]] = [
    *(bad for bad in BAD if bad[0] in ("dtype", "rank", "batch", "no lengths", "lengths' shape", "lengths' dtype")),
    *(bad for bad in BAD if bad[0] in ("too long", "negative", "mask", "indices")),
    ("page of 3", {"latent": LATENT[:, :3]}, ValueError, ["`latent`", "power of two", "256", "got 3"]),
    ("no pages", {"latent": LATENT[:0]}, ValueError, ["`latent`", "at least one page", "(0, 4, 1, 8)"]),
    ("rank of latents", {"latent": LATENT[..., :5]}, ValueError, ["`latent`", "[pages, page, 1, 8]", "(7, 4, 1, 5)"]),
    ("heads", {"latent": POOL}, ValueError, ["`latent`", "[pages, page, 1, 8]", "(7, 4, 2, 8)"]),
    ("heads before keys", {"latent": LATENT.mT}, ValueError, ["`latent`", "[pages, page, 1, 8]", "(7, 4, 8, 1)"]),
    ("no heads", {"latent": LATENT[:, :, 0]}, ValueError, ["`latent`", "[pages, page, 1, 8]", "(7, 4, 8)"]),
    ("page counts", {"key_rope": ROPE[1:]}, ValueError, ["`key_rope`", "[7, 4, 1, width]", "(6, 4, 1, 3)"]),
    ("pages differ", {"key_rope": ROPE[:, :2]}, ValueError, ["`key_rope`", "[7, 4, 1, width]", "(7, 2, 1, 3)"]),
    ("rope's heads", {"key_rope": ROPE[:, :, 0]}, ValueError, ["`key_rope`", "[7, 4, 1, width]", "(7, 4, 3)"]),
    ("width", {"key_rope": ROPE[..., :2]}, ValueError, ["`key_rope`", "`query_rope`, 3", "got 2"]),
    ("query's rope", {"query_rope": ROPE}, ValueError, ["`query_rope`", "[2, 4, 1, width]", "(7, 4, 1, 3)"]),
    ("8 bits", {"latent": LATENT.to(torch.int8)}, TypeError, ["`latent`", "torch.float32", "torch.int8"]),
    ("grad", {"latent": LATENT.clone().requires_grad_()}, NotImplementedError, ["`latent`", "requires_grad=True"]),
]


@pytest.mark.parametrize("op", [False, True])
@pytest.mark.parametrize(("change", "error", "says"), [x[1:] for x in BAD_LATENTS], ids=[x[0] for x in BAD_LATENTS])
def test_bad_latents(op: bool, change: dict[str, Any], error: type[Exception], says: list[str]) -> None:
    given = {"query": torch.randn(B, HQ, 1, D), "query_rope": torch.randn(B, HQ, 1, 3), "scale": 0.3}
    given |= {"latent": LATENT, "key_rope": ROPE, "block_table": TABLE, "kv_lens": LENS}
    function = torch.ops.tatten.latent_attention if op else tatten.latent_attention
    with pytest.raises(error) as raised:
        function(**given | change)
    missing = [text for text in says if text not in str(raised.value)]
    assert not missing, f"{raised.value} lacks {missing}"


@pytest.mark.parametrize("op", [False, True])
@pytest.mark.parametrize(("change", "error", "says"), [bad[1:] for bad in BAD], ids=[bad[0] for bad in BAD])
def test_bad_input(op: bool, change: dict[str, Any], error: type[Exception], says: list[str]) -> None:
    given = {"query": torch.randn(B, HQ, 1, D), "key": POOL, "value": POOL, "block_table": TABLE, "kv_lens": LENS}
    function = torch.ops.tatten.decode_attention if op else tatten.decode_attention
    with pytest.raises(error) as raised:
        function(**given | change)
    missing = [text for text in says if text not in str(raised.value)]
    assert not missing, f"{raised.value} lacks {missing}"


def test_a_table_must_be_a_tensor() -> None:
    with pytest.raises(TypeError, match=r"`block_table` must be a Tensor, got list"):
        tatten.decode_attention(torch.randn(B, HQ, 1, D), POOL, POOL, block_table=[[0]], kv_lens=LENS)
