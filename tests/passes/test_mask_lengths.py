"""Masks that keep the first keys of a sequence: which are read as a length, which are not, and the results."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from graphs import capture, listing, run_rewritten
from torch import Tensor

from tatten.passes import rewrite
from tatten.passes.mask_lengths import find_mask_lengths

B, HQ, HKV, S, D = 3, 4, 2, 40, 16
Mask = Callable[[Tensor], Tensor]
BIG = (1 << 30) - 1
EXTREMES = (-(1 << 63), -5, 0, 1, 17, S - 1, S, S + 9, (1 << 63) - 1)


def attend(mask_of: Mask) -> Callable[..., Tensor]:
    """Two layers with one mask, as a decoder has them."""

    def step(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
        mask = mask_of(n)
        for _ in range(2):
            q = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return q

    return step


def operands(batch: int, n: Any, q_len: int = 1) -> tuple[Tensor, ...]:
    q, k, v = torch.randn(batch, HQ, q_len, D), torch.randn(batch, HKV, S, D), torch.randn(batch, HKV, S, D)
    return q, k, v, torch.as_tensor(n)


def reads_length(mask_of: Mask, *args: Tensor, **kwargs: Any) -> bool:
    """Return True if both calls of a graph read a length and no mask, and the length is computed once."""
    gm = capture(attend(mask_of), *args)
    rewrite(gm, **kwargs)
    text = listing(gm)
    calls = [x for x in gm.graph.nodes if x.target is torch.ops.tatten.decode_attention.default]
    assert len(calls) == 2
    reads = {(x.args[3] is None, x.args[4] is not None, x.args[6] is None) for x in calls}
    assert reads in ({(True, True, True)}, {(False, False, False)}), text
    has_length = reads == {(True, True, True)}
    assert text.count("clamp(") == has_length
    assert text.count("block_mask.default(") == (not has_length)
    return has_length


def arange(**kwargs: Any) -> Tensor:
    return torch.arange(S, **kwargs)


ONE = {
    "lt": lambda n: (arange() < n)[None, None, None],
    "le": lambda n: (arange() <= n)[None, None, None],
    "gt": lambda n: (n > arange())[None, None, None],
    "ge": lambda n: torch.ge(n, arange())[None, None, None],
    "two dims": lambda n: arange()[None] < n,
    "negated ge": lambda n: ~(arange() >= n)[None],
    "negated gt": lambda n: torch.logical_not(arange() > n)[None],
    "negated twice": lambda n: ~~(arange() < n)[None],
    "from 3 on": lambda n: (arange() + 3 <= n)[None],
    "from -2 on": lambda n: (torch.arange(-2, S - 2) < n)[None],
    "from 5 down": lambda n: (torch.arange(5, S + 5) - 5 < n)[None],
    "int32": lambda n: (arange(dtype=torch.int32) < n.to(torch.int32))[None],
    "long keys": lambda n: (arange(dtype=torch.int32).long() < n)[None],
    "expanded": lambda n: (arange() < n).expand(1, 1, 1, S).contiguous(),
    "reshaped": lambda n: (arange().view(1, -1) < n.view(1, 1)).reshape(1, 1, 1, S).clone(),
    "to bool": lambda n: (arange() < n)[None].to(torch.bool),
    "stepped": lambda n: (torch.arange(0, S, 1) < n)[None],
}


@pytest.mark.parametrize("form", ONE)
def test_one_sequence(form: str) -> None:
    assert reads_length(ONE[form], *operands(1, 17))


@pytest.mark.parametrize("form", ["lt", "le", "from 3 on", "from -2 on", "negated ge", "gt"])
@pytest.mark.parametrize("n", EXTREMES)
def test_any_length(form: str, n: int) -> None:
    """The result is that of the mask, for lengths below 0, beyond the keys and near overflow."""
    check_results(attend(ONE[form]), *operands(1, n))
    check_results(attend(ONE[form]), *operands(1, torch.tensor([n])))


@pytest.mark.parametrize("form", ["lt", "le", "from 3 on", "from -2 on"])
@pytest.mark.parametrize("n", [-(1 << 31), -1, S, (1 << 31) - 1])
def test_any_length_of_32_bits(form: str, n: int) -> None:
    check_results(attend(ONE[form]), *operands(1, torch.tensor([n], dtype=torch.int32)))


def check_results(step: Callable[..., Tensor], *args: Tensor) -> None:
    """Compare with the program, and with the same rewrite, but of the mask itself, if no key is left."""
    _, gm, got = run_rewritten(step, *(x.clone() for x in args))
    assert "clamp" in listing(gm)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("tatten.passes.rewrite"), "find_mask_lengths", lambda graph: {})
        _, gm, want = run_rewritten(step, *(x.clone() for x in args))
    assert "clamp" not in listing(gm)
    torch.testing.assert_close(got, want)
    exact = step(*(x.clone() for x in args))
    torch.testing.assert_close(got, torch.where(got == 0, 0, exact))  # SDPA may give NaN without a key


def test_several_queries_with_one_mask() -> None:
    """A mask that broadcasts over queries stands for a length. A causal mask does not."""
    assert reads_length(ONE["lt"], *operands(1, 17, q_len=3))
    check_results(attend(ONE["lt"]), *operands(1, 17, q_len=3))
    assert not reads_length(lambda n: arange()[None] <= torch.arange(3)[:, None] + n, *operands(1, 17, q_len=3))


def test_the_bound_is_read_where_the_mask_compares_it() -> None:
    """A cache counts its tokens before attention, and the mask was made before that."""

    def mask_of(n: Tensor) -> Tensor:
        mask = (arange() <= n)[None]
        n.add_(5)
        return mask

    args = operands(1, 17)
    assert reads_length(mask_of, *args)
    check_results(attend(mask_of), *args)


def _written_later(n: Tensor) -> Tensor:
    mask = (arange() < n)[None]
    mask[:, 30] = True
    return mask


def _written_through_a_view(n: Tensor) -> Tensor:
    mask = (arange() < n)[None]
    copy = mask.expand(1, 1, 1, S)
    mask.logical_or_(arange() == 39)
    return copy


def _keys_written(n: Tensor) -> Tensor:
    keys = arange()
    keys[3] = 99
    return (keys < n)[None]


def _into(n: Tensor) -> Tensor:
    return torch.lt(arange(), n, out=torch.empty(S, dtype=torch.bool))[None]


OTHERS = {
    "other comparisons": [
        lambda n: (arange() >= n)[None],
        lambda n: (arange() != n)[None],
        lambda n: ~(arange() < n)[None],
        lambda n: (n < arange())[None],
    ],
    "other numbers of keys": [
        lambda n: (arange(dtype=torch.float32) < n)[None],
        lambda n: (arange() + 0.5 < n)[None],
        lambda n: (torch.arange(0, 2 * S, 2) < n)[None],
        lambda n: (torch.arange(S - 1, -1, -1) < n)[None],
        lambda n: (arange().flip(0) < n)[None],
        lambda n: (arange() % 7 < n)[None],
        lambda n: (arange() * 2 < n)[None],
        lambda n: (arange(dtype=torch.int16) < n)[None],
        lambda n: (arange() + n < 2 * n)[None],
        lambda n: (torch.add(arange(), 1, alpha=3) < n)[None],
        lambda n: (arange() + (1 << 40) < n)[None],
        lambda n: ((arange(dtype=torch.int32) + BIG + BIG + BIG).long() - BIG - BIG - BIG < n)[None],  # wraps around
        lambda n: ((arange() + BIG + BIG + BIG).int().long() - BIG - BIG - BIG < n)[None],
        lambda n: ((arange(dtype=torch.int32) - BIG - BIG - BIG).long() + BIG + BIG + BIG < n)[None],
        lambda n: (torch.zeros(S, dtype=torch.int64) < n)[None],
    ],
    "other bounds": [
        lambda n: (arange() < n.float())[None],
        lambda n: (arange() < n.to(torch.int16))[None],
        lambda n: (arange() < n.expand(S))[None],
        lambda n: (arange(dtype=torch.int32) < n)[None],  # casts the bound to int32
        lambda n: (arange() < 17)[None] & (n > 0),
    ],
    "more than a comparison": [
        lambda n: ((arange() < n) & (arange() > 3))[None],
        lambda n: ((arange() < n) | (arange() == 30))[None],
        lambda n: (arange() < n)[None].roll(1, -1),
        lambda n: torch.where((arange() < n)[None], 0.0, float("-inf")),
        lambda n: (torch.arange(2 * S) < n)[None, S:],
        lambda n: (torch.arange(S // 2) < n)[None].repeat(1, 2),
    ],
    "writes": [_written_later, _written_through_a_view, _keys_written, _into],
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_masks_stay_masks(kind: str) -> None:
    for mask_of in OTHERS[kind]:
        gm = capture(attend(mask_of), *operands(1, 17))
        rewrite(gm)
        assert "clamp" not in listing(gm)
        calls = [x for x in gm.graph.nodes if x.target is torch.ops.tatten.decode_attention.default]
        assert all(x.args[3] is not None and x.args[4] is None for x in calls)


def test_several_sequences_stay_masks() -> None:
    """They gain too little."""
    assert not reads_length(ONE["lt"], *operands(B, 17))
    assert not reads_length(lambda n: (arange() < n)[None, None, None].expand(B, 1, 1, S), *operands(B, 17))
    assert not reads_length(lambda n: (arange() < n[:, None])[:, None, None], *operands(B, [1, 17, S]))


def test_a_mask_for_each_head_stays_a_mask() -> None:
    assert not reads_length(lambda n: (arange() < n[:, None])[None, :, None], *operands(1, [3, 5, 7, 9]))


def test_batch_invariant_calls_read_the_mask() -> None:
    """With a length for one sequence and a mask for several, the order of sums would depend on the batch."""
    assert not reads_length(ONE["lt"], *operands(1, 17), batch_invariant=True)


def test_a_mask_from_another_device_stays_a_mask() -> None:
    """The length would be on the device of the comparison."""
    gm = capture(lambda n, like: (arange() < n)[None].to(like.device), torch.tensor(17), torch.empty(1, device="meta"))
    devices = [x.meta["example_value"].device.type for x in find_mask_lengths(gm.graph)]
    assert devices == ["cpu", "cpu"]


def test_layers_with_lengths_of_their_own() -> None:

    def step(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
        for _ in range(2):
            q = F.scaled_dot_product_attention(q, k, v, attn_mask=(arange() < n)[None], enable_gqa=True)
            n = n + 1
        return q

    check_results(step, *operands(1, 17))


def test_pages() -> None:
    """A gather through a block table, and the mask that programs write beside it."""

    def step(q: Tensor, pool: Tensor, table: Tensor, n: Tensor) -> Tensor:
        kv = pool[table].flatten(1, 2).transpose(1, 2)
        mask = (torch.arange(kv.shape[2]) < n[:, None])[:, None, None]
        return F.scaled_dot_product_attention(q, kv, kv, attn_mask=mask, enable_gqa=True)

    q, pool, table = torch.randn(1, HQ, 1, D), torch.randn(30, 8, HKV, D), torch.randperm(30)[:5].view(1, 5)
    args = q, pool, table.int(), torch.tensor([17])
    findings, gm, got = run_rewritten(step, *args)
    (finding,) = findings
    assert "read by block table" in finding.note
    assert "the mask is read as a length" in finding.note
    (call,) = [x for x in gm.graph.nodes if x.target is torch.ops.tatten.decode_attention.default]
    assert call.args[3] is None
    assert call.args[4] is not None
    assert "block_mask" not in listing(gm)
    torch.testing.assert_close(got, step(*args))


def test_unused_slots_may_hold_nan() -> None:
    q, k, v, n = operands(1, 17)
    k[:, :, 17:], v[:, :, 17:] = float("nan"), float("nan")
    _, gm, got = run_rewritten(attend(ONE["lt"]), q, k, v, n)
    assert "clamp" in listing(gm)
    exact = [x[:, :, :17].double() for x in (k, v)]
    want = q.double()
    for _ in range(2):
        want = F.scaled_dot_product_attention(want, *exact, enable_gqa=True)
    torch.testing.assert_close(got, want.float())


def test_a_dynamic_number_of_keys_stays_a_mask() -> None:
    q, k, v, n = operands(1, 17)

    def step(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, (torch.arange(k.shape[2]) < n)[None], enable_gqa=True)

    for x in (k, v):
        torch._dynamo.mark_dynamic(x, 2)
    _, gm, got = run_rewritten(step, q, k, v, n)
    assert "clamp" not in listing(gm)
    torch.testing.assert_close(got, step(q, k, v, n))


class TestListing(expecttest.TestCase):
    def test_a_step_of_transformers(self) -> None:
        def mask_of(n: Tensor) -> Tensor:
            position, keys = torch.arange(1) + n, arange() + 0
            mask = keys[None, None, None, :] <= position[None, None, :, None]
            n.add_(1)
            return mask.expand(1, -1, 1, S).contiguous()

        gm = capture(attend(mask_of), *operands(1, 17))
        rewrite(gm)
        self.assertExpectedInline(
            listing(gm),
            """\
arange = arange(1)
position = add(arange, l_n_)
arange_1 = arange(40)
keys = add(arange_1, 0)
getitem = getitem(keys, (None, None, None, slice(None, None, None)))
getitem_1 = getitem(position, (None, None, slice(None, None, None), None))
clamp = clamp(getitem_1, -1, 39)
add_2 = add(clamp, 1)
reshape = reshape(add_2, -1)
add_ = add_(l_n_, 1)
decode_attention_default = decode_attention.default(l_q_, l_k_, l_v_, None, reshape, None, None)
getitem_2 = getitem(decode_attention_default, 0)
decode_attention_default_1 = decode_attention.default(getitem_2, l_k_, l_v_, None, reshape, None, None)
getitem_3 = getitem(decode_attention_default_1, 0)
return (getitem_3)""",
        )


if __name__ == "__main__":
    expecttest.main()
