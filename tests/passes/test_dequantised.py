"""Keys and values that a program dequantises: read in 8 bits, or left for a reason that the report gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from graphs import capture, listing

from tatten.passes import Rewritten, rewrite

B, HQ, HKV, S, D = 2, 4, 2, 40, 8
torch.manual_seed(0)
OP = torch.ops.tatten.decode_attention.default
PER_KEY, PER_HEAD = (B, HKV, S, 1), (HKV, 1, 1)


def query(dtype=torch.bfloat16):
    return torch.randn(B, HQ, 1, D).to(dtype)


def narrow(dtype=torch.int8, shape=(B, HKV, S, D)):
    x = (40 * torch.randn(shape)).round().clamp(-127, 127)
    return x.to(torch.int8) if dtype == torch.int8 else (x / 20).to(dtype)


def scale(shape=PER_KEY, dtype=torch.float32):
    return (torch.rand(shape) / 20 + 0.01).to(dtype)


def mask():
    return (torch.arange(S) < 30).expand(B, 1, 1, S)


def attend(q, k, v, m):
    return F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True)


def per_key(q, k, v, ks, vs, m):
    return attend(q, *((x.float() * s).to(q.dtype) for x, s in ((k, ks), (v, vs))), m)


def in_dtype(q, k, v, ks, vs, m):
    return attend(q, k.to(q.dtype) * ks, torch.mul(vs, v.to(q.dtype)), m)


def promoted(q, k, v, ks, vs, m):
    return attend(q, k * ks, v * vs, m)


def repeated(q, k, v, ks, vs, m):
    keys, values = ((x.to(q.dtype) * s).repeat_interleave(HQ // HKV, dim=1) for x, s in ((k, ks), (v, vs)))
    return F.scaled_dot_product_attention(q, keys, values, m)


def tokens_first(q, k, v, ks, vs, m):
    return attend(q, *((x.to(q.dtype) * s).transpose(1, 2) for x, s in ((k, ks), (v, vs))), m)


def a_number(q, k, v, m):
    return attend(q, k.to(q.dtype) * 0.05, v.to(q.dtype), m)


bf16, e4m3 = torch.bfloat16, torch.float8_e4m3fn
TAKEN = {
    "per key": (per_key, query(), narrow(), narrow(), scale(), scale(), mask()),
    "float8": (per_key, query(), narrow(e4m3), narrow(e4m3), scale(), scale(), mask()),
    "per head": (in_dtype, query(), narrow(), narrow(), scale(PER_HEAD, bf16), scale((1, *PER_HEAD), bf16), mask()),
    "per tensor": (in_dtype, query(), narrow(e4m3), narrow(e4m3), scale((), bf16), scale((1,), bf16), mask()),
    "per sequence": (in_dtype, query(), narrow(), narrow(), *[scale((B, 1, 1, 1), bf16)] * 2, mask()),
    "per token": (in_dtype, query(), narrow(), narrow(), *[scale((B, 1, S, 1), bf16)] * 2, mask()),
    "without a cast": (promoted, query(), narrow(), narrow(), scale(dtype=bf16), scale(dtype=bf16), mask()),
    "scale in float16": (per_key, query(), narrow(), narrow(), *[scale(dtype=torch.float16)] * 2, mask()),
    "heads repeated after": (repeated, query(), narrow(), narrow(), scale(dtype=bf16), scale(dtype=bf16), mask()),
    "tokens before heads": (
        tokens_first,
        query(),
        *[narrow(shape=(B, S, HKV, D))] * 2,
        *[scale((B, S, HKV, 1), bf16)] * 2,
        mask(),
    ),
    "a number": (a_number, query(), narrow(), narrow(), mask()),
    "float64": (in_dtype, query(torch.float64), narrow(), narrow(), *[scale(dtype=torch.float64)] * 2, mask()),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", TAKEN)
def test_is_read_in_8_bits(name: str) -> None:
    fn, *args = TAKEN[name]
    gm = capture(fn, *args)
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Rewritten)
    assert "not read in 8 bits" not in finding.note
    gm.graph.lint()
    (op,) = gm.graph.find_nodes(op="call_function", target=OP)
    assert [x.meta["example_value"].dtype for x in op.args[1:3]] == [args[1].dtype] * 2
    (got,) = gm(*_inputs(gm, args))
    exact = fn(*(x.double() if x.dtype != torch.bool else x for x in args))
    program = fn(*args)
    error, allowed = ((x.double() - exact).abs().max() for x in (got, program))
    assert error <= 1.2 * allowed + torch.finfo(program.dtype).eps * exact.abs().max() + 1e-14


def test_a_transposed_key_of_written_out_attention_is_read_in_8_bits() -> None:
    def fn(q, k, v, ks, vs, m):
        keys = (k.mT.float() * ks.mT).to(q.dtype)
        return (q @ keys * 0.1 + m).softmax(-1) @ (v.float() * vs).to(q.dtype)

    q = torch.randn(B, HKV, 1, D).to(bf16)
    m = torch.zeros(B, 1, 1, S, dtype=bf16)
    (finding,) = rewrite(capture(fn, q, narrow(), narrow(), scale(), scale(), m)).findings
    assert isinstance(finding, Rewritten)
    assert "k int8" in finding.shapes
    assert "not read in 8 bits" not in finding.note


def _inputs(gm, args):
    """The arguments of a graph by shape, dtype and order."""
    left = list(args)
    for node in gm.graph.find_nodes(op="placeholder"):
        want = node.meta["example_value"]
        i = next(i for i, x in enumerate(left) if x.shape == want.shape and x.dtype == want.dtype)
        yield left[i] if any(x is left[i] for x in left[i + 1 :]) else left.pop(i)


def shifted(q, k, v, ks, vs, m):
    return attend(q, (k.to(q.dtype) - 3) * ks, v.to(q.dtype) * vs, m)


def in_groups(q, k, v, ks, vs, m):
    keys = (k.to(q.dtype).view(B, HKV, S, 2, D // 2) * ks).view(B, HKV, S, D)
    return attend(q, keys, v.to(q.dtype) * vs, m)


def one_alone(q, k, v, ks, m):
    return attend(q, k.to(q.dtype) * ks, v, m)


def newest_in_full(q, k, v, ks, vs, m):
    """torchao's cache: what was just computed is not rounded."""
    keys, values = k * ks, v * vs
    keys[:, :, 5] = 1
    return attend(q, keys, values, m)


