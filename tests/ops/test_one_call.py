"""Plain calls on a CPU that the kernel answers at once, and those that are left to the general path."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tatten.ops.call import KeyValue
from tatten.ops.cpu import one_call, thresholds
from tatten.ops.masks import key_spans
from tatten.ops.reference import decode_attention_reference

DTYPES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float64: 1e-12}


def inputs(
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    q_len: int = 1,
    length: int = 40,
    dtype: torch.dtype = torch.float32,
    layout: str = "heads_first",
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q_heads, kv_heads = heads
    query = torch.randn(batch, q_heads, q_len, 16).to(dtype)
    if layout == "heads_first":
        return query, *torch.randn(2, batch, kv_heads, length, 16).to(dtype).unbind()
    return query, *(x.transpose(1, 2) for x in torch.randn(2, batch, length, kv_heads, 16).to(dtype).unbind())


def mask_of(batch: int, length: int, start: int, stop: int) -> Tensor:
    places = torch.arange(length)
    return ((places >= start) & (places < stop)).expand(batch, 1, 1, length)


def attend_at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    block_mask: Tensor | None,
    scale: float | None,
    kv_lens: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    return one_call.attend_at_once(query, KeyValue(key, value, mask, kv_lens, block_mask), scale)


def assert_exact(state: tuple[Tensor, Tensor] | None, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None):
    assert state is not None
    exact = decode_attention_reference(query, key, value, mask)
    for got, want in zip(state, exact, strict=True):
        assert got.is_contiguous()
        assert got.shape == want.shape
        torch.testing.assert_close(got.double(), want.double(), rtol=DTYPES[query.dtype], atol=DTYPES[query.dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["heads_first", "length_first"])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_all_keys(batch: int, heads: tuple[int, int], q_len: int, layout: str, dtype: torch.dtype) -> None:
    query, key, value = inputs(batch, heads, q_len, dtype=dtype, layout=layout)
    assert_exact(attend_at_once(query, key, value, None, None, None), query, key, value, None)


@pytest.mark.parametrize("layout", ["heads_first", "length_first"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
@pytest.mark.parametrize(("start", "stop"), [(0, 40), (0, 10), (30, 40), (7, 8)])
@pytest.mark.parametrize("rows", [1, 2])
def test_the_span_that_all_attend_to(rows: int, start: int, stop: int, heads: tuple[int, int], layout: str) -> None:
    query, key, value = inputs(heads=heads, layout=layout)
    mask = mask_of(rows, 40, start, stop)
    unread = key.clone(), value.clone()
    for x in unread:
        x[:, :, :start] = x[:, :, stop:] = torch.nan
    state = attend_at_once(query, *unread, mask, key_spans(mask), None)
    assert_exact(state, query, key, value, mask)


@pytest.mark.parametrize("layout", ["heads_first", "length_first"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("n", [1, 17, 40])
@pytest.mark.parametrize("batch", [1, 3])
def test_one_length_of_all(batch: int, n: int, dtype: torch.dtype, heads: tuple[int, int], layout: str) -> None:
    query, key, value = inputs(batch, heads, layout=layout)
    unread = key.clone(), value.clone()
    for x in unread:
        x[:, :, n:] = torch.nan
    state = attend_at_once(query, *unread, None, None, None, torch.full((batch,), n, dtype=dtype))
    assert_exact(state, query, key, value, mask_of(batch, 40, 0, n))


def test_lengths_that_are_left_to_the_general_path() -> None:
    """Which narrows masks, or raises an error that names the lengths."""
    query, key, value = inputs()
    mask = mask_of(2, 40, 0, 10)
    others = [[3, 4], [0, 0], [-1, -1], [41, 41], [7], [7, 7, 7], [[7, 7]]]
    lengths = [*map(torch.tensor, others), torch.tensor([7.0, 7.0]), torch.tensor([7, 7], dtype=torch.int16)]
    lengths.append(torch.tensor([7, 7], device="meta"))
    assert all(attend_at_once(query, key, value, None, None, None, x) is None for x in lengths)
    given = torch.tensor([7, 7])
    assert attend_at_once(query, key, value, None, None, None, given) is not None
    assert attend_at_once(query, key, value, mask, key_spans(mask), None, given) is None
    assert attend_at_once(query, key, value, None, key_spans(mask), None, given) is None


def test_what_is_left_to_the_general_path(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = inputs()
    mask = mask_of(2, 40, 0, 10)
    spans = key_spans(mask)
    ragged = torch.cat((mask[:1], mask_of(1, 40, 0, 11)))
    holes = mask & (torch.arange(40) != 5)
    none = mask & False
    calls = {
        "no block mask": (query, key, value, mask, None),
        "a block mask alone": (query, key, value, None, spans),
        "spans that differ": (query, key, value, ragged, key_spans(ragged)),
        "holes": (query, key, value, holes, key_spans(holes)),
        "no key": (query, key, value, none, key_spans(none)),
        "an additive mask": (query, key, value, torch.zeros(2, 1, 1, 40), key_spans(torch.zeros(2, 1, 1, 40))),
        "a mask of one column": (query, key, value, mask[..., :1], key_spans(mask[..., :1])),
        "spans of another kind": (query, key, value, mask, spans.int()),
        "values of another width": (query, key, value[..., :8], None, None),
        "keys in 8 bits": (query, key.to(torch.int8), value.to(torch.int8), None, None),
        "keys of another dtype": (query, key.double(), value.double(), None, None),
        "another batch": (query, key[:1], value[:1], None, None),
        "heads that don't divide": (query[:, :3], key, value, None, None),
        "another head_dim": (query[..., :8], key, value, None, None),
        "another rank": (query[0], key, value, None, None),
        "no keys": (query, key[:, :, :0], value[:, :, :0], None, None),
        "no queries": (query[:, :, :0], key, value, None, None),
    }
    assert attend_at_once(query, key, value, mask, spans, None) is not None
    taken = [name for name, call in calls.items() if attend_at_once(*call, None) is not None]
    assert taken == []
    with torch.enable_grad():
        assert attend_at_once(query.clone().requires_grad_(), key, value, None, None, None) is None
    monkeypatch.setattr(thresholds.CPU, "packed_rows", 2)
    assert attend_at_once(*(x.bfloat16() for x in (query, key, value)), None, None, None) is None
    assert attend_at_once(query, key, value, None, None, None) is not None
    monkeypatch.setattr(thresholds.CPU, "split_bytes", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert attend_at_once(query, key, value, None, None, None) is None  # split for the third core
