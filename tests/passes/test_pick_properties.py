"""Random masks, some made of indices: attention reads no other keys than the program does."""

from __future__ import annotations

from collections.abc import Callable

import fuzz
import hypothesis.strategies as st
import pytest
import torch
from graphs import run_rewritten
from hypothesis import given
from pick_forms import KV, B, H, L, attend, inputs, lowest
from torch import Tensor

from tatten.passes import cost

S = 128  # keys; indices are fewer than a third of them
Mask = Callable[[Tensor, Tensor], Tensor]  # of scores and the keys that count, both `[B, L, S]`
Draw = Callable[[st.SearchStrategy], object]


def _indices(draw: Draw) -> Mask:
    """Indices `[B, L, picks]`: of a top-k, or some that may be equal."""
    k, sign = draw(st.integers(1, 9)), draw(st.sampled_from([1, -1]))

    def top(scores, base):
        return (scores * sign).masked_fill(~base, -torch.inf).topk(k, -1)[1]

    return draw(
        st.sampled_from(
            [
                top,
                lambda s, b: top(s, b).to(torch.int32).long(),
                lambda s, b: torch.cat((top(s, b), top(-s, b)), -1),
                lambda s, b: top(s, b) % 5,
                lambda s, b: top(s, b)[..., : max(1, k // 2)],
                lambda s, b: top(s, b)[:, :1].expand(B, L, k),
                lambda s, b: top(s, b).masked_fill(~b.gather(-1, top(s, b)), 0),
            ]
        )
    )


def _bools(draw: Draw, depth: int) -> Mask:
    """A bool tensor `[B, L, S]`."""
    kind = draw(st.integers(0, 3 if depth == 0 else 9))
    if kind < 4:
        return _leaf(draw, kind)
    a = _bools(draw, depth - 1)
    if kind == 4:
        return lambda s, x: ~a(s, x)
    if kind == 5:
        return lambda s, x: a(s, x).float() * 2 > 1
    b = _bools(draw, depth - 1)
    if kind == 6:
        return lambda s, x: a(s, x) | b(s, x)
    if kind == 7:
        value = draw(st.booleans())
        return lambda s, x: a(s, x).masked_fill(b(s, x), value)
    return lambda s, x: a(s, x) & b(s, x)


def _leaf(draw: Draw, kind: int) -> Mask:
    indices = _indices(draw)
    if kind == 0:
        return draw(st.sampled_from([lambda s, x: x, lambda s, x: s > 0]))
    if kind == 1:
        return lambda s, x: ~s.new_ones((B, L, S), dtype=torch.bool).scatter(-1, indices(s, x), False)
    if kind == 2:
        return lambda s, x: torch.zeros(B, L, S).scatter(-1, indices(s, x), 1.0) == 1

    def in_place(scores, base):
        counts = torch.zeros(B, L, S, dtype=torch.int32)
        named = indices(scores, base)
        counts.scatter_add_(-1, named, (named > 2).to(torch.int32))
        return counts.ne(0)

    return in_place


def _mask(draw: Draw) -> Mask:
    """A mask `[B, 1 or H, L, S]`, bool or additive."""
    bools = _bools(draw, draw(st.integers(0, 3)))
    kind, value = draw(st.integers(0, 4)), draw(st.sampled_from([-torch.inf, lowest(), -50.0]))
    if kind == 0:
        return lambda s, x: bools(s, x)[:, None]
    if kind == 1:
        return lambda s, x: bools(s, x)[:, None].expand(B, KV, L, S).repeat_interleave(H // KV, 1)
    other = _bools(draw, 1)
    if kind == 2:
        return lambda s, x: torch.zeros(B, 1, L, S, dtype=torch.float64).masked_fill(~bools(s, x)[:, None], value)
    if kind == 3:
        return lambda s, x: (
            s.double()[:, None].masked_fill(~bools(s, x)[:, None], value).masked_fill(~other(s, x)[:, None], value)
        )
    second = draw(st.sampled_from([-torch.inf, lowest(), -1.0]))

    def added(scores, base):
        one, two = (
            torch.zeros(B, L, S, dtype=torch.float64).masked_fill(~x(scores, base), number)
            for x, number in ((bools, value), (other, second))
        )
        return (one + two).unsqueeze(1)

    return added


@pytest.mark.slow
def test_masks_mean_the_same_read_by_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a tenth of them are."""
    monkeypatch.setitem(cost.RATES, "cpu", cost.Rates(1.0, 0.0, 1.0))
    taken = []

    @fuzz.settings(60)
    @given(data=st.data(), seed=st.integers(0, 9))
    def run(data: st.DataObject, seed: int) -> None:
        fn = attend(_mask(data.draw))
        _, gm, out = run_rewritten(fn, *inputs(seed))
        taken.append(any("indices" in x.kwargs for x in gm.graph.nodes))
        torch.testing.assert_close(out, fn(*inputs(seed)), rtol=0, atol=1e-12, equal_nan=True)

    run()
    assert sum(taken) > len(taken) / 10, f"{sum(taken)} of {len(taken)}"