def scale_changed(q, k, v, ks, vs, m):
    keys, values = k * ks, v * vs
    ks.mul_(2)
    return attend(q, keys, values, m)


def twice(q, k, v, ks, vs, m):
    return attend(q, k * ks * ks, v * vs, m)


B16 = {"dtype": bf16}
LEFT = {
    "along head_dim": (in_dtype, query(), narrow(), narrow(), scale((1, D), bf16), scale(**B16), mask()),
    "in place of a zero point": (shifted, query(), narrow(), narrow(), scale(**B16), scale(**B16), mask()),
    "in groups": (in_groups, query(), narrow(), narrow(), scale((B, HKV, S, 2, 1), bf16), scale(**B16), mask()),
    "uint8": (in_dtype, query(), *[narrow().to(torch.uint8)] * 2, scale(**B16), scale(**B16), mask()),
    "another float8": (in_dtype, query(), *[narrow(torch.float8_e5m2)] * 2, scale(**B16), scale(**B16), mask()),
    "two kinds": (in_dtype, query(), narrow(), narrow(e4m3), scale(**B16), scale(**B16), mask()),
    "one alone": (one_alone, query(), narrow(), torch.randn(B, HKV, S, D).bfloat16(), scale(**B16), mask()),
    "two factors": (twice, query(), narrow(), narrow(), scale(**B16), scale(**B16), mask()),
    "written_between copy": (newest_in_full, query(), narrow(), narrow(), scale(**B16), scale(**B16), mask()),
    "written_between scale": (scale_changed, query(), narrow(), narrow(), scale(**B16), scale(**B16), mask()),
}
WHY = {
    "along head_dim": "which differs along head_dim",
    "in place of a zero point": "changed by `sub` (sub)",
    "in groups": "(view)",
    "uint8": "in uint8",
    "another float8": "in float8_e5m2",
    "two kinds": "key is in torch.int8, value in torch.float8_e4m3fn",
    "one alone": "value is not dequantised",
    "two factors": "times 2 factors",
    "written_between copy": "is written by `setitem`",
    "written_between scale": "is written by `mul_",
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", LEFT)
def test_is_left_and_the_report_says_why(name: str) -> None:
    fn, *args = LEFT[name]
    gm = capture(fn, *(x.clone() for x in args))
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Rewritten), "attention itself still is rewritten"
    code = "written_between" if name.startswith("written_between") else "dequantised"
    assert f"not read in 8 bits [{code}]: " in finding.note
    assert WHY[name] in finding.note
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(fn, backend="tatten", options={"inner": "eager"}, fullgraph=True)
        got, want = (f(*(x.clone() for x in args)) for f in (compiled, fn))
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-2)


def test_sums_are_no_scales() -> None:
    """Rotary embeddings are products and sums, too; nothing is said of them."""

    def rotated(q, k, v, cos, sin, m):
        return attend(q, k * cos + k.flip(-1) * sin, v, m)

    kv = torch.randn(B, HKV, S, D).bfloat16()
    (finding,) = rewrite(capture(rotated, query(), kv, kv + 1, *torch.rand(2, D).bfloat16(), mask())).findings
    assert "8 bits" not in finding.note


def test_what_becomes_of_a_cache_with_a_scale_per_token() -> None:
    gm = capture(*TAKEN["per key"])
    rewrite(gm)
    names = [line.split(" = ")[1].split("(")[0] for line in listing(gm).splitlines() if " = " in line]
    assert "to" not in names
    assert "mul" not in names


def test_without_a_mask_and_heads_one_to_one() -> None:
    """SDPA on the copies reads each once, but the copies are made first."""
    long = (B, HQ, 60000, D)
    args = query(), narrow(shape=long), narrow(shape=long), *[scale((*long[:3], 1))] * 2
    (finding,) = rewrite(capture(lambda *a: per_key(*a, None), *args)).findings
    assert isinstance(finding, Rewritten)
    assert finding.cost.read == 2 * B * HQ * 60000 * D
    assert finding.cost.moved == 2 * B * HQ * 60000 * D * (2 + 1 + 2)
