"""On a CPU, short sequences over pages attend in one call, and long ones alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from poisoned_pages import assert_same, one_by_one, paged
from torch import Tensor

import tatten
from tatten.ops.call import DECODE, AttentionCall, KeyValue
from tatten.ops.cpu import pages, thresholds
from tatten.ops.cpu.page_joins import joins_of
from tatten.ops.masks import Span
from tatten.ops.reference import decode_attention_reference, paged_attention_reference

LENS = [40, 3, 0, 17, 16, 33, 1, 25]
State = tuple[Tensor, Tensor]


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The number of sequences of each join that attends in one call; None for a join that can't."""
    sizes: list[int | None] = []
    call_of_join = pages.call_of_join

    def count(call: Any, join: Any, *args: Any) -> Any:
        joint = call_of_join(call, join, *args)
        sizes.append(None if joint is None else len(join.sequences))
        return joint

    monkeypatch.setattr(pages, "call_of_join", count)
    return sizes


def clean(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs with numbers in place of NaN in unused memory."""
    return inputs | {name: torch.nan_to_num(inputs[name], 7.0) for name in ("key", "value")}


def attend(**inputs: Any) -> State:
    return tatten.decode_attention(**inputs, return_lse=True)


def attend_by_spans(inputs: dict[str, Any], mask: Tensor) -> State:
    """Attend as the pass writes a call: without lengths, and with a block mask."""
    given = {name: x for name, x in inputs.items() if name != "kv_lens"}
    blocks = torch.ops.tatten.block_mask(mask)
    state: State = torch.ops.tatten.decode_attention(**given, attn_mask=mask, block_mask=blocks)
    assert_same(state, decode_attention_reference(**given, attn_mask=mask))
    return state


@pytest.mark.parametrize("unused", ["nan", "numbers"])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("variant", [{}, {"window": 5}, {"window": 30, "softcap": 3.0}, {"sinks": torch.randn(4)}])
def test_one_call(variant: dict[str, Any], q_len: int, unused: str, joined: list[int | None]) -> None:
    inputs = paged(4, LENS, 10, q_len=q_len)
    inputs = inputs if unused == "nan" else clean(inputs)
    assert_same(attend(**inputs, **variant), one_by_one(inputs, **variant))
    assert joined == [7]  # all but the sequence without keys


@pytest.mark.parametrize("scales", ["heads", "keys"])
def test_int8_with_scales(scales: str, joined: list[int | None]) -> None:
    inputs = clean(paged(4, LENS, 10))
    shape = (2,) if scales == "heads" else inputs["key"].shape[:3]
    factor = torch.rand(shape) + 0.5
    narrow = {name: (20 * inputs[name]).round().clamp(-127, 127).to(torch.int8) for name in ("key", "value")}
    narrow |= {"query": inputs["query"].float(), "key_scale": factor, "value_scale": factor}
    state = attend(**(inputs | narrow))
    assert joined == [7]
    over_keys = factor.double()[:, None] if scales == "heads" else factor.double()[..., None]
    wide = {name: narrow[name].double() * over_keys for name in ("key", "value")}
    for got, want in zip(state, one_by_one(inputs | wide), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_an_entry_without_a_page_is_left_out(joined: list[int | None]) -> None:
    """A sequence alone masks the keys of the entry. A join can't."""
    inputs = clean(paged(4, [8, 12, 5], 3))
    without = inputs["block_table"].clone()
    without[1, 1] = without[1, 2]  # the keys of the last page follow those of the first one
    inputs["block_table"][1, 1] = -1
    state = attend(**inputs)
    assert joined == [None]
    assert_same(state, one_by_one(inputs | {"block_table": without, "kv_lens": torch.tensor([8, 8, 5])}))


KEYS = torch.arange(40)
MASKS: dict[str, Tensor] = {
    "lengths": torch.tensor(LENS)[:, None, None, None] > KEYS,
    "holes": (torch.arange(8)[:, None, None, None] != KEYS % 7) & (KEYS < 30),
    "one row": (KEYS % 5 > 1)[None, None, None],
    "queries": torch.tensor([[3], [17], [39]]) >= KEYS,
    "one column": torch.tensor([[True], [False], [True]]),
    "heads": torch.arange(4)[None, :, None, None] != KEYS % 5,
    "bias": torch.where(KEYS % 5 > 0, torch.randn(8, 1, 3, 40, dtype=torch.float64), -torch.inf),
    "lowest": torch.where(KEYS % 5 > 0, 0.0, torch.finfo(torch.float32).min)[None, None, None].double(),
}


@pytest.mark.parametrize("with_lens", [True, False])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, with_lens: bool, joined: list[int | None]) -> None:
    inputs = clean(paged(4, LENS, 10, q_len=3))
    lens = torch.tensor(LENS if with_lens else [40] * 8)
    table = inputs["block_table"].clamp(0, len(inputs["key"]) - 1)
    inputs |= {"block_table": table, "kv_lens": lens, "attn_mask": MASKS[name]}
    assert_same(attend(**inputs), decode_attention_reference(**inputs))
    assert joined == [7 if with_lens else 8]


