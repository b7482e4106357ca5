"""Queries whose keys all have one large negative bias, as padding has in many models, average those keys exactly.

In float32 a score is lost beside -1e9, so that softmax is uniform, in PyTorch as here. `bias + log(n)` loses n as well:
states over parts of the keys can't be merged by that.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from devices import DEVICES
from pairs import pairs
from slow import slow_after, slow_but
from torch import Tensor

import tatten
from tatten.ops.cpu import flash, thresholds
from tatten.ops.kernel_signatures import bifurcated_call, decode_call
from tatten.ops.masks import block_list, key_spans

pytestmark = pytest.mark.drawn(6)

NEG_INF = float("-inf")
LOWEST = torch.finfo(torch.float32).min
FLOORS = [-1e4, -1e9, LOWEST]
TREES = {
    "prefix": ((1, 97), (4, 3)),
    "three": ((1, 64), (2, 40), (4, 1)),
    "four": ((1, 200), (2, 3), (4, 65), (4, 2)),
    "five": ((4, 5), (1, 131), (1, 0), (2, 7), (4, 3)),
}


@pytest.fixture
def many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds.CPU, "split_bytes", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("runs where no GPU is")


def segments(name: str, q_len: int, low: float, dtype: torch.dtype, device: str) -> tuple:
    """Query, keys, values and masks of a tree, and the mean that sequence 1, all of whose keys are at `low`, wants.

    Of sequence 2 only the last query is; the others have ordinary biases and a few keys at the floor.
    """
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    query = randn(4, 4, q_len, 16).to(dtype)
    if low > -1e6:  # beside which scores are not lost
        query.zero_()
    keys, values, masks, held = [], [], [], []
    for rows, length in TREES[name]:
        keys.append(randn(rows, 2, length, 16).to(dtype))
        values.append(randn(rows, 2, length, 16).to(dtype))
        mask = torch.where(randn(4, 1, q_len, length) > 1, low, randn(4, 1, q_len, length))
        mask[1] = mask[2, :, -1] = low
        masks.append(mask)
        held.append(values[-1].repeat_interleave(4 // rows, dim=0))
    mean = torch.cat(held, dim=2).double().mean(dim=2).repeat_interleave(2, dim=1)
    moved = [[x.to(device) for x in tensors] for tensors in (keys, values, masks)]
    return query.to(device), *moved, mean


def check(out: Tensor, lse: Tensor, mean: Tensor, low: float) -> None:
    bound = 2 * torch.finfo(out.dtype).eps * mean.abs().max() + 1e-6
    for sequence, queries in ((1, slice(None)), (2, slice(-1, None))):
        error = (out[sequence, :, queries].double().cpu() - mean[sequence][:, None]).abs().max()
        assert error <= bound, f"sequence {sequence} is off by {error:.1e}, allowed {bound:.1e}"
    assert (lse[1] <= low / 2).all()
    assert lse[0].abs().max() < 100


def triton_segments(query: Tensor, keys: list, values: list, masks: list) -> tuple[Tensor, Tensor]:
    from tatten.ops.cuda.segments import plan_segments

    call = bifurcated_call(query, keys, values, masks, scale=0.25)
    return plan_segments(call)(call)


def public(query: Tensor, keys: list, values: list, masks: list) -> tuple[Tensor, Tensor]:
    return tatten.bifurcated_attention(query, keys, values, attn_masks=masks, scale=0.25, return_lse=True)


@pytest.mark.parametrize("low", FLOORS)
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("q_len, dtype", [(1, torch.float32), (3, torch.float32), (2, torch.bfloat16)])
@pytest.mark.parametrize("device", DEVICES)
def test_segments(device: str, q_len: int, dtype: torch.dtype, name: str, low: float) -> None:
    query, keys, values, masks, mean = segments(name, q_len, low, dtype, device)
    check(*public(query, keys, values, masks), mean, low)


@pytest.mark.parametrize("device", DEVICES)
def test_segments_with_numbers_of_heads_of_their_own(device: str) -> None:
    query, keys, values, masks, mean = segments("three", 2, -1e9, torch.float32, device)
    keys[1], values[1] = (x.repeat_interleave(2, dim=1) for x in (keys[1], values[1]))
    check(*public(query, keys, values, masks), mean, -1e9)


@pytest.mark.drawn(1, "floors in Triton")
@pytest.mark.parametrize("name, low, programs", slow_after(3, pairs([*TREES], FLOORS, [3, 25])))
def test_segments_in_triton(
    name: str, low: float, programs: int, interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tatten.ops.cuda import decode_grid

    monkeypatch.setattr(decode_grid, "multiprocessors", lambda device: programs)
    monkeypatch.setattr(decode_grid, "tiles_for", lambda *args, **kwargs: decode_grid.Tiles(16, 32, 4, 2))
    query, keys, values, masks, mean = segments(name, 2, low, torch.float32, "cpu")
    check(*triton_segments(query, keys, values, masks), mean, low)


def check_against_float64(run: Callable, query: Tensor, keys: list, values: list, masks: list) -> None:
    want_out, want_lse = tatten.ops.reference.bifurcated_attention_reference(query, keys, values, masks, scale=0.25)
    out, lse = run(query, keys, values, masks)
    torch.testing.assert_close(out.double(), want_out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("masked", slow_but([1], range(3)))
@pytest.mark.parametrize("run", [public, triton_segments])
def test_only_one_segment_has_a_bias(run: Callable, masked: int, interpreted: None) -> None:
    """Then the others outweigh it, whatever the form of their states."""
    query, keys, values, masks, _ = segments("three", 2, -1e9, torch.float32, "cpu")
    some = [mask if i == masked else None for i, mask in enumerate(masks)]
    check_against_float64(run, query, keys, values, some)


@pytest.mark.parametrize("masked", slow_but([1], range(3)))
@pytest.mark.parametrize("run", [public, triton_segments])
def test_a_segment_beside_a_floor_is_excluded_by_a_bool_mask(run: Callable, masked: int, interpreted: None) -> None:
    query, keys, values, masks, _ = segments("three", 2, -1e9, torch.float32, "cpu")
    query.zero_()  # the reference keeps scores beside the floor
    masks[masked] = masks[masked] > 0  # nothing, where all other keys are at the floor
    check_against_float64(run, query, keys, values, masks)


@pytest.mark.parametrize("masked", slow_but([1], range(3)))
@pytest.mark.parametrize("run", [public, triton_segments])
def test_one_mask_for_all_sequences_beside_a_floor(run: Callable, masked: int, interpreted: None) -> None:
    query, keys, values, masks, _ = segments("three", 2, -1e9, torch.float32, "cpu")
    query.zero_()  # the reference keeps scores beside the floor
    masks[masked] = masks[masked][1:2]  # nothing but the floor
    check_against_float64(run, query, keys, values, masks)


def test_memory_that_does_not_count_may_be_nan_beside_the_floor() -> None:
    """Also of a segment between others, whose keys all segments have in one call."""
    query, keys, values, masks, _ = segments("four", 2, -1e9, torch.float32, "cpu")
    masks[1] = torch.zeros(4, 1, 2, 3, dtype=torch.bool)
    masks[2][..., :9] = masks[2][..., 60:] = NEG_INF
    want, _ = public(query, keys, values, masks)
    for x in (keys, values):
        x[1].fill_(float("nan"))
        x[2][:, :, :9] = x[2][:, :, 60:] = float("nan")
    got, _ = public(query, keys, values, masks)
    assert torch.equal(got, want)
    assert got.isfinite().all()


def whole_row(low: float, kv_len: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, h, n, 16, generator=generator) for h, n in ((4, 2), (1, kv_len), (1, kv_len)))
    value[:, :, -3:] += 10
    mask = torch.randn(3, 1, 2, kv_len, generator=generator)
    mask[1] = mask[2, :, -1] = low
    tensors = (query * (low < -1e6), key, value, mask.float())
    mean = value.to(dtype).double().mean(dim=2).expand(3, 4, 16)
    return *(x.to(dtype).to(device) for x in tensors[:3]), tensors[3].to(device), mean


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("low", FLOORS)
@pytest.mark.parametrize("kv_len", [1, 5, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("device", DEVICES)
def test_pieces(
    device: str, dtype: torch.dtype, kv_len: int, low: float, softcap: float | None, many_pieces: None
) -> None:
    if dtype == torch.float64 and low == -1e9:
        pytest.skip("float64 keeps scores beside -1e9")
    query, key, value, mask, mean = whole_row(low, kv_len, dtype, device)
    check(*tatten.decode_attention(query, key, value, attn_mask=mask, softcap=softcap, return_lse=True), mean, low)


@pytest.mark.parametrize("device", DEVICES)
def test_a_large_positive_bias_on_all_keys(device: str, many_pieces: None) -> None:
    """Masks of 0 and 1e9 are written, too."""
    query, key, value, mask, mean = whole_row(1e9, 200, torch.float32, device)
    query = query * (mask[:, :, :1, :1] * 0 + 1)
    want = mean[1][:, None].expand(4, 2, 16)
    out = tatten.decode_attention(query, key, value, attn_mask=mask)
    torch.testing.assert_close(out[1].double().cpu(), want, atol=1e-5, rtol=1e-5)
    parts = [[x[:, :, :197], x[:, :, 197:]] for x in (key, value)]
    out = tatten.bifurcated_attention(query, *parts, attn_masks=[mask[..., :197], mask[..., 197:]])
    torch.testing.assert_close(out[1].double().cpu(), want, atol=1e-5, rtol=1e-5)


def test_ordinary_scores_are_computed_once(many_pieces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all are at -100: float32 still tells their sums apart."""
    calls: list[int] = []
    kernel = flash._flash
    monkeypatch.setattr(flash, "_flash", lambda *args: calls.append(1) or kernel(*args))
    query, key, value, mask, _ = whole_row(-1.0, 210, torch.float32)
    query = torch.full_like(query, 10.0)
    key = -torch.ones_like(key) * 2.5
    out, lse = tatten.decode_attention(query, key, value, attn_mask=mask, return_lse=True)
    assert lse.max() < -80
    assert len(calls) == 1, "210 keys make splits of one size"
    assert out.isfinite().all()


