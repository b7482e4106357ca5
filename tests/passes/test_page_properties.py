"""Random programs that gather pages give, rewritten, what they give in eager mode."""

from __future__ import annotations

import fuzz
import hypothesis.strategies as st
import pytest
import torch
from graphs import run_rewritten
from hypothesis import given
from page_forms import FORMS, Form, attend, inputs


def wrapped(form: Form, draw) -> Form:
    """The form with views before and after that change nothing."""
    before = draw(st.sampled_from([lambda x: x, lambda x: x[:], lambda x: x.unsqueeze(0).squeeze(0)]))
    cast = draw(st.sampled_from([lambda t: t, lambda t: t.long(), lambda t: t.clone(), lambda t: t[:, :]]))
    after = draw(
        st.sampled_from(
            [
                lambda x: x,
                lambda x: x.contiguous(),
                lambda x: x.transpose(1, 2).transpose(2, 1),
                lambda x: x.flatten(2).unflatten(2, x.shape[2:]),
                lambda x: x * 2,
                lambda x: x.flip(0),
            ]
        )
    )
    return Form(lambda x, t: after(form.gather(before(x), cast(t))), form.page, form.layout, form.wraps)


@pytest.mark.parametrize("n", [25, pytest.param(300, marks=pytest.mark.slow)])
def test_drawn_forms(n: int) -> None:
    """And at least a quarter of them are read in pages."""
    taken = []

    @fuzz.settings(n)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        draw = data.draw
        name, q_len, seed = draw(st.sampled_from([*FORMS])), draw(st.sampled_from([1, 3])), draw(st.integers(0, 99))
        form = wrapped(FORMS[name], draw)
        sizes = {
            "batch": draw(st.integers(1, 4)),
            "columns": draw(st.integers(1, 7)),
            "n_pages": draw(st.integers(1, 30)),
        }
        q, k, v, table, mask = inputs(form, seed, q_len=q_len, **sizes)
        kind = draw(st.sampled_from(["lengths", "none", "random", "bias"]))
        if kind == "none":
            mask = None
        elif kind == "random":
            mask = torch.rand(mask.shape) > 0.5
            mask[..., 0] = True
        elif kind == "bias":
            mask = torch.where(mask, torch.randn(mask.shape, dtype=q.dtype), torch.finfo(torch.float32).min)
        write = draw(st.sampled_from([None, "before", "between"]))

        def fn(q, k, v, table, mask):
            if write == "before":
                k.mul_(2)
            keys, values = form.gather(k, table), form.gather(v, table)
            if write == "between":
                v.mul_(2)
            return attend(q, keys, values, mask)

        want = fn(q, k.clone(), v.clone(), table, mask)
        _, gm, out = run_rewritten(fn, q, k.clone(), v.clone(), table, mask)
        torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
        taken.append(any("block_table" in x.kwargs for x in gm.graph.nodes))

    run()
    assert sum(taken) * 4 > len(taken), f"{sum(taken)} of {len(taken)}"
