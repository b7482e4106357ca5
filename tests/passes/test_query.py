"""Queries that a program multiplied by a number, or merged with the batch, are read as they were before."""

from __future__ import annotations

import expecttest
import pytest
import torch
import torch.nn.functional as F
from graphs import capture, listing, run_rewritten
from torch._ops import OpOverload

from tatten.passes import Rewritten, rewrite
from tatten.passes.calls import op_name

B, H, KV, S, D = 2, 4, 2, 24, 16


def tensors(dtype=torch.float64, q_len=1):
    torch.manual_seed(0)
    x = torch.randn(B, q_len, H * D, dtype=dtype)
    k, v = torch.randn(2, B, KV, S, D, dtype=dtype)
    return x, k, v, (torch.arange(S) < torch.tensor([9, 20])[:, None, None, None])


def heads(x):
    return x.view(B, -1, H, D).transpose(1, 2)


def attend(q, k, v, m, scale=1.0):
    return F.scaled_dot_product_attention(q, k, v, m, scale=scale, enable_gqa=True)


def bart(x, k, v, m):
    """Attention that is written out, with heads in the batch."""
    k, v = (y.repeat_interleave(H // KV, 1).reshape(B * H, S, D) for y in (k, v))
    q = heads(x * 0.25).reshape(B * H, -1, D)
    w = torch.bmm(q, k.transpose(1, 2)).view(B, H, -1, S).masked_fill(~m, torch.finfo(x.dtype).min)
    return torch.bmm(w.view(B * H, -1, S).softmax(-1), v).view(B, H, -1, D)


def run(fn, *args, **kwargs):
    """The finding, the op, the graph, and what it returns."""
    (finding,), gm, out = run_rewritten(fn, *args, **kwargs)
    assert isinstance(finding, Rewritten), finding
    (op,) = [x for x in gm.graph.nodes if isinstance(x.target, OpOverload) and "attention" in str(x.target)]
    return finding, op, gm, out


def names(gm):
    return {op_name(x) for x in gm.graph.nodes}


FORMS = {
    "times": lambda x, k, v, m: attend(heads(x) * 0.25, k, v, m),
    "number_first": lambda x, k, v, m: attend(0.25 * heads(x), k, v, m),
    "divided": lambda x, k, v, m: attend(heads(x) / 4, k, v, m),
    "torch_mul": lambda x, k, v, m: attend(torch.mul(heads(x), 0.25), k, v, m),
    "before_views": lambda x, k, v, m: attend(heads(x * 0.25), k, v, m),
    "before_a_copy": lambda x, k, v, m: attend(heads(x * 0.25).contiguous(), k, v, m),
    "of_a_literal": lambda x, k, v, m: attend(heads(x) * torch.tensor(0.25, dtype=x.dtype), k, v, m),
    "written_out": bart,
    "by_keyword": lambda x, k, v, m: attend(
        torch.transpose(input=(x * 0.25).view(B, -1, H, D), dim0=1, dim1=2), k, v, m
    ),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_the_number_joins_the_scale(form: str, q_len: int) -> None:
    args = tensors(q_len=q_len)
    finding, op, gm, out = run(FORMS[form], *args)
    assert op.args[5] == 0.25
    assert not names(gm) & {"mul", "div", "truediv"}
    assert "scale 0.25, with the 0.25 that multiplied the queries" in finding.note
    torch.testing.assert_close(out, FORMS[form](*args), rtol=1e-12, atol=1e-12)


def test_it_joins_the_scale_that_sdpa_has_by_default() -> None:
    x, *rest = tensors()
    _, op, _, out = run(lambda x, k, v, m: attend(heads(x) * 0.5, k, v, m, scale=None), x, *rest)
    assert op.args[5] == 0.5 * D**-0.5
    torch.testing.assert_close(out, attend(heads(x) * 0.5, *rest, None), rtol=1e-12, atol=1e-12)


def test_of_a_shared_prefix() -> None:
    def fn(x, k, v, pk, pv):
        k, v = torch.cat((pk.expand(B, -1, -1, -1), k), 2), torch.cat((pv.expand(B, -1, -1, -1), v), 2)
        return F.scaled_dot_product_attention(heads(x) * 0.25, k, v, scale=1.0, enable_gqa=True)

    x, k, v, _ = tensors()
    args = x, k, v, k[:1] + 1, v[:1] - 1
    _, op, gm, out = run(fn, *args)
    assert "bifurcated" in str(op.target)
    assert op.args[5] == 0.25
    assert "mul" not in names(gm)
    torch.testing.assert_close(out, fn(*args), rtol=1e-12, atol=1e-12)


def test_with_sizes_that_are_not_known() -> None:
    args = tensors()

    def fn(x, k, v, m):
        q = (x * 0.25).view(x.shape[0], -1, H, D).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, m, scale=0.3, enable_gqa=True)

    _, op, gm, out = run(fn, *args, dynamic=True)
    assert op.args[5] == 0.25 * 0.3
    assert "mul" not in names(gm)
    torch.testing.assert_close(out, fn(*args), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_a_rounding_less(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(8, 4, 1, 80, dtype=dtype), *torch.randn(2, 8, 2, 300, 80, dtype=dtype)
    m = torch.arange(300).expand(8, 1, 1, -1) < 250

    def fn(q, k, v, m):
        return attend(q * 80**-0.5, k, v, m)

    want = fn(*(x.double() for x in (q, k, v)), m)
    _, _, gm, out = run(fn, q, k, v, m)
    assert "mul" not in names(gm)

    def error(x):
        return ((x.double() - want).norm() / want.norm()).item()

    assert error(out) <= 1.01 * error(fn(q, k, v, m))


def of_two_readers(x, k, v, m):
    q = heads(x) * 0.25
    return attend(q, k, v, m) + q


def in_place(x, k, v, m):
    return attend(heads(x.clone()).mul_(0.25), k, v, m)


def written_since(x, k, v, m):
    x = x + 1
    q = heads(x) * 0.25
    x.zero_()
    return attend(q, k, v, m)


NOT_TAKEN = {
    "two_readers": of_two_readers,
    "in_place": in_place,
    "written_since": written_since,
    "a_tensor": lambda x, k, v, m: attend(heads(x) * x.mean(), k, v, m),
    "negative": lambda x, k, v, m: attend(heads(x) * -0.25, k, v, m),
    "zero": lambda x, k, v, m: attend(heads(x) * 0.0, k, v, m),
    "infinite": lambda x, k, v, m: attend(heads(x) * float("inf"), k, v, m),
    "out_of_range": lambda x, k, v, m: attend(heads(x) * 1e-20, k, v, m, scale=1e-20),
    "rounded_down": lambda x, k, v, m: attend(torch.div(heads(x), 4, rounding_mode="floor"), k, v, m),
    "rounded_after": lambda x, k, v, m: attend((heads(x) * 0.25).float().double(), k, v, m),
    "a_number_divided": lambda x, k, v, m: attend(0.25 / heads(x), k, v, m),
    "very_small": lambda x, k, v, m: attend(heads(x) * 1e-7, k, v, m),
    "beyond_the_dtype": lambda x, k, v, m: attend(heads(x) * torch.tensor(300).to(torch.uint8), k, v, m),
    "infinite_as_an_integer": lambda x, k, v, m: attend(heads(x) * torch.tensor(float("inf")).to(torch.int64), k, v, m),
    "other_strides": lambda x, k, v, m: attend(x[:, :, :D].view(B, 1, 1, D).expand(B, H, 1, D) * 0.25, k, v, m),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("form", NOT_TAKEN)
def test_what_is_left_in_the_program(form: str) -> None:
    args = tensors()
    want = NOT_TAKEN[form](*args)
    finding, op, _, out = run(NOT_TAKEN[form], *args)
    assert op.args[5] == (1e-20 if form == "out_of_range" else 1.0)
    assert "multiplied" not in finding.note
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12, equal_nan=True)


def of_the_key_too(x, k, v, m):
    q = heads(x) * 0.25
    return F.scaled_dot_product_attention(q, q, q[..., :5], scale=1.0)


def of_the_value_too(x, k, v, m):
    q = (x * 0.25).view(B, -1, H, D).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q + 1, q, scale=1.0)


@pytest.mark.parametrize("fn", [of_the_key_too, of_the_value_too])
def test_queries_that_are_keys_or_values_keep_the_number(fn) -> None:
    x, *rest = tensors(q_len=3)
    gm = capture(fn, x, *rest)
    rewrite(gm)
    torch.testing.assert_close(gm(x)[0], fn(x, *rest), rtol=1e-12, atol=1e-12)


def test_bits_that_are_read_in_another_dtype_are_not_multiplied() -> None:
    x, k, v, m = tensors(torch.bfloat16)
    args = x, k.half(), v.half(), m

    def fn(x, k, v, m):
        return attend((heads(x) * 0.25).view(torch.float16), k, v, m)

    _, op, _, out = run(fn, *args)
    assert op.args[5] == 1.0
    torch.testing.assert_close(out, fn(*args), rtol=1e-2, atol=1e-2)


def part_of_a_copy(x, k, v, m):
    q = heads(x).clone()
    q[..., :8] = 0
    return attend(q, k, v, m)


def through_an_alias(x, k, v, m):
    q = heads(x).clone()
    other = q.view(B * H, 1, D)
    q.mul_(2)
    return attend(other.view(B, H, 1, D), k, v, m)


def copied_by_keyword(x, k, v, m):
    return attend(torch.clone(input=heads(x)), k, v, m)


@pytest.mark.parametrize("fn", [part_of_a_copy, through_an_alias, copied_by_keyword])
def test_copies(fn) -> None:
    args = tensors()
    _, _, _, out = run(fn, *args)
    torch.testing.assert_close(out, fn(*args), rtol=1e-12, atol=1e-12)


def test_a_copy_that_makes_elements_neighbours_stays() -> None:
    def fn(x, k, v, m):
        return attend(x.contiguous(), k, v, m)

    _, k, v, m = tensors()
    neighbours = torch.randn(B, 2, H, D, dtype=torch.float64).transpose(1, 2)
    apart = torch.randn(B, H, D, 2, dtype=torch.float64).mT
    for x, copied in ((neighbours, False), (apart, True)):
        _, op, _, out = run(fn, x, k, v, m)
        assert (op_name(op.args[0]) == "contiguous") is copied
        torch.testing.assert_close(out, fn(x, k, v, m), rtol=1e-12, atol=1e-12)


def test_queries_without_gradients_stay_so() -> None:
    """A parameter requires them where its product under no_grad doesn't."""
    x, k, v, m = tensors()
    parameter = heads(x).clone().requires_grad_()

    def fn(p, k, v, m):
        with torch.no_grad():
            q = p * 0.25
        return attend(q, k, v, m)

    gm = capture(fn, parameter, k, v, m, grad=True)
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Rewritten), finding
    torch.testing.assert_close(gm(parameter, k, v, m)[0], fn(parameter, k, v, m), rtol=1e-12, atol=1e-12)


def test_a_product_whose_shape_alone_is_read_goes() -> None:
    def fn(x, k, v, m):
        q = heads(x) * 0.25
        return attend(q, k, v, m), torch.zeros_like(q)

    args = tensors()
    _, op, _, out = run(fn, *args)
    assert op.args[5] == 0.25
    for got, want in zip(out, fn(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def merged(qkv, k, v, m, write=False):
    """Queries are a part of a larger tensor, so that they are copied where they are merged with the batch."""
    qkv = qkv + 1
    q = qkv.view(B, 1, 3, H, D)[:, :, 0].transpose(1, 2).reshape(B * H, 1, D) * 0.5
    if write:
        qkv.zero_()
    k, v = (y.repeat_interleave(H // KV, 1).reshape(B * H, S, D) for y in (k, v))
    w = torch.bmm(q, k.mT).view(B, H, 1, S).masked_fill(~m, torch.finfo(q.dtype).min).view(B * H, 1, S)
    return torch.bmm(w.softmax(-1), v).view(B, H, 1, D)


def merged_and_written(*args):
    return merged(*args, write=True)


class TestMergedQueries(expecttest.TestCase):
    def setUp(self) -> None:
        _, *rest = tensors()
        self.args = torch.randn(B, 1, 3 * H * D, dtype=torch.float64), *rest

    def test_are_read_where_they_are(self) -> None:
        _, _, gm, out = run(merged, *self.args)
        torch.testing.assert_close(out, merged(*self.args), rtol=1e-12, atol=1e-12)
        self.assertExpectedInline(
            listing(gm),
            """\
qkv = add(l_qkv_, 1)
view = view(qkv, 2, 1, 3, 4, 16)
getitem = getitem(view, (slice(None, None, None), slice(None, None, None), 0))
transpose = transpose(getitem, 1, 2)
invert = invert(l_m_)
zeros_like = zeros_like(invert)
to = to(zeros_like, torch.float64)
masked_fill_1 = masked_fill(to, invert, -1.7976931348623157e+308)
eq = eq(masked_fill_1, -inf)
all_1 = all(eq, -1, True)
masked_fill_2 = masked_fill(masked_fill_1, all_1, nan)
block_mask_default = block_mask.default(masked_fill_2)
decode_attention_default = decode_attention.default(transpose, l_k_, l_v_, masked_fill_2, None, 0.5, block_mask_default)
getitem_1 = getitem(decode_attention_default, 0)
flatten = flatten(getitem_1, 0, 1)
view_3 = view(flatten, 2, 4, 1, 16)
return (view_3)""",
        )

    def test_that_are_written_since_stay_a_copy(self) -> None:
        _, op, gm, out = run(merged_and_written, *self.args)
        assert op.args[5] == 0.5
        assert "reshape" in names(gm)
        torch.testing.assert_close(out, merged_and_written(*self.args), rtol=1e-12, atol=1e-12)
