"""`tatten.block_mask`: found once and shared by layers, it changes no bit; what does not fit is an error."""

from __future__ import annotations

import pytest
import torch
from attention_cases import NEG_INF, Case
from devices import DEVICES
from slow import slow_after
from torch import Tensor

import tatten
from tatten.ops.masks import BlockList, KeySpans


def assert_equal(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    """To the bit."""
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("mask", ["causal", "2d", "keys", "holes", "empty_rows", "all_false", "additive", "finfo_min"])
def test_layers_that_share_it_give_the_same(mask: str, q_len: int, device: str) -> None:
    inputs = Case(mask=mask, q_len=q_len, kv_len=150).inputs(device, poison=mask != "finfo_min")
    found = tatten.block_mask(inputs["attn_mask"])
    assert isinstance(found, KeySpans if device == "cpu" else BlockList)
    for _ in "layers":
        shared = tatten.decode_attention(**inputs, block_mask=found, return_lse=True)
        assert_equal(shared, tatten.decode_attention(**inputs, return_lse=True))
        inputs["query"] = inputs["query"].flip(1)


def test_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from tatten.ops.cpu import attention

    inputs = Case(mask="causal").inputs()
    found = tatten.block_mask(inputs["attn_mask"])
    monkeypatch.setattr(attention, "key_spans", lambda mask: pytest.fail("searched again"))
    tatten.decode_attention(**inputs, block_mask=found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", [{"lens": True}, {"window": 5}], ids=str)
def test_lengths_and_a_window_narrow_it(given: dict, device: str) -> None:
    inputs = Case(mask="causal", **given).inputs(device)
    found = tatten.block_mask(inputs["attn_mask"])
    shared = tatten.decode_attention(**inputs, block_mask=found, return_lse=True)
    assert_equal(shared, tatten.decode_attention(**inputs, return_lse=True))


def segments(device: str) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """Four sequences, two rows of a shared segment, and one of its own for each; a mask for each sequence."""
    rng = torch.Generator().manual_seed(0)
    query = torch.randn(4, 4, 1, 16, generator=rng).to(device)
    keys = [torch.randn(n, 2, length, 16, generator=rng).to(device) for n, length in ((2, 150), (4, 70))]
    masks = [(torch.rand(4, 1, 1, key.shape[2], generator=rng) > 0.5).to(device) for key in keys]
    masks[1] = torch.where(masks[1], 0.5, NEG_INF)
    return query, keys, [key.flip(2) for key in keys], masks


@pytest.mark.parametrize("device", DEVICES)
def test_segments_that_share_them_give_the_same(device: str) -> None:
    query, keys, values, masks = segments(device)
    found = [tatten.block_mask(mask, kv_batch=key.shape[0]) for mask, key in zip(masks, keys, strict=True)]
    assert [len(x.data) for x in found] == [2, 4]
    want = tatten.bifurcated_attention(query, keys, values, attn_masks=masks, return_lse=True)
    for block_masks in (found, [found[0], None], [None, found[1]]):
        given = {"attn_masks": masks, "block_masks": block_masks}
        assert_equal(tatten.bifurcated_attention(query, keys, values, **given, return_lse=True), want)


@pytest.mark.parametrize("backend", slow_after(2, ["eager", "aot_eager", "inductor"]))
def test_compiled(backend: str) -> None:
    """Made inside of what is compiled, and outside; for another length, too."""
    inputs = [Case(mask="causal", kv_len=n).inputs() for n in (33, 50)]

    def two_layers(given: dict, block_mask: tatten.BlockMask | None) -> Tensor:
        found = tatten.block_mask(given["attn_mask"]) if block_mask is None else block_mask
        out = tatten.decode_attention(**given, block_mask=found)
        return tatten.decode_attention(**{**given, "query": out}, block_mask=found)

    torch._dynamo.reset()
    compiled = torch.compile(two_layers, backend=backend, fullgraph=True)
    for given in inputs:
        want = two_layers(given, None)
        assert torch.equal(compiled(given, None), want)
        assert torch.equal(compiled(given, tatten.block_mask(given["attn_mask"])), want)


def test_columns_of_spans() -> None:
    mask = torch.zeros(3, 1, 1, 9, dtype=torch.bool)
    mask[0, ..., 2:7] = True
    mask[1, ..., [1, 8]] = True
    found = tatten.block_mask(mask)
    assert found.kv_length == 9
    assert found.start.tolist() == [2, 1, 0]
    assert found.stop.tolist() == [7, 9, 0]
    assert found.full.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    "change, error, message",
    [
        (
            {"block_mask": torch.zeros(2, 3)},
            TypeError,
            "`block_mask` must be a BlockMask, as tatten.block_mask returns, got Tensor",
        ),
        (
            {"attn_mask": None},
            ValueError,
            "`block_mask` must come with the `attn_mask` that it was made from, got None",
        ),
        ({"kv_len": 32}, ValueError, "`block_mask` must be over the 33 keys of `key`, got one over 32"),
        ({"kv_len": 1}, ValueError, "`block_mask` must be over the 33 keys of `key`, got one over 1"),
        (
            {"batch": 3},
            ValueError,
            "`block_mask` must be that of `attn_mask` for `kv_batch=2`, of 2 rows, got one of 3",
        ),
        ({"device": "meta"}, ValueError, "`block_mask` must be on the device of `key`, cpu, got meta"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_one_that_does_not_fit_is_an_error(change: dict, error: type[Exception], message: str) -> None:
    inputs = Case(mask="causal").inputs()
    made = Case(mask="causal", batch=change.pop("batch", 2), kv_len=change.pop("kv_len", 33)).inputs()
    found = tatten.block_mask(made["attn_mask"])
    if "device" in change:
        found = KeySpans(found.data.to(change.pop("device")), found.kv_length)
    with pytest.raises(error, match=message):
        tatten.decode_attention(**{**inputs, "block_mask": found, **change})


def test_ones_that_do_not_fit_segments_are_errors() -> None:
    query, keys, values, masks = segments("cpu")
    found = [tatten.block_mask(mask) for mask in masks]

    def attend(masks: list[Tensor | None], block_masks: object) -> None:
        tatten.bifurcated_attention(query, keys, values, attn_masks=masks, block_masks=block_masks)

    with pytest.raises(TypeError, match="`block_masks` must be a sequence of BlockMasks, got KeySpans"):
        attend(masks, found[0])
    with pytest.raises(ValueError, match="`block_masks` must have one entry for each of the 2 `keys`, got 1"):
        attend(masks, found[:1])
    with pytest.raises(ValueError, match=r"`block_masks\[0\]` must be .* `kv_batch=2`, of 2 rows, got one of 4"):
        attend(masks, found)
    with pytest.raises(ValueError, match=r"`block_masks\[1\]` must come with the `attn_masks\[1\]`"):
        attend([masks[0], None], [None, found[1]])
    with pytest.raises(
        TypeError, match=r"`block_masks\[0\]` must be a BlockMask, as tatten.block_mask returns, got Tensor"
    ):
        attend(masks, [found[0].data, None])


@pytest.mark.parametrize("wrong", ["one sequence", "kv_batch"])
def test_a_block_mask_of_other_rows_is_an_error(wrong: str) -> None:
    """It would leave out keys of the others, or let each attend to what any of them does."""
    query, (key, value) = torch.randn(4, 2, 1, 8), torch.randn(2, 4, 2, 200, 8)
    mask = torch.rand(4, 1, 1, 200) > 0.5
    found = tatten.block_mask(mask[:1]) if wrong == "one sequence" else tatten.block_mask(mask, kv_batch=1)
    with pytest.raises(ValueError, match="must be that of `attn_mask` for `kv_batch=4`, of 4 rows, got one of 1"):
        tatten.decode_attention(query, key, value, attn_mask=mask, block_mask=found)


def test_block_masks_are_compared_by_identity() -> None:
    mask = torch.rand(2, 1, 1, 9) > 0.5
    found = tatten.block_mask(mask)
    assert found == found
    assert found != tatten.block_mask(mask)


@pytest.mark.parametrize(
    "mask, kv_batch, error, message",
    [
        (None, None, TypeError, "`attn_mask` must be a Tensor, got NoneType"),
        (torch.zeros(5, dtype=torch.int64), None, TypeError, "`attn_mask` must be bool, float16, .*, got torch.int64"),
        (torch.ones(()), None, ValueError, r"`attn_mask` must broadcast to \[batch, .*\], got shape \(\)"),
        (torch.ones(1, 1, 1, 1, 5), None, ValueError, r"got shape \(1, 1, 1, 1, 5\)"),
        (torch.ones(4, 1, 1, 5), 3, ValueError, "`kv_batch` must be a divisor of `attn_mask`'s batch 4, got 3"),
        (torch.ones(5), 0, ValueError, "`kv_batch` must be positive, got 0"),
        (torch.ones(5), "2", TypeError, "`kv_batch` must be an int, got str"),
        (torch.ones(4, 1, 1, 5), 1.5, TypeError, "`kv_batch` must be an int, got float"),
    ],
)
def test_what_is_no_mask_is_an_error(mask: object, kv_batch: int | None, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tatten.block_mask(mask, kv_batch=kv_batch)