@pytest.mark.drawn(1, "floors in Triton")
@pytest.mark.parametrize("sinks, programs, low", slow_after(3, pairs([False, True], [1, 5, 13], FLOORS)))
def test_splits_in_triton(sinks: bool, programs: int, low: float, interpreted: None) -> None:
    from tatten.ops.cuda.decode import Tiles, plan_attention

    query, key, value, mask, mean = whole_row(low, 200, torch.float32)
    none = torch.full((4,), NEG_INF) if sinks else None
    call = decode_call(query, key, value, mask, None, 0.25, sinks=none)
    check(*plan_attention(call, tiles=Tiles(16, 32, 4, 2), programs=programs)(call), mean, low)


@pytest.mark.parametrize("device", DEVICES)
def test_a_window_that_leaves_only_keys_at_the_floor(device: str) -> None:
    """The mask keeps a key above it, for other queries: theirs average what they see."""
    query, key, value, _, _ = whole_row(LOWEST, 200, torch.float32, device)
    mask = torch.full((1, 1, 1, 200), LOWEST, device=device)
    mask[..., 0] = mask[..., 197] = 0.0
    out = tatten.decode_attention(query, key, value, attn_mask=mask, window=2)
    for i in range(2):  # query 0 stands at 198 and sees 197 and 198, query 1 sees 198 and 199
        want = value[:, :, 197] if i == 0 else value[:, :, 198:].mean(dim=2)
        torch.testing.assert_close(out[:, :, i], want.expand(3, 4, 16), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("find", [key_spans, lambda mask: block_list(mask, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_at_the_lowest_bias_are_not_read_beside_others(find: Callable, dtype: torch.dtype) -> None:
    """A mask of `finfo.min` leaves the same keys as the bool mask for these keys."""
    keep = torch.zeros(3, 1, 1, 300, dtype=torch.bool)
    keep[0, ..., 3:90], keep[1, ..., 100:101], keep[2] = True, True, True
    additive = torch.where(keep, 0.0, torch.finfo(dtype).min).to(dtype)
    assert torch.equal(find(additive), find(keep))


def test_a_mask_in_float16_is_read_in_full() -> None:
    """Its lowest bias is -65504, which scores could outdo."""
    mask = torch.full((1, 1, 1, 100), torch.finfo(torch.float16).min, dtype=torch.float16)
    mask[..., 7] = 0
    assert key_spans(mask).tolist() == [[0, 100, 0]]


@pytest.mark.parametrize("kv_len", [100, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_an_infinite_bias_makes_nan_of_its_own_query_alone(device: str, dtype: torch.dtype, kv_len: int) -> None:
    query, key, value, mask, _ = whole_row(-1.0, kv_len, dtype, device)
    mask[0, :, 0, kv_len // 2] = float("inf")
    out = tatten.decode_attention(query, key, value, attn_mask=mask)
    eager = torch.softmax((query @ key.mT).float() / 4 + mask, dim=-1) @ value.float()
    assert torch.equal(out.isnan(), eager.isnan())
    assert out[0, :, 0].isnan().all()
    assert out.isnan().sum() == 4 * 16
    both = [x.expand(3, -1, -1, -1) for x in (key[:, :, :50], key[:, :, 50:])]
    values, masks = (value[:, :, :50], value[:, :, 50:]), (mask[..., :50], mask[..., 50:])
    out = tatten.bifurcated_attention(query, both, values, attn_masks=masks)
    assert torch.equal(out.isnan(), eager.isnan())


def test_more_pieces_than_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's kernel dies of a division by zero (SIGFPE) where a piece has no key."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 128)
    query, key = torch.randn(205, 5, 1, 256), torch.randn(205, 5, 1, 256)
    out = tatten.decode_attention(query, key, key, attn_mask=torch.zeros(205, 1, 1, 1))
    torch.testing.assert_close(out, key)
