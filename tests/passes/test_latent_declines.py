"""Latents that are left to the other passes, each with the reason."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from graphs import capture, listing
from latent_forms import (
    LATENT,
    NOPE,
    ROPE,
    B,
    H,
    R,
    S,
    V,
    attend,
    clones,
    compiled,
    copied,
    expand,
    heads,
    inputs,
    joined,
    lora,
    lora_of_heads,
    parts_of_query,
    sdpa,
)

from tatten.passes import Declined, Rewritten, cost, rewrite
from tatten.passes.calls import op_name
from tatten.passes.reasons import Reason


def with_bias(q, c, rope, w, mask):
    own, values = heads(F.linear(c, w, w[:, 0])).split((NOPE, V), dim=-1)
    return sdpa(q, copied(own, rope), values, mask)


def other_values(q, c, rope, w, mask):
    own, _ = expand(c, w)
    return sdpa(q, copied(own, rope), heads(F.linear(c + 1, w))[..., NOPE:], mask)


def other_columns(q, cache, rope, w, mask):
    """Latents of the same memory, one column further."""
    own, values = expand(cache[..., :R], w)[0], expand(cache[..., 1 : R + 1], w)[1]
    return sdpa(q, joined(own, rope), values, mask)


def keys_returned(q, c, rope, w, mask):
    own, values = expand(c, w)
    keys = copied(own, rope)
    return sdpa(q, keys, values, mask), keys


def values_used(q, c, rope, w, mask):
    own, values = expand(c, w)
    return sdpa(q, copied(own, rope), values, mask) + values.sum()


def between(write):
    def fn(q, c, rope, w, mask):
        own, values = expand(c, w)
        keys = copied(own, rope)
        write(q, c, rope, w, keys, values)
        return sdpa(q, keys, values, mask)

    return fn


def gap(q, c, rope, w, mask):
    own, values = expand(c, w)
    keys = own.new_zeros(B, H, S, NOPE + ROPE)
    keys[..., : NOPE - 1].copy_(own[..., 1:])
    keys[..., NOPE:].copy_(rope.expand(-1, H, -1, -1))
    return sdpa(q, keys, values, mask)


def overlap(q, c, rope, w, mask):
    own, values = expand(c, w)
    keys = own.new_empty(B, H, S, NOPE + ROPE)
    keys[..., NOPE:].copy_(rope.expand(-1, H, -1, -1))
    keys[..., :NOPE].copy_(own)
    keys[..., 4 : 4 + ROPE].copy_(rope.expand(-1, H, -1, -1))
    return sdpa(q, keys, values, mask)


def in_half(q, c, rope, w, mask):
    own, values = heads(F.linear(c.float(), w.float()).double()).split((NOPE, V), dim=-1)
    return sdpa(q, copied(own, rope), values, mask)


def two_shared(q, c, rope, w, mask):
    own, values = expand(c, w)
    halves = (x.expand(-1, H, -1, -1) for x in rope.split(ROPE // 2, dim=-1))
    return sdpa(q, torch.cat((own, *halves), dim=-1), values, mask)


def written(fill):
    """Keys that something fills with a head's own columns, before those that heads share are assigned."""

    def fn(q, c, rope, w, mask):
        own, values = expand(c, w)
        keys = own.new_zeros(B, H, S, NOPE + ROPE)
        fill(keys, own)
        keys[..., NOPE:] = rope
        return sdpa(q, keys, values, mask)

    return fn


def cast(keys, own):
    keys[..., :NOPE] = own.float()


def every_other(keys, own):
    keys[..., ::2] = own[..., :10]


def some_rows(keys, own):
    keys[:, :, :3, :NOPE] = own[:, :, :3]


def reversed_heads(keys, own):
    keys[:, [3, 2, 1, 0], :, :NOPE] = own


def numbers(keys, own):
    keys[..., :NOPE] = 0.5


def scattered(q, c, rope, w, mask):
    """The last of the tensors that are put together is written, which does not occur in a functional graph."""
    own, values = expand(c, w)
    keys = torch.slice_scatter(own.new_zeros(B, H, S, NOPE + ROPE), own, 3, 0, NOPE)
    keys = torch.slice_scatter(keys, rope.expand(-1, H, -1, -1), 3, NOPE, NOPE + ROPE)
    keys.mul_(2)
    return sdpa(q, keys, values, mask)


def weight_of_sequences(q, c, rope, w, mask):
    own = torch.einsum("bsr,bhdr->bhsd", c[:, 0], w.view(H, -1, R)[:, :NOPE].expand(B, -1, -1, -1))
    return sdpa(q, joined(own, rope), expand(c, w)[1], mask)


def one_rank(q, c, rope, w, mask):
    """`einsum` broadcasts what it sums over."""
    own = torch.einsum("bsr,hdr->bhsd", c[:, 0, :, :1], w.view(H, -1, R)[:, :NOPE])
    return sdpa(q, joined(own, rope), expand(c, w)[1], mask)


