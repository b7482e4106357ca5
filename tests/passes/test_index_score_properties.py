"""Random programs around the scores of an indexer: rewritten or not, they compute the same."""

from __future__ import annotations

from collections.abc import Callable

import fuzz
import hypothesis.strategies as st
import pytest
import torch
from graphs import run_rewritten
from hypothesis import given
from index_forms import inputs
from torch import Tensor

from tatten.passes import Rewritten

Draw = Callable[[st.SearchStrategy], object]
SCALES = [
    lambda x: x * 0.25,
    lambda x: x / 4,
    lambda x: 0.5 * x,
    lambda x: x.mul_(2),
    lambda x: x.float(),
    lambda x: x.clone(),
]
OTHER_STEPS = [
    lambda x: x * -0.5,
    lambda x: x * torch.tensor([0.5, 2.0]).amax(),
    lambda x: x.to(torch.bfloat16).float(),
    lambda x: x + 0.125,
    lambda x: x.flip(-1),
    lambda x: x.roll(1, 2),
    lambda x: x * x.amax(-1, keepdim=True),
]
PRODUCTS = [  # [B, L, H, S], or heads first
    (lambda q, k: torch.matmul(q, k.transpose(-1, -2).unsqueeze(1)), 2),
    (lambda q, k: q @ k[:, None].mT, 2),
    (lambda q, k: torch.einsum("blhd,bsd->blhs", q, k), 2),
    (lambda q, k: torch.einsum("blhd,bsd->bhls", q, k), 1),
    (lambda q, k: q.transpose(1, 2) @ k.mT[:, None], 1),
    (lambda q, k: q @ k.mT[:, None].expand(-1, q.shape[1], -1, -1), 2),
    (lambda q, k: (q @ k.mT[:, None]).transpose(1, 2), 1),  # which isn't taken
    (lambda q, k: q @ k.mT[:, None].flip(-1), 2),
]
RELUS = [
    torch.relu,
    lambda x: x.relu_(),
    lambda x: x.clamp(min=0),
    lambda x: x.clamp_min(0.0),
    torch.nn.functional.relu,
]
KEYS = [  # concatenated, shared by sequences, and dequantised
    lambda k: k,
    lambda k: k,
    lambda k: torch.cat((k[:, :50], k[:, 50:]), 1),
    lambda k: torch.cat((k[:1, :50].expand(k.shape[0], -1, -1), k[:, 50:]), 1),
    lambda k: torch.cat((k[:1].expand(k.shape[0], -1, -1)[:, :96], k[:, 96:]), dim=-2),
    lambda k: (k * 20).round().clamp(-127, 127).to(torch.int8).float() * 0.05,
    lambda k: (k / 4).to(torch.float8_e4m3fn).float() * (k[..., :1].float().abs() + 1),
    lambda k: (k * 20).clamp(-127, 127).to(torch.int8).float() * 0.05 + 0.5,
]
OTHER_RELUS = [torch.abs, lambda x: x.clamp(min=0, max=2), lambda x: x.clamp(min=0.5), lambda x: x]
MASKS = [
    lambda x, m: x.masked_fill(~m, -torch.inf),
    lambda x, m: x.masked_fill(m, -torch.inf),
    lambda x, m: torch.where(m, x, -torch.inf),
    lambda x, m: torch.where(m, -torch.inf, x),
    lambda x, m: x.masked_fill_(~m[:1], -torch.inf),
    lambda x, m: x + torch.zeros(m.shape).masked_fill(~m, -torch.inf),
    lambda x, m: x.masked_fill(~m[0, 0], -1e9),
    lambda x, m: torch.where(~m[:, :1], -torch.inf, x),
    lambda x, m: x,
]


def _sums(heads: int) -> list[Callable[[Tensor, Tensor], Tensor]]:
    """Weighted sums over `heads`, which is a dim, of scores and weights `[B, L, H]`."""
    ours = "blhs" if heads == 2 else "bhls"
    sums = [
        lambda x, w: (x * (w if heads == 2 else w.transpose(1, 2))[..., None]).sum(heads),
        lambda x, w: ((w if heads == 2 else w.mT)[..., None] * x).sum(dim=heads, keepdim=True).squeeze(heads),
        lambda x, w: torch.einsum(f"{ours},blh->bls", x, w),
        lambda x, w: torch.einsum(f"blh,{ours}->bls", w, x),
        lambda x, w: (x * (w if heads == 2 else w.mT)[..., None]).sum((heads,)).mul(0.5),
        lambda x, w: (x * x[..., :1]).sum(heads),
    ]
    if heads == 2:
        sums += [lambda x, w: (w[:, :, None] @ x)[:, :, 0], lambda x, w: torch.matmul(w.unsqueeze(-2), x).squeeze(2)]
    return sums


def _steps(draw: Draw) -> Callable[[Tensor], Tensor]:
    """Up to two scales; once in a while something else."""
    others = OTHER_STEPS if draw(st.integers(0, 7)) == 7 else []
    steps = draw(st.lists(st.sampled_from([*SCALES, *others]), max_size=2))

    def apply(x: Tensor) -> Tensor:
        for step in steps:
            x = step(x)
        return x

    return apply


def _program(draw: Draw) -> Callable[..., object]:
    product, heads = draw(st.sampled_from(PRODUCTS))
    relu = draw(st.sampled_from(RELUS * 3 + OTHER_RELUS))
    before, after, last = _steps(draw), _steps(draw), _steps(draw)
    sum_over_heads, mask = draw(st.sampled_from(_sums(heads))), draw(st.sampled_from(MASKS))
    read, written, stored = draw(st.integers(0, 19)), draw(st.integers(0, 19)), draw(st.sampled_from(KEYS))

    def program(q: Tensor, k: Tensor, w: Tensor, m: Tensor) -> object:
        k, m = k.clone(), m.clone()
        wide = stored(k).float()
        products = product(q.float(), wide)
        if written in (16, 17):
            (k, wide)[written - 16][:, 0] = 2
        scores = after(relu(before(products)))
        if written == 18:
            m[..., 1] = True
        sums = sum_over_heads(scores, w.float())
        if written == 19:
            k[:, 1] = 1
        out = last(mask(sums, m))
        return (out, *((products,), (scores,), (sums,), (wide,), (k,))[read - 15]) if read >= 15 else out

    return program


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_programs_compute_the_same(dtype: torch.dtype) -> None:
    """And a fifth of them is rewritten."""
    taken = []

    @fuzz.settings(50)
    @given(data=st.data(), seed=st.integers(0, 9), length=st.integers(1, 3))
    def run(data: st.DataObject, seed: int, length: int) -> None:
        program, args = _program(data.draw), inputs(dtype, seed, length)
        want = program(*args)
        findings, gm, got = run_rewritten(program, *args)
        taken.append(any(x.target is torch.ops.tatten.index_scores.default for x in gm.graph.nodes))
        assert taken[-1] == any(isinstance(x, Rewritten) for x in findings)
        # Two ways to sum round a score apart by some 1e-6, and bfloat16 keeps 8 bits of one.
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3, equal_nan=True)

    run()
    assert sum(taken) > len(taken) / 5, f"{sum(taken)} of {len(taken)}"