@pytest.mark.parametrize("name", ["lengths", "holes", "one row"])
def test_masks_without_lengths(name: str, joined: list[int | None]) -> None:
    inputs = clean(paged(4, LENS, 10))
    inputs["block_table"] = inputs["block_table"].clamp(0, len(inputs["key"]) - 1)
    attend_by_spans(inputs, MASKS[name])
    assert joined == [8 if name == "one row" else 7]  # one sequence has no keys, or alone has no holes


def test_full_spans_within_the_first_page_keep_their_mask(joined: list[int | None]) -> None:
    """Spans that are full but begin after a page does need the mask, whatever the other sequences need."""
    inputs = clean(paged(16, [64] * 4, 4))
    keys = torch.arange(64)
    late, holes = (keys >= 5) & (keys < 16), keys % 3 > 0
    attend_by_spans(inputs, torch.stack([late, late, holes, holes])[:, None, None])
    assert joined == [4]


def test_spans_that_begin_in_later_pages_attend_alone(joined: list[int | None]) -> None:
    """The columns of a masked join begin with the first page."""
    inputs = clean(paged(4, [40] * 5, 10))
    starts, holes = torch.tensor([0, 5, 8, 9, 1])[:, None], torch.tensor([1, 1, 0, 1, 1])[:, None].bool()
    attend_by_spans(inputs, ((starts <= KEYS) & ((KEYS % 3 > 0) | ~holes))[:, None, None])
    assert joined == [2]  # sequences 0 and 4; sequence 2 is full and begins with a page, but is alone of its kind


