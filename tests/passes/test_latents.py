"""Keys and values that are projected from latents: the forms that are absorbed, and the graphs that they become."""

from __future__ import annotations

import io

import expecttest
import latent_forms
import pytest
import torch
import torch.nn.functional as F
from graphs import capture, listing
from latent_forms import (
    ACCEPTED,
    LATENT,
    NOPE,
    ROPE,
    B,
    H,
    R,
    S,
    V,
    arguments,
    attend,
    clones,
    compiled,
    copied,
    expand,
    heads,
    inputs,
    joined,
    sdpa,
)

import tatten
from tatten.passes import Rewritten, rewrite


@pytest.mark.drawn(2)
@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("name", ACCEPTED)
def test_takes(name: str, q_len: int) -> None:
    fn, args = ACCEPTED[name], arguments(name, q_len)
    gm = capture(fn, *clones(args))
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Rewritten), finding
    assert finding.op == LATENT
    assert finding.location.file == latent_forms.__file__
    listing(gm)
    assert not any(node.target in (F.linear, sdpa, "new_empty", "new_zeros") for node in gm.graph.nodes)
    wanted, given = clones(args), clones(args)
    want, got = fn(*wanted), compiled(fn, given)
    assert (got - want).abs().max() < 1e-12
    assert got.stride() == want.stride()
    assert all(torch.equal(a, b) for a, b in zip(given, wanted, strict=True))


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "autocast, inner",
    [(False, "aot_eager"), (True, "aot_eager"), pytest.param(True, "inductor", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("peak", [1, 4], ids=["flat", "peaked"])
def test_rounds_no_more_than_sdpa_does(peak: int, autocast: bool, inner: str) -> None:
    """With DeepSeek-V3's widths, against float64 of the same inputs."""
    dtype = torch.bfloat16
    batch, n_heads, length, rank, own, width = 4, 4, 1024, 512, 128, 64
    torch.manual_seed(0)
    shapes = (batch, n_heads, 1, own + width), (batch, 1, length, rank), (batch, 1, length, width)
    query, latent, rope = (torch.randn(x).to(dtype) for x in shapes)
    weight = (torch.randn(n_heads * 2 * own, rank) * rank**-0.5).to(dtype)

    def fn(q, c, rope, w):
        kv = F.linear(c, w).view(batch, length, n_heads, 2 * own).transpose(1, 2)
        keys = torch.cat((kv[..., :own], rope.expand(-1, n_heads, -1, -1)), dim=-1)
        return sdpa(q, keys, kv[..., own:])

    args = query * peak, latent, rope, weight
    want = fn(*(x.double() for x in args))
    with torch.autocast("cpu", dtype, enabled=autocast):
        far, got = ((x - want).abs() for x in (fn(*args), compiled(fn, args, inner=inner)))
    assert got.norm() <= far.norm()
    assert got.max() <= 1.1 * far.max()  # the largest of 2048 errors varies


def test_one_head() -> None:
    """As tensor parallelism may leave it: nothing has to be expanded over heads."""

    def fn(q, c, rope, w, mask):
        own, values = F.linear(c, w).view(B, S, 1, NOPE + V).transpose(1, 2).split((NOPE, V), dim=-1)
        return sdpa(q, torch.cat((own, rope), dim=-1), values, mask)

    q, c, rope, w, mask = inputs()
    args = q[:, :1], c, rope, w[: NOPE + V], mask
    (finding,) = rewrite(capture(fn, *args)).findings
    assert isinstance(finding, Rewritten)
    assert finding.op == LATENT
    assert (compiled(fn, args) - fn(*args)).abs().max() < 1e-12


def test_fewer_kv_heads_than_queries() -> None:
    def fn(q, c, rope, w, mask):
        own, values = expand(c, w)
        return sdpa(q.repeat(1, 2, 1, 1), joined(own, rope), values, mask, enable_gqa=True)

    (finding,) = rewrite(capture(fn, *inputs())).findings
    assert isinstance(finding, Rewritten)
    assert "not absorbed [heads]: query has 8 heads, keys 4, values 4" in finding.note


def test_no_rope() -> None:
    args = inputs(rope=0)
    gm = capture(attend, *args)
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Rewritten)
    assert not any(node.target == "copy_" for node in gm.graph.nodes)
    assert (compiled(attend, args) - attend(*args)).abs().max() < 1e-12


@pytest.mark.drawn(2, "dynamic shapes")
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_dynamic_shapes(assign: bool) -> None:
    """One graph serves all sizes, and nothing is guarded but what Dynamo guards."""

    def fn(q, c, rope, w, mask):
        kv = F.linear(c, w).view(c.shape[0], c.shape[2], H, NOPE + V).transpose(1, 2)
        own, values = kv.split((NOPE, V), dim=-1)
        keys = own.new_empty(c.shape[0], H, c.shape[2], NOPE + ROPE)
        if assign:
            keys[..., :NOPE] = own
            keys[..., NOPE:] = rope
        else:
            keys[..., :NOPE].copy_(own)
            keys[..., NOPE:].copy_(rope.expand(-1, H, -1, -1))
        return sdpa(q, keys, values, mask)

    torch._dynamo.reset()
    step = torch.compile(fn, backend="tatten", dynamic=True, fullgraph=True, options={"inner": "aot_eager"})
    with tatten.recording() as report, torch.no_grad():
        for batch, length in ((2, 7), (3, 9), (5, 30)):
            q, c, rope, w, _ = inputs()
            q, c, rope = q[:1].repeat(batch, 1, 1, 1), c[:1].repeat(batch, 1, 2, 1), rope[:1].repeat(batch, 1, 2, 1)
            args = q, c[:, :, :length], rope[:, :, :length], w, torch.rand(batch, 1, 1, length) < 0.9
            assert (step(*args) - fn(*args)).abs().max() < 1e-12
    assert [x.op for x in report.rewritten] == [LATENT]


class Step(torch.nn.Module):
    """A decode step with latents cached in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = torch.nn.Linear(R, H * (NOPE + V), bias=False, dtype=torch.float64)
        self.register_buffer("c", torch.zeros(B, 1, S, R, dtype=torch.float64))
        self.register_buffer("rope", torch.zeros(B, 1, S, ROPE, dtype=torch.float64))

    def forward(self, query, latent, rope, position):
        self.c.index_copy_(2, position, latent)
        self.rope.index_copy_(2, position, rope)
        own, values = heads(self.expand(self.c)).split((NOPE, V), dim=-1)
        return sdpa(query, copied(own, self.rope), values, (torch.arange(S) <= position)[None, None, None])


@pytest.mark.drawn(1, "exported programs")
@pytest.mark.parametrize(("strict", "loaded"), [(False, False), (True, False), (True, True)])
def test_exported_programs(strict: bool, loaded: bool) -> None:
    """In a functional graph `slice_scatter` puts keys together."""
    query, c, rope, *_ = inputs()
    steps = [(query, c[:, :, i : i + 1], rope[:, :, i : i + 1], torch.tensor([i])) for i in range(3)]
    eager = Step()
    with torch.no_grad():
        program = torch.export.export(eager, steps[0], strict=strict)
        if loaded:
            file = io.BytesIO()
            torch.export.save(program, file)
            file.seek(0)
            program = torch.export.load(file)
        with tatten.recording() as report:
            rewritten = tatten.rewrite(program)
        assert [x.op for x in report.rewritten] == [LATENT]
        names = [str(node.target) for node in rewritten.graph.nodes]
        assert not any("linear" in name or "new_empty" in name or "scatter" in name for name in names)
        module = rewritten.module()
        for step in steps:
            assert (module(*step) - eager(*step)).abs().max() < 1e-12


@pytest.mark.drawn(1, "exported programs")
@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("name", ["assigned", "assigned_with_heads_last", "weight_of_heads"])
def test_exported_forms(name: str, functional: bool) -> None:
    class Attention(torch.nn.Module):
        def forward(self, *args):
            return ACCEPTED[name](*args)

    args = inputs()
    with torch.no_grad():
        program = torch.export.export(Attention(), tuple(clones(args)))
        program = program.run_decompositions({}) if functional else program
        with tatten.recording() as report:
            rewritten = tatten.rewrite(program).module()
        assert [x.op for x in report.rewritten] == [LATENT]
        assert (rewritten(*args) - ACCEPTED[name](*args)).abs().max() < 1e-12


class TestGraphs(expecttest.TestCase):
    def test_one_layer(self) -> None:
        gm = capture(attend, *inputs())
        rewrite(gm)
        self.assertExpectedInline(
            listing(gm),
            """\
narrow = narrow(l_q_, 3, 0, 12)
transpose_1 = transpose(narrow, 0, 1)
flatten = flatten(transpose_1, 1, 2)
unflatten = unflatten(l_w_, 0, (4, 28))
narrow_1 = narrow(unflatten, 1, 0, 12)
bmm = bmm(flatten, narrow_1)
unflatten_1 = unflatten(bmm, 1, (-1, 1))
transpose_2 = transpose(unflatten_1, 0, 1)
narrow_2 = narrow(l_q_, 3, 12, 8)
block_mask_default = block_mask.default(l_mask_)
latent_attention_default = latent_attention.default(transpose_2, narrow_2, l_c_, l_rope_, l_mask_, scale=0.3, block_mask=block_mask_default, out_dtype=torch.float64)
getitem_4 = getitem(latent_attention_default, 0)
unflatten_2 = unflatten(l_w_, 0, (4, 28))
narrow_3 = narrow(unflatten_2, 1, 12, 16)
transpose_3 = transpose(narrow_3, 1, 2)
transpose_4 = transpose(getitem_4, 0, 1)
flatten_1 = flatten(transpose_4, 1, 2)
bmm_1 = bmm(flatten_1, transpose_3)
unflatten_3 = unflatten(bmm_1, 1, (-1, 1))
transpose_5 = transpose(unflatten_3, 0, 1)
contiguous = contiguous(transpose_5)
return (contiguous)""",
        )

    def test_two_layers_look_at_their_mask_once_and_other_copies_stay(self) -> None:
        def fn(q, c, rope, w, mask, state):
            state[..., :2].copy_(c[..., :2])
            out = attend(q, c, rope, w, mask)
            return attend(torch.cat((out, q[..., :4]), dim=-1), c, rope, w, mask, joined)

        gm = capture(fn, *inputs(dtype=torch.bfloat16), torch.zeros(B, 1, S, 4, dtype=torch.bfloat16))
        rewrite(gm)
        self.assertExpectedInline(
            listing(gm),
            """\
getitem = getitem(l_state_, (Ellipsis, slice(None, 2, None)))
getitem_1 = getitem(l_c_, (Ellipsis, slice(None, 2, None)))
copy_ = copy_(getitem, getitem_1)
narrow = narrow(l_q_, 3, 0, 12)
transpose_2 = transpose(narrow, 0, 1)
flatten = flatten(transpose_2, 1, 2)
unflatten = unflatten(l_w_, 0, (4, 28))
narrow_1 = narrow(unflatten, 1, 0, 12)
bmm = bmm(flatten, narrow_1)
unflatten_1 = unflatten(bmm, 1, (-1, 1))
transpose_3 = transpose(unflatten_1, 0, 1)
narrow_2 = narrow(l_q_, 3, 12, 8)
block_mask_default = block_mask.default(l_mask_)
latent_attention_default = latent_attention.default(transpose_3, narrow_2, l_c_, l_rope_, l_mask_, scale=0.3, block_mask=block_mask_default, out_dtype=torch.float32)
getitem_9 = getitem(latent_attention_default, 0)
unflatten_2 = unflatten(l_w_, 0, (4, 28))
narrow_3 = narrow(unflatten_2, 1, 12, 16)
transpose_4 = transpose(narrow_3, 1, 2)
transpose_5 = transpose(getitem_9, 0, 1)
flatten_1 = flatten(transpose_5, 1, 2)
to = to(transpose_4, torch.float32)
bmm_1 = bmm(flatten_1, to)
to_1 = to(bmm_1, torch.bfloat16)
unflatten_3 = unflatten(to_1, 1, (-1, 1))
transpose_6 = transpose(unflatten_3, 0, 1)
contiguous = contiguous(transpose_6)
getitem_6 = getitem(l_q_, (Ellipsis, slice(None, 4, None)))
cat = cat((contiguous, getitem_6), dim=-1)
narrow_4 = narrow(cat, 3, 0, 12)
transpose_7 = transpose(narrow_4, 0, 1)
flatten_2 = flatten(transpose_7, 1, 2)
unflatten_4 = unflatten(l_w_, 0, (4, 28))
narrow_5 = narrow(unflatten_4, 1, 0, 12)
bmm_2 = bmm(flatten_2, narrow_5)
unflatten_5 = unflatten(bmm_2, 1, (-1, 1))
transpose_8 = transpose(unflatten_5, 0, 1)
narrow_6 = narrow(cat, 3, 12, 8)
latent_attention_default_1 = latent_attention.default(transpose_8, narrow_6, l_c_, l_rope_, l_mask_, scale=0.3, block_mask=block_mask_default, out_dtype=torch.float32)
getitem_10 = getitem(latent_attention_default_1, 0)
unflatten_6 = unflatten(l_w_, 0, (4, 28))
narrow_7 = narrow(unflatten_6, 1, 12, 16)
transpose_9 = transpose(narrow_7, 1, 2)
transpose_10 = transpose(getitem_10, 0, 1)
flatten_3 = flatten(transpose_10, 1, 2)
to_2 = to(transpose_9, torch.float32)
bmm_3 = bmm(flatten_3, to_2)
to_3 = to(bmm_3, torch.bfloat16)
unflatten_7 = unflatten(to_3, 1, (-1, 1))
transpose_11 = transpose(unflatten_7, 0, 1)
contiguous_1 = contiguous(transpose_11)
return (contiguous_1)""",
        )