def broadcast(q, c, rope, w, mask):
    """A copy that broadcasts: all heads get those of the first."""
    own, values = expand(c, w)
    keys = own.new_empty(B, H, S, NOPE + ROPE)
    keys[..., :NOPE].copy_(own[:, :1])
    keys[..., NOPE:].copy_(rope.expand(-1, H, -1, -1))
    return sdpa(q, keys, values, mask)


DECLINED = {
    "projection lora": lora,
    "projection lora of heads": lora_of_heads,
    "projection bias": with_bias,
    "projection dequantised": lambda q, c, rope, w, mask: attend(q, c, rope, w * 2, mask),
    "projection other latents": other_values,
    "projection other columns": lambda q, c, rope, w, mask: other_columns(q, torch.cat((c, c + 1), -1), rope, w, mask),
    "projection_used keys": keys_returned,
    "projection_used values": values_used,
    "written_between latents": between(lambda q, c, rope, w, keys, values: c.mul_(2)),
    "written_between rope": between(lambda q, c, rope, w, keys, values: rope.mul_(2)),
    "written_between weight": between(lambda q, c, rope, w, keys, values: w.mul_(2)),
    "written_between keys": between(lambda q, c, rope, w, keys, values: keys.mul_(2)),
    "written_between key": between(lambda q, c, rope, w, keys, values: keys[..., 3:5].zero_()),
    "written_between values": between(lambda q, c, rope, w, keys, values: values.mul_(2)),
    "pieces gap": gap,
    "pieces overlap": overlap,
    "pieces broadcast": broadcast,
    "pieces two": two_shared,
    "written_between cast": written(cast),
    "written_between every other": written(every_other),
    "written_between some rows": written(some_rows),
    "written_between reversed": written(reversed_heads),
    "written_between numbers": written(numbers),
    "written_between scattered": scattered,
    "projection weights": weight_of_sequences,
    "projection one rank": one_rank,
    "projection half": in_half,
}
NOT_LATENT = {
    "no pieces": lambda q, c, rope, w, mask: sdpa(q[..., :NOPE], *expand(c, w * 2), mask),
    "own rope": lambda q, c, rope, w, mask: attend(
        q, c, rope, w, mask, lambda own, r: torch.cat((own, own[..., :ROPE]), -1)
    ),
    "cached keys": lambda q, c, rope, w, mask: sdpa(q[..., :V], *(c[..., :V].expand(B, H, S, V),) * 2, mask),
}


def test_what_float16_cannot_hold_is_left_alone() -> None:
    """Query times weight is beyond its range where keys and scores are not."""
    factors = {"query": 500, "latent": 1e-3, "rope": 1, "weight": 200}
    args = [x * factor for x, factor in zip(inputs(dtype=torch.float16)[:4], factors.values(), strict=True)]
    (finding,) = rewrite(capture(attend, *args)).findings
    assert isinstance(finding, Declined)
    assert finding.decline.reason is Reason.DTYPE
    got, want = compiled(attend, args), attend(*(x.double() for x in args))
    torch.testing.assert_close(got.double(), want, rtol=0.02, atol=0.02)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", DECLINED)
def test_declines(name: str) -> None:
    """Such a call is left to the decode pass, whose report says so."""
    fn, args = DECLINED[name], inputs()
    gm = capture(fn, *clones(args))
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Rewritten)
    assert finding.op == "tatten.decode_attention.default"
    assert f"not absorbed [{Reason(name.split()[0]).value}]: " in finding.note
    assert Reason(name.split()[0]).help
    wanted, given = clones(args), clones(args)
    want, got = fn(*wanted), compiled(fn, given)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(given, wanted, strict=True))


def test_two_calls_that_share_a_projection_decline_it() -> None:
    """Each is decided alone: the other one would need what is projected anyway."""

    def fn(q, c, rope, w, mask):
        own, values = expand(c, w)
        keys = copied(own, rope)
        return sdpa(q, keys, values, mask) - sdpa(q + 1, keys, values)

    gm = capture(fn, *inputs())
    first, second = rewrite(gm).findings
    assert isinstance(first, Rewritten)
    assert "not absorbed [projection_used]: `scaled_dot_product_attention_1` uses" in first.note
    assert isinstance(second, Declined)
    assert second.decline.reason is Reason.PROJECTION_USED
    assert "uses" in second.decline.detail
    assert (compiled(fn, inputs()) - fn(*inputs())).abs().max() < 1e-12


def halves_of_query(q, c, rope, w, mask):
    parts = q[..., :4] + 1, q[..., 4:NOPE] - 1, q[..., NOPE:] * 2
    return attend(torch.cat(parts, dim=-1), c, rope, w, mask)


def last_columns_apart(q, c, rope, w, mask):
    """No kernel has to take a tensor whose columns are not neighbours; `cat` made neighbours of them."""
    own, q_rope = (x.mT.contiguous().mT for x in (q[..., :NOPE] + 1, q[..., NOPE:] - 1))
    return attend(torch.cat((own, q_rope), dim=-1), c, rope, w, mask)


