"""On a CPU, short sequences over pages attend in one call, and long ones alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from poisoned_pages import assert_same, one_by_one, paged
from torch import Tensor

import tatten
from tatten.ops.cpu import pages, thresholds
from tatten.ops.cpu.page_batches import batches_of
from tatten.ops.reference import decode_attention_reference, paged_attention_reference

LENS = [40, 3, 0, 17, 16, 33, 1, 25]


def calls_of(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> list[int | None]:
    """Return the number of sequences of each batch that attends in one call, and None for batches that can't."""
    made: list[int | None] = []
    join = pages.call_of_batch

    def joined(call: Any, batch: list[int], *args: Any) -> Any:
        state = join(call, batch, *args)
        made.append(None if state is None else len(batch))
        return state

    with monkeypatch.context() as patch:
        patch.setattr(pages, "call_of_batch", joined)
        run()
    return made


def clean(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs with numbers in place of NaN in unused memory."""
    return inputs | {name: torch.nan_to_num(inputs[name], 7.0) for name in ("key", "value")}


@pytest.mark.parametrize("unused", ["nan", "numbers"])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("variant", [{}, {"window": 5}, {"window": 30, "softcap": 3.0}, {"sinks": torch.randn(4)}])
def test_one_call(variant: dict[str, Any], q_len: int, unused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = paged(4, LENS, 10, q_len=q_len)
    inputs = inputs if unused == "nan" else clean(inputs)
    states = []
    made = calls_of(monkeypatch, lambda: states.append(tatten.decode_attention(**inputs, **variant, return_lse=True)))
    assert made == [7]  # all but the sequence without keys
    assert_same(states[0], one_by_one(inputs, **variant))


@pytest.mark.parametrize("scales", ["heads", "keys"])
def test_int8_with_scales(scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = clean(paged(4, LENS, 10))
    shape = (2,) if scales == "heads" else inputs["key"].shape[:3]
    factor = torch.rand(shape) + 0.5
    narrow = {name: (20 * inputs[name]).round().clamp(-127, 127).to(torch.int8) for name in ("key", "value")}
    states: list[tuple[Tensor, Tensor]] = []
    call = inputs | narrow | {"query": inputs["query"].float(), "key_scale": factor, "value_scale": factor}
    made = calls_of(monkeypatch, lambda: states.append(tatten.decode_attention(**call, return_lse=True)))
    assert made == [7]
    over_keys = factor.double()[:, None] if scales == "heads" else factor.double()[..., None]
    wide = {name: x.double() * over_keys for name, x in narrow.items()}
    for got, want in zip(states[0], one_by_one(inputs | wide), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_an_entry_without_a_page_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence alone masks the keys of the entry. A batch can't."""
    inputs = clean(paged(4, [8, 12, 5], 3))
    inputs["block_table"][1, 1] = -1
    states = []
    made = calls_of(monkeypatch, lambda: states.append(tatten.decode_attention(**inputs, return_lse=True)))
    assert made == [None]
    short = inputs | {"kv_lens": torch.tensor([8, 8, 5])}
    short["block_table"] = inputs["block_table"][:, [0, 2, 1]].clone()
    short["block_table"][[0, 2]] = inputs["block_table"][[0, 2]]
    assert_same(states[0], one_by_one(short))


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "lengths": lambda keys: keys < torch.tensor(LENS)[:, None, None, None],
    "holes": lambda keys: (keys % 7 != torch.arange(8)[:, None, None, None]) & (keys < 30),
    "one row": lambda keys: (keys % 5 > 1)[None, None, None],
    "queries": lambda keys: keys <= torch.tensor([[3], [17], [39]]),
    "one column": lambda keys: torch.tensor([[True], [False], [True]]),
    "heads": lambda keys: keys % 5 != torch.arange(4)[None, :, None, None],
    "bias": lambda keys: torch.where(keys % 5 > 0, torch.randn(8, 1, 3, 40, dtype=torch.float64), -torch.inf),
    "lowest": lambda keys: torch.where(keys % 5 > 0, 0.0, torch.finfo(torch.float32).min)[None, None, None].double(),
}


