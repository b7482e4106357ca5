"""Latents that sequences share, or that were concatenated: each stored segment is attended to once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import capture
from torch import Tensor

from tatten.passes import Rewritten, cost, rewrite
from tatten.passes.symbolic import tensor_of

pytestmark = pytest.mark.drawn(3)

H, R, NOPE, ROPE, V = 4, 24, 12, 8, 16
PROMPT, SUFFIX = 40, 6


@pytest.fixture(autouse=True)
def _pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cost.RATES, "cpu", cost.Rates(1.0, 0.0, 1.0))


def inputs(prompts: int = 2, n: int = 3, q_len: int = 1) -> list[Tensor]:
    torch.manual_seed(0)
    batch = prompts * n
    shapes = [(batch, H, q_len, NOPE + ROPE), (H * (NOPE + V), R)]
    shapes += [(prompts, 1, PROMPT, R), (prompts, 1, PROMPT, ROPE), (batch, 1, SUFFIX, R), (batch, 1, SUFFIX, ROPE)]
    mask = torch.rand(batch, 1, q_len, PROMPT + SUFFIX) < 0.7
    mask[..., -1] = True
    return [*(torch.randn(x, dtype=torch.float64) for x in shapes), mask]


def spread(x: Tensor, batch: int) -> Tensor:
    return x[:, None].expand(-1, batch // x.shape[0], *x.shape[1:]).flatten(0, 1)


def attend(q: Tensor, w: Tensor, c: Tensor, rope: Tensor, mask: Tensor | None) -> Tensor:
    kv = F.linear(c, w).view(q.shape[0], -1, H, NOPE + V).transpose(1, 2)
    own, values = kv.split((NOPE, V), dim=-1)
    keys = torch.cat((own, rope.expand(-1, H, -1, -1)), dim=-1)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=0.3)


def forked(q, w, c, rope, c_new, rope_new, mask):
    latents, ropes = (torch.cat((spread(x, q.shape[0]), y), dim=2) for x, y in ((c, c_new), (rope, rope_new)))
    return attend(q, w, latents, ropes, mask)


def heads_last(q, w, c, rope, c_new, rope_new, mask):
    """Caches have no dim for heads, and keys are put together as `[batch, length, heads, head_dim]`."""
    batch = q.shape[0]
    latents, ropes = (torch.cat((spread(x[:, 0], batch), y[:, 0]), dim=1) for x, y in ((c, c_new), (rope, rope_new)))
    own, values = F.linear(latents, w).unflatten(-1, (H, NOPE + V)).split((NOPE, V), dim=-1)
    keys = own.new_empty(*own.shape[:-1], NOPE + ROPE)
    keys[..., :NOPE], keys[..., NOPE:] = own, ropes[:, :, None]
    return F.scaled_dot_product_attention(q, keys.transpose(1, 2), values.transpose(1, 2), mask, scale=0.3)


def without_mask(q, w, c, rope, c_new, rope_new, mask):
    return forked(q, w, c, rope, c_new, rope_new, None)


def one_prefix(q, w, c, rope, c_new, rope_new, mask):
    return attend(q, w, spread(c[:1], q.shape[0]), spread(rope[:1], q.shape[0]), mask[..., :PROMPT])


def nothing_new(q, w, c, rope, c_new, rope_new, mask):
    """The first step: nothing was generated yet."""
    return forked(q, w, c, rope, c_new[:, :, :0], rope_new[:, :, :0], mask[..., :PROMPT])


def no_prompt(q, w, c, rope, c_new, rope_new, mask):
    return forked(q, w, c[:, :, :0], rope[:, :, :0], c_new, rope_new, mask[..., :SUFFIX])


def appended(q, w, c, rope, c_new, rope_new, mask):
    """No sequences share what is concatenated."""
    return attend(q, w, torch.cat((c_new, c_new + 1), dim=2), torch.cat((rope_new, rope_new), dim=2), mask[..., :12])


def cut_otherwise(q, w, c, rope, c_new, rope_new, mask):
    ropes = torch.cat((spread(rope[:, :, :9], q.shape[0]), spread(rope[:, :, 9:], q.shape[0]), rope_new), dim=2)
    return attend(q, w, torch.cat((spread(c, q.shape[0]), c_new), dim=2), ropes, mask)


def written(q, w, c, rope, c_new, rope_new, mask):
    latents, ropes = (torch.cat((spread(x, q.shape[0]), y), dim=2) for x, y in ((c, c_new), (rope, rope_new)))
    c.mul_(2)
    return attend(q, w, latents, ropes, mask)


CASES: dict[Callable[..., Tensor], list[int]] = {  # sequences that each op reads latents of
    forked: [2, 6],
    heads_last: [2, 6],
    without_mask: [2, 6],
    one_prefix: [1],
    nothing_new: [2],
    no_prompt: [6],
    appended: [6],
    cut_otherwise: [6],
    written: [6],
}


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
def test_each_segment_is_read_where_it_is_stored(fn: Callable[..., Tensor], q_len: int) -> None:
    args = inputs(q_len=q_len)
    gm = capture(fn, *[x.clone() for x in args])
    report = rewrite(gm)
    assert [type(x) for x in report.findings] == [Rewritten]
    latents = [x.args[2] for x in gm.graph.nodes if x.target is torch.ops.tatten.latent_attention.default]
    assert [tensor_of(x).shape[0] for x in latents] == CASES[fn]
    joined = [x for x in gm.graph.nodes if x.target is torch.cat]
    assert bool(joined) == (fn in (no_prompt, appended, cut_otherwise, written)), (
        "what was only concatenated for attention stays"
    )
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(fn, backend="tatten", options={"inner": "eager"})(*[x.clone() for x in args])
    torch.testing.assert_close(got, fn(*[x.clone() for x in args]), rtol=1e-12, atol=1e-12)


def selecting(floor: float | None) -> Callable[..., Tensor]:
    """Each query picks 6 keys, among those of the prompt and its own."""

    def fn(q, w, c, rope, c_new, rope_new, mask):
        scores = (q[..., :1] * torch.arange(PROMPT + SUFFIX)).sin()[:, :1]
        picks = scores.masked_fill(~mask, -torch.inf).topk(6, -1).indices
        mask = mask & torch.zeros_like(mask).scatter(-1, picks, True)
        mask = mask if floor is None else torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, floor)
        return forked(q, w, c, rope, c_new, rope_new, mask)

    return fn


@pytest.mark.parametrize("floor", [None, -torch.inf, torch.finfo(torch.float32).min])
def test_picks_are_those_of_each_segment(floor: float | None) -> None:
    fn = selecting(floor)
    gm = capture(fn, *inputs(q_len=2))
    (finding,) = rewrite(gm).findings
    ops = [x for x in gm.graph.nodes if x.target is torch.ops.tatten.latent_attention.default]
    assert [tensor_of(x.args[2]).shape[0] for x in ops] == [2, 6]
    finite = floor is not None and floor > -torch.inf
    assert ["indices" in x.kwargs for x in ops] == [not finite] * 2, finding.note
    assert ("not read by indices [picks]: 6 of 46 keys by top-k, others have the bias" in finding.note) == finite
    assert any(x.target == "scatter" for x in gm.graph.nodes) == finite
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(fn, backend="tatten", options={"inner": "eager"})(*inputs(q_len=2))
    torch.testing.assert_close(got, fn(*inputs(q_len=2)), rtol=1e-12, atol=1e-12)