@pytest.mark.parametrize("seed", range(40))
def test_any_spans(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans with and without holes, in joins of any size."""
    rng = random.Random(seed)
    page, batch = rng.choice((1, 4, 16)), rng.randint(1, 9)
    inputs = clean(paged(page, [48] * batch, 48 // page))
    monkeypatch.setattr(thresholds.CPU, "run_bytes", rng.choice((0, 1 << 10, 1 << 18)))
    monkeypatch.setattr(thresholds.CPU, "block_bytes", rng.choice((1 << 10, 1 << 13, 1 << 21)))
    mask = torch.zeros(batch, 1, 1, 48, dtype=torch.bool)
    for b in range(batch):
        start = rng.choice((0, 0, page, rng.randint(0, 47)))
        mask[b, ..., start : rng.choice((48, rng.randint(start, 48)))] = True
        if rng.random() < 0.5:
            mask[b, ..., torch.randperm(48)[: rng.randint(0, 20)]] = False
    attend_by_spans(inputs, mask)


def test_batch_invariant_calls_take_one_sequence_at_a_time(joined: list[int | None]) -> None:
    inputs = paged(4, LENS, 10)
    assert_same(attend(**inputs, batch_invariant=True), one_by_one(inputs))
    assert joined == []


@pytest.mark.parametrize("packed_rows, joins", [(64, [2, 2, 2]), (10, [2, 2]), (4, [2]), (2, [])])
def test_mixed_batches_join_sequences_with_equally_few_queries(
    packed_rows: int, joins: list[int], joined: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows of a kv head are a query."""
    monkeypatch.setattr(thresholds.CPU, "packed_rows", packed_rows)
    inputs = clean(paged(4, [40, 39, 17, 33, 25, 30, 38], 10))
    q_lens = torch.tensor([2, 1, 2, 5, 5, 1, 20])
    starts = torch.cat((torch.zeros(1), q_lens.cumsum(0))).int()
    query = torch.randn(int(q_lens.sum()), 4, 8, dtype=torch.float64)
    call = inputs | {"query": query, "cu_seqlens_q": starts}
    assert_same(tatten.paged_attention(**call, return_lse=True), paged_attention_reference(**call))
    assert joined == joins


@pytest.mark.parametrize("q_len, joins", [(31, [7]), (32, [])])
def test_calls_with_many_queries_take_one_sequence_at_a_time(q_len: int, joins: list[int], joined: list[int]) -> None:
    inputs = clean(paged(4, LENS, 10, q_len=q_len))
    assert_same(attend(**inputs), one_by_one(inputs))
    assert joined == joins


@pytest.mark.parametrize("softcap, joins", [(3.0, [5]), (None, [7])])
def test_long_sequences_attend_alone_with_a_soft_cap(
    softcap: float | None, joins: list[int], joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds.CPU, "capped_bytes", 30 * 2 * 2 * 8 * 8)  # of 30 keys
    inputs = clean(paged(4, LENS, 10))
    assert_same(attend(**inputs, softcap=softcap), one_by_one(inputs, softcap=softcap))
    assert joined == joins  # without the sequences of 33 and 40 keys


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_default_dtype(dtype: torch.dtype, default: torch.dtype, joined: list[int]) -> None:
    inputs = clean(paged(4, LENS, 10))
    inputs |= {name: inputs[name].to(dtype) for name in ("query", "key", "value")}
    want = attend(**inputs)
    torch.set_default_dtype(default)
    try:
        got = attend(**inputs)
    finally:
        torch.set_default_dtype(torch.float32)
    assert joined == [7, 7]
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("seed", range(40))
def test_joins(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence is in one join, and none of several exceeds the cache or wastes more than its calls cost."""
    rng = random.Random(seed)
    stops = [rng.choice((16, 32, 80, rng.randint(0, 960))) for _ in range(rng.randint(1, 40))]
    window = rng.choice((None, 10, 200))
    spans = [Span(0 if window is None else max(0, n - window), n, full=False) for n in stops]
    most = rng.randint(1, 200)
    monkeypatch.setattr(thresholds.CPU, "run_bytes", rng.choice((0, 4096, 1 << 18)))
    stored = KeyValue(*torch.empty(2, 1, 2, 16, 8), block_table=torch.zeros(len(stops), 60, dtype=torch.int32))
    call = AttentionCall(DECODE, torch.empty(len(stops), 2, 1, 8), (stored,), window=window)
    joins = joins_of(call, spans, most)
    assert sorted(b for join in joins for b in join.sequences) == ([b for b, n in enumerate(stops) if n] or [0])
    n_pages, key_bytes = [span.n_pages(16) for span in spans], 2 * 2 * 8 * 4
    for join in (x for x in joins if len(x.sequences) > 1):
        assert join.padded(n_pages) == len(join.sequences) * max(n_pages[b] for b in join.sequences) <= most
        columns = max(spans[b].stop - spans[b].start // 16 * 16 for b in join.sequences)
        wasted = len(join.sequences) * columns - sum(spans[b].stop - spans[b].start for b in join.sequences)
        assert wasted * key_bytes <= len(join.sequences) * thresholds.CPU.run_bytes