@pytest.mark.parametrize("with_lens", [True, False])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, with_lens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, mask = clean(paged(4, LENS, 10, q_len=3)), MASKS[name](torch.arange(40))
    lens = LENS if with_lens else [40] * 8
    inputs["block_table"] = inputs["block_table"].clamp(0, len(inputs["key"]) - 1)
    inputs |= {"kv_lens": torch.tensor(lens), "attn_mask": mask}
    states = []
    made = calls_of(monkeypatch, lambda: states.append(tatten.decode_attention(**inputs, return_lse=True)))
    assert made == [7 if with_lens else 8]
    assert_same(states[0], decode_attention_reference(**inputs))


@pytest.mark.parametrize("name", ["lengths", "holes", "one row"])
def test_masks_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the pass writes a call: the block mask has the spans."""
    inputs, mask = clean(paged(4, LENS, 10)), MASKS[name](torch.arange(40))
    table = inputs["block_table"].clamp(0, len(inputs["key"]) - 1)
    del inputs["kv_lens"]
    states: list[tuple[Tensor, Tensor]] = []
    call = inputs | {"block_table": table, "attn_mask": mask, "block_mask": torch.ops.tatten.block_mask(mask)}
    made = calls_of(monkeypatch, lambda: states.append(torch.ops.tatten.decode_attention(**call)))
    assert made == [7 if name == "lengths" else 8]
    assert_same(states[0], decode_attention_reference(**call))


def test_a_mask_of_late_keys_takes_one_sequence_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of a batch's mask begin with the first page."""
    inputs = clean(paged(4, [40] * 4, 10))
    del inputs["kv_lens"]
    mask = torch.arange(40) >= torch.tensor([0, 5, 7, 9])[:, None, None, None]
    call = inputs | {"attn_mask": mask & (torch.arange(40) % 3 > 0), "block_mask": None}
    call["block_mask"] = torch.ops.tatten.block_mask(call["attn_mask"])
    assert calls_of(monkeypatch, lambda: torch.ops.tatten.decode_attention(**call)) == []


def test_batch_invariant_calls_take_one_sequence_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = paged(4, LENS, 10)
    assert calls_of(monkeypatch, lambda: tatten.decode_attention(**inputs, batch_invariant=True)) == []


def test_mixed_batches_join_sequences_with_the_same_few_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    lens = [40, 39, 17, 33, 25, 30, 38]
    inputs = clean(paged(4, lens, 10))
    q_lens = torch.tensor([2, 1, 2, 5, 5, 1, 20])
    starts = torch.cat((torch.zeros(1), q_lens.cumsum(0))).int()
    query = torch.randn(int(q_lens.sum()), 4, 8, dtype=torch.float64)
    call = inputs | {"query": query, "cu_seqlens_q": starts}
    assert calls_of(monkeypatch, lambda: tatten.paged_attention(**call)) == [2, 2, 2]
    got = tatten.paged_attention(**call, return_lse=True)
    assert_same(got, paged_attention_reference(**call))


@pytest.mark.parametrize("seed", range(30))
def test_batches(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence is in one batch, and no batch of several exceeds the cache or wastes more than its calls cost."""
    rng = random.Random(seed)
    n_pages = [rng.choice((1, 2, 5, rng.randint(1, 60))) for _ in range(rng.randint(1, 40))]
    sequences = [b for b in range(len(n_pages)) if rng.random() < 0.9]
    most, page_bytes = rng.randint(1, 200), rng.choice((64, 4096))
    monkeypatch.setattr(thresholds.CPU, "run_bytes", rng.choice((0, 4096, 1 << 18)))
    batches = list(batches_of(sequences, n_pages, most, page_bytes))
    assert sorted(b for batch in batches for b in batch) == sequences
    for batch in (x for x in batches if len(x) > 1):
        padded = len(batch) * max(n_pages[b] for b in batch)
        assert padded <= most
        assert (padded - sum(n_pages[b] for b in batch)) * page_bytes <= len(batch) * thresholds.CPU.run_bytes