def two_readers(q, c, rope, w, mask):
    query = torch.cat((q[..., :NOPE] + 1, q[..., NOPE:] - 1), dim=3)
    return attend(query, c, rope, w, mask) + query.sum()


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("fn", "q_len", "read", "left"),
    [
        (parts_of_query, 1, ("add", "sub"), False),
        (parts_of_query, 5, ("add", "sub"), False),
        (functools.partial(parts_of_query, whole=lambda x, dim: torch.cat(x, dim) * 2), 1, ("narrow", "narrow"), True),
        (functools.partial(parts_of_query, change=lambda own, *_: own.mul_(2)), 1, ("narrow", "sub"), True),
        (functools.partial(parts_of_query, change=lambda _, rope, __: rope.add_(1)), 1, ("add", "narrow"), True),
        (functools.partial(parts_of_query, change=lambda *x: x[2].add_(1)), 1, ("narrow", "narrow"), True),
        (halves_of_query, 1, ("narrow", "mul"), True),
        (last_columns_apart, 5, ("narrow", "narrow"), True),
        (two_readers, 1, ("add", "sub"), True),
    ],
    ids=[
        *("one", "several", "product", "own_written", "rope_written", "whole_written", "halves", "columns_apart"),
        "two_readers",
    ],
)
def test_reads_a_query_where_it_was_before_it_was_one(fn, q_len: int, read: tuple[str, str], left: bool) -> None:
    args = inputs(q_len)
    gm = capture(fn, *clones(args))
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Rewritten)
    listing(gm)
    (op,) = (x for x in gm.graph.nodes if x.target is torch.ops.tatten.latent_attention.default)
    product = next(x for x in gm.graph.nodes if x.target is torch.bmm)
    own = product.args[0].args[0].args[0]  # of a `flatten` of a `transpose`
    assert (op_name(own), op_name(op.args[1])) == read
    assert ("cat" in {op_name(x) for x in gm.graph.nodes}) == left
    assert (compiled(fn, clones(args)) - fn(*clones(args))).abs().max() < 1e-12


@pytest.mark.parametrize("name", NOT_LATENT)
def test_other_attention_is_none_of_its_business(name: str) -> None:
    (finding,) = rewrite(capture(NOT_LATENT[name], *inputs())).findings
    assert isinstance(finding, Rewritten)
    assert "absorbed" not in finding.note
    assert finding.op != LATENT


def test_no_latents_are_left_alone() -> None:
    """Attention to nothing is 0, and the op takes at least one latent."""

    def fn(q, c, rope, w):
        own, values = F.linear(c, w).view(B, 0, H, NOPE + V).transpose(1, 2).split((NOPE, V), dim=-1)
        return sdpa(q, torch.cat((own, rope.expand(-1, H, -1, -1)), dim=-1), values)

    q, c, rope, w, _ = inputs()
    args = q, c[:, :, :0], rope[:, :, :0], w
    (finding,) = rewrite(capture(fn, *args)).findings
    assert isinstance(finding, Declined)
    assert finding.decline.reason is Reason.EMPTY
    assert torch.equal(compiled(fn, args), torch.zeros(B, H, 1, V, dtype=torch.float64))


def test_autocast_is_left_alone() -> None:
    """It rounds what is expanded, which float32 latents are not."""

    def fn(q, c, rope, w, mask):
        with torch.autocast("cpu", torch.bfloat16):
            return attend(q, c, rope, w, mask)

    (finding,) = rewrite(capture(fn, *inputs(dtype=torch.float32))).findings
    assert isinstance(finding, Declined)
    assert finding.decline.reason is Reason.DTYPE


def test_what_no_pass_takes_has_the_reason_of_this_one() -> None:
    """Without a mask SDPA reads every key once, but what it reads was expanded."""
    args = inputs()

    def fn(q, c, rope, w, mask):
        return attend(q, c, rope, w * 2)

    gm = capture(fn, *args)
    before = listing(gm)
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Declined)
    assert finding.decline.reason is Reason.PROJECTION
    assert "computed by" in finding.decline.detail
    assert listing(gm) == before


def test_the_cost_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for extra, taken in ((0.0, True), (1e9, False)):
        free = cost.DecodeRates(numbers_per_us=1.0, call_us=0.0)
        monkeypatch.setitem(cost.RATES, "cpu", cost.Rates(1.0, extra, decode=free))
        (finding,) = rewrite(capture(attend, *inputs())).findings
        assert isinstance(finding, Rewritten)
        assert (finding.op == LATENT) is taken
        assert ("not absorbed [latent_small]" in finding.note) is not taken


def test_many_queries_are_cheaper_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products with the weight are then as many for the queries as for the keys, and those with latents are wider."""
    monkeypatch.setitem(cost.RATES, "cpu", cost.Rates(1e9, 0.0, flops_per_us=1.0))
    weight = R * (NOPE + V)
    most = S * weight // (weight + S * (2 * R - NOPE - V))
    for q_len in (1, most, most + 1):
        (finding,) = rewrite(capture(attend, *inputs(q_len))).findings
        assert (finding.op == LATENT) is (q_len <= most)
