"""The latent pass: which expanded keys and values it takes back to latents, which it leaves and why."""

from __future__ import annotations

import functools
import io
import re

import expecttest
import pytest
import torch
import torch.nn.functional as F
from graphs import capture, listing
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

import tatten
from tatten.ops.validation import widest_on_cuda
from tatten.passes import Declined, Rewritten, absorb, cost, rewrite
from tatten.passes.calls import op_name
from tatten.passes.reasons import Reason

B, H, S, R, NOPE, ROPE, V = 3, 4, 16, 24, 12, 8, 16
LATENT = "tatten.latent_attention.default"
sdpa = F.scaled_dot_product_attention


def inputs(q_len: int = 1, rope: int = ROPE, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """A query, latents, their rope, the weight that expands them, and a mask that leaves each query a key."""
    torch.manual_seed(0)
    mask = torch.rand(B, 1, q_len, S) < 0.7
    mask[..., 0] = True
    shapes = (B, H, q_len, NOPE + rope), (B, 1, S, R), (B, 1, S, rope), (H * (NOPE + V), R)
    query, latent, key_rope, weight = (torch.randn(x, dtype=torch.float64) for x in shapes)
    return [*(x.to(dtype) for x in (query, latent, key_rope, weight * R**-0.5)), mask]


def heads(projected: Tensor, width: int = NOPE + V) -> Tensor:
    return projected.view(B, S, H, width).transpose(1, 2)


def expand(c: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    own, values = heads(F.linear(c, w)).split((NOPE, V), dim=-1)
    return own, values


def copied(own: Tensor, rope: Tensor) -> Tensor:
    """Keys as transformers makes them."""
    keys = own.new_empty(B, H, S, own.shape[-1] + rope.shape[-1])
    keys[..., : own.shape[-1]].copy_(own)
    keys[..., own.shape[-1] :].copy_(rope.expand(-1, H, -1, -1))
    return keys


def joined(own: Tensor, rope: Tensor) -> Tensor:
    return torch.cat((own, rope.expand(-1, H, -1, -1)), dim=-1)


def attend(q, c, rope, w, mask=None, join=copied, scale: float | None = 0.3):
    own, values = expand(c, w)
    return sdpa(q, join(own, rope), values, attn_mask=mask, scale=scale)


def rope_first(q, c, rope, w, mask):
    own, values = expand(c, w)
    keys = torch.cat((rope.expand(-1, H, -1, -1), own), dim=-1)
    return sdpa(torch.cat((q[..., NOPE:], q[..., :NOPE]), dim=-1), keys, values, mask)


def values_first(q, c, rope, w, mask):
    """Another order in the weight, with columns that nothing reads."""
    kv = heads(F.linear(c, w))
    return sdpa(q, joined(kv[..., 16 : 16 + NOPE], rope), kv.narrow(-1, 2, 10), mask)


def two_projections(q, c, rope, w, mask, w_values):
    return sdpa(q, joined(heads(F.linear(c, w), NOPE + V)[..., :NOPE], rope), heads(F.linear(c, w_values), 10), mask)


def split_before_transpose(q, c, rope, w, mask):
    own, values = (x.transpose(1, 2) for x in F.linear(c, w).reshape(B, S, H, -1).split((NOPE, V), dim=-1))
    return sdpa(q, copied(own, rope), values, mask)


def contiguous(q, c, rope, w, mask):
    own, values = expand(c, w)
    return sdpa(q, copied(own, rope).contiguous(), values.contiguous(), mask)


def narrowed(q, c, rope, w, mask):
    own, values = expand(c, w)
    keys = own.new_zeros(B, H, S, NOPE + ROPE)
    keys.narrow(3, NOPE, ROPE).copy_(rope.expand(-1, H, -1, -1))
    keys.narrow(3, 0, NOPE).copy_(own)
    return sdpa(q, keys, values, mask)


def assigned(own: Tensor, rope: Tensor) -> Tensor:
    """Keys as the code that DeepSeek published with its weights makes them; the assignment broadcasts."""
    keys = rope.new_empty(B, H, S, own.shape[-1] + rope.shape[-1])
    keys[:, :, :, : own.shape[-1]] = own
    keys[:, :, :, own.shape[-1] :] = rope
    return keys


def assigned_in_parts(own: Tensor, rope: Tensor) -> Tensor:
    """To one view of keys without all of their columns, to another without all dims, and to none of the columns."""
    keys = torch.empty(B, H, S, own.shape[-1] + rope.shape[-1], dtype=own.dtype)
    keys.narrow(-1, own.shape[-1], rope.shape[-1])[...] = rope
    keys[..., -8 - own.shape[-1] :][..., : own.shape[-1]] = own
    keys[..., 5:5] = rope[..., :0]
    return keys


def heads_last(q, c, rope, w, mask):
    """Keys are put together as `[batch, length, heads, head_dim]`."""
    own, values = F.linear(c.squeeze(1), w).unflatten(-1, (H, -1)).split((NOPE, V), dim=-1)
    keys = torch.cat((own, rope.transpose(1, 2).expand(-1, -1, H, -1)), dim=-1)
    return sdpa(q, keys.transpose(1, 2), values.transpose(1, 2), mask)


def assigned_with_heads_last(q, c, rope, w, mask):
    own, values = F.linear(c.squeeze(1), w).unflatten(-1, (H, -1)).split((NOPE, V), dim=-1)
    keys = own.new_empty(B, S, H, NOPE + ROPE)
    keys[..., :NOPE], keys[..., NOPE:] = own, rope.squeeze(1)[:, :, None]
    return sdpa(q, keys.permute(0, 2, 1, 3), values.permute(0, 2, 1, 3), mask)


def weight_of_columns(q, c, rope, w, mask):
    """The weight is stored as `[rank, columns]`."""
    own, values = torch.matmul(c, w.view(R, -1)).view(B, S, H, -1).transpose(1, 2).tensor_split((NOPE,), dim=-1)
    return sdpa(q, joined(own, rope), values, mask)


def weight_of_heads(q, c, rope, w, mask):
    """A view of the weight for each, by two kinds of products with three dims."""
    w_keys, w_values = w.view(H, NOPE + V, R).split((NOPE, V), dim=1)
    own = torch.einsum("bsr,hdr->bhsd", c.squeeze(1), w_keys)
    return sdpa(q, joined(own, rope), c @ w_values.mT, mask)


def einsum_of_columns(q, c, rope, w, mask):
    """Factors in the other order, and heads that are not the first dim of the weight."""
    kv = torch.einsum("rhd, bsr -> bshd", w.view(R, H, NOPE + V), c[:, 0])
    return sdpa(q, joined(kv[..., :NOPE].transpose(1, 2), rope), kv[..., NOPE:].transpose(1, 2), mask)


def in_chunks(q, c, rope, w, mask):
    """As many columns for values as for keys."""
    own, values = heads(F.linear(c, w[: H * 2 * NOPE]), 2 * NOPE).chunk(2, dim=-1)
    return sdpa(q, joined(own, rope), values, mask)


def slices_of_one_cache(q, c, rope, w, mask):
    """Latents are sliced twice, and their rope once."""
    cache = torch.cat((c, rope), dim=-1)
    own, values = (expand(cache[..., :R], w)[i] for i in range(2))
    return sdpa(q, joined(own, cache[..., R:]), values, mask)


def rows_of_weight(q, c, rope, w, mask):
    """The weight has all keys, then all values."""
    own, values = heads(F.linear(c, w[: H * NOPE]), NOPE), heads(F.linear(c, w[H * NOPE :]), V)
    return sdpa(q, joined(own, rope), values, mask)


def without_rope(q, c, rope, w, mask):
    """Keys are not in pieces."""
    own, values = expand(c, w)
    return sdpa(q[..., :NOPE], own, values, mask)


def lora(q, c, rope, w, mask):
    """As PEFT spells it, not merged, and a second one."""
    return adapted(q, c, rope, w, mask, w[:3], w[:, 3:6])


def adapted(q, c, rope, w, mask, down, up, join=copied):
    projected = F.linear(c, w) + F.linear(F.linear(F.dropout(c.to(c.dtype), 0.1, training=False), down), up) * 2.0
    projected = projected + 0.5 * (c @ down.mT @ up.mT)
    own, values = heads(projected.to(c.dtype)).split((NOPE, V), dim=-1)
    return sdpa(q, join(own, rope), values, mask)


def lora_of_heads(q, c, rope, w, mask):
    """Beside products with three dims."""
    w = w.view(H, NOPE + V, R)
    kv = torch.einsum("bsr,hdr->bhsd", c[:, 0], w)
    kv = kv + torch.einsum("bsl,hdl->bhsd", c[:, 0] @ w[0, :3].T, w[..., 5:8])
    return sdpa(q, joined(kv[..., :NOPE], rope), kv[..., NOPE:], mask)


def caches_written(q, c, rope, w, mask):
    """Writes before latents are expanded, or after attention, stay."""
    c[:, :, 3:4].copy_(2 * c[:, :, 5:6])
    rope[:, :, 3:4].zero_()
    out = attend(q, c, rope, w, mask)
    rope.mul_(2)
    return out


ACCEPTED = {
    "copied": attend,
    "joined": lambda *x: attend(*x, join=joined),
    "no_scale": lambda *x: attend(*x, scale=None),
    "rope_first": rope_first,
    "values_first": values_first,
    "two_projections": two_projections,
    "split_before_transpose": split_before_transpose,
    "no_heads": lambda q, c, rope, w, mask: attend(q, c.squeeze(1), rope, w, mask),
    "repeated": lambda *x: attend(*x, join=lambda own, rope: torch.cat((own, rope.repeat_interleave(H, 1)), -1)),
    "contiguous": contiguous,
    "narrowed": narrowed,
    "assigned": lambda *x: attend(*x, join=assigned),
    "assigned_in_parts": lambda *x: attend(*x, join=assigned_in_parts),
    "heads_last": heads_last,
    "assigned_with_heads_last": assigned_with_heads_last,
    "weight_of_columns": weight_of_columns,
    "weight_of_heads": weight_of_heads,
    "einsum_of_columns": einsum_of_columns,
    "in_chunks": in_chunks,
    "slices_of_one_cache": slices_of_one_cache,
    "rows_of_weight": rows_of_weight,
    "without_rope": without_rope,
    "lora": lora,
    "lora_of_heads": lora_of_heads,
    "caches_written": caches_written,
    "no_mask": lambda q, c, rope, w, mask: attend(q, c, rope, w),
    "additive": lambda q, c, rope, w, mask: attend(q, c, rope, w, torch.where(mask, 0.5, -torch.inf).to(q.dtype)),
    "per_head": lambda q, c, rope, w, mask: attend(q, c, rope, w, mask & (q[..., :1] > -9)),
}


def compiled(fn, args, **options):
    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(fn, backend="tatten", fullgraph=True, options={"inner": "eager"} | options)(*args)


def clones(args):
    return [x.clone() for x in args]


def arguments(name: str, *args, **kwargs) -> list[Tensor]:
    given = inputs(*args, **kwargs)
    return [*given, torch.randn(H * 10, R, dtype=given[0].dtype)] if name == "two_projections" else given


@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("name", ACCEPTED)
def test_takes(name: str, q_len: int) -> None:
    fn, args = ACCEPTED[name], arguments(name, q_len)
    gm = capture(fn, *clones(args))
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Rewritten), finding
    assert finding.op == LATENT
    assert finding.location.file == __file__
    listing(gm)
    assert not any(node.target in (F.linear, sdpa, "new_empty", "new_zeros") for node in gm.graph.nodes)
    wanted, given = clones(args), clones(args)
    want, got = fn(*wanted), compiled(fn, given)
    assert (got - want).abs().max() < 1e-12
    assert got.stride() == want.stride()
    assert all(torch.equal(a, b) for a, b in zip(given, wanted, strict=True))


@pytest.mark.parametrize(
    "autocast, inner",
    [(False, "aot_eager"), (True, "aot_eager"), pytest.param(True, "inductor", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("peak", [1, 4], ids=["flat", "peaked"])
@pytest.mark.parametrize("adapted", [False, True], ids=["", "lora"])
def test_rounds_no_more_than_sdpa_does(adapted: bool, peak: int, autocast: bool, inner: str) -> None:
    """With DeepSeek-V3's widths, against float64 of the same inputs."""
    dtype = torch.bfloat16
    batch, n_heads, length, rank, own, width = 4, 4, 1024, 512, 128, 64
    torch.manual_seed(0)
    shapes = (batch, n_heads, 1, own + width), (batch, 1, length, rank), (batch, 1, length, width)
    query, latent, rope = (torch.randn(x).to(dtype) for x in shapes)
    weight = (torch.randn(n_heads * 2 * own, rank) * rank**-0.5).to(dtype)

    def fn(q, c, rope, w):
        kv = F.linear(c, w)
        kv = kv + F.linear(F.linear(c, w[:16]), w[:, :16]) * 2.0 if adapted else kv
        kv = kv.view(batch, length, n_heads, 2 * own).transpose(1, 2)
        keys = torch.cat((kv[..., :own], rope.expand(-1, n_heads, -1, -1)), dim=-1)
        return sdpa(q, keys, kv[..., own:])

    args = query * peak, latent, rope, weight
    want = fn(*(x.double() for x in args))
    with torch.autocast("cpu", dtype, enabled=autocast):
        far, got = ((x - want).abs() for x in (fn(*args), compiled(fn, args, inner=inner)))
    assert got.norm() <= far.norm()
    assert got.max() <= 1.1 * far.max()  # the largest of 2048 errors varies


def test_the_report_counts_lora() -> None:
    """Its products with all latents before, and with the queries now."""
    plain, adapted = (rewrite(capture(ACCEPTED[name], *inputs())).findings[0] for name in ("copied", "lora"))
    assert isinstance(plain, Rewritten)
    assert isinstance(adapted, Rewritten)
    assert adapted.note == "keys and values were made of latents by one projection with LoRA for 4 heads"
    (before, now), (more, left) = ((x.cost.projected.flops, x.cost.absorbed.flops) for x in (plain, adapted))
    weights = 2 * 3 * (R + H * (NOPE + V))  # `lora` has two adapters of the same weights' columns
    assert (more - before, left - now) == (2 * B * S * weights, 2 * B * weights)


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


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("name", ["assigned", "assigned_with_heads_last", "weight_of_heads", "lora_of_heads"])
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


def lora_of(latents=lambda c: c, between=lambda x: x, scale=lambda w: 2.0):
    """LoRA of something else than the latents, with something between its products, or scaled by a tensor."""

    def fn(q, c, rope, w, mask):
        added = F.linear(between(F.linear(latents(c), w[:3])), w[:, 3:6]) * scale(w)
        own, values = heads(F.linear(c, w) + added).split((NOPE, V), dim=-1)
        return sdpa(q, copied(own, rope), values, mask)

    return fn


def lora_returned(q, c, rope, w, mask):
    inner = F.linear(c, w[:3])
    own, values = heads(F.linear(c, w) + F.linear(inner, w[:, 3:6])).split((NOPE, V), dim=-1)
    return sdpa(q, copied(own, rope), values, mask), inner


def lora_of_stale(q, c, rope, w, mask):
    """LoRA's term is made of a copy, and latents are written after that."""
    copy = c.clone()
    c.mul_(2)
    own, values = heads(F.linear(c, w) + F.linear(F.linear(copy, w[:3]), w[:, 3:6])).split((NOPE, V), dim=-1)
    return sdpa(q, copied(own, rope), values, mask)


def lora_written(q, c, rope, w, mask, down):
    """The weight that is applied first is written after that, and before the other products."""
    inner = F.linear(c, down)
    down.mul_(2)
    own, values = heads(F.linear(c, w) + F.linear(inner, w[:, 3:6])).split((NOPE, V), dim=-1)
    return sdpa(q, copied(own, rope), values, mask)


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
    "projection lora of others": lora_of(latents=lambda c: c + 1),
    "projection lora of a copy": lora_of(latents=lambda c: c.flip(2)),
    "projection lora with an activation": lora_of(between=F.silu),
    "projection lora with a bias": lora_of(between=lambda x: x + 1),
    "projection lora scaled": lora_of(scale=lambda w: w[:, 0]),
    "projection lora computed": lambda q, c, rope, w, mask: adapted(q, c, rope, w, mask, w[:3] * 2, w[:, 3:6]),
    "projection_used lora": lora_returned,
    "written_between lora": lora_written,
    "written_between lora of a copy": lora_of_stale,
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


@pytest.mark.parametrize("name", DECLINED)
def test_declines(name: str) -> None:
    """Such a call is left to the decode pass, whose report says so."""
    fn, args = DECLINED[name], inputs()
    if fn is lora_written:
        args.append(torch.randn(3, R, dtype=args[0].dtype))
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


def parts_of_query(q, c, rope, w, mask, change=lambda *parts: (), whole=torch.cat):
    own, q_rope = q[..., :NOPE] + 1, q[..., NOPE:] - 1
    query = whole((own, q_rope), dim=-1)
    change(own, q_rope, query)
    return attend(query, c, rope, w, mask)


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


class OnCuda(torch.fx.Interpreter):
    """Runs a graph on fake tensors of a GPU and leaves their like with its nodes."""

    def run_node(self, n):
        result = super().run_node(n)
        n.meta["example_value"] = result
        return result


def as_on_cuda(gm: GraphModule) -> GraphModule:
    values = [x.meta["example_value"] for x in gm.graph.find_nodes(op="placeholder")]
    with FakeTensorMode():
        OnCuda(gm).run(*(torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in values))
    return gm


def on_cuda(rank: int, dtype: torch.dtype, width: int = ROPE) -> GraphModule:
    q, c, rope, w, mask = inputs(rope=width, dtype=dtype)
    c, w = (x[..., :1].repeat_interleave(rank, -1) for x in (c, w))
    return as_on_cuda(capture(lambda *x: attend(*x, join=joined), q, c, rope, w, mask))


@pytest.mark.parametrize("where", ["cuda", "autocast", "cpu"])
def test_lora_in_16_bits_is_rounded_no_more_often(where: str) -> None:
    args = inputs(dtype=torch.bfloat16)
    args += [torch.randn(x, dtype=torch.bfloat16) for x in ((3, R), (H * (NOPE + V), 3))]
    with torch.autocast("cpu", torch.bfloat16, enabled=where == "autocast"):
        gm = capture(lambda *x: adapted(*x, join=joined), *args)
        findings = rewrite(as_on_cuda(gm) if where == "cuda" else gm).findings
    (note,) = [x.note for x in findings if isinstance(x, Rewritten)]
    assert ("not absorbed [projection]: LoRA adds to keys or values in torch.bfloat16" in note) == (where != "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_reads_the_weight_once_and_as_it_is(dtype: torch.dtype) -> None:
    gm = on_cuda(widest_on_cuda(dtype), dtype, width=64)
    (finding,) = rewrite(gm).findings
    assert isinstance(finding, Rewritten)
    assert finding.op == LATENT
    project = torch.ops.tatten.project_heads.default
    by = torch.bmm if dtype == torch.float32 else project
    products = [node for node in gm.graph.nodes if node.target is by]
    assert len(products) == 2
    weights = [product.args[1].target for product in products]  # the keys' and the values', both views
    assert weights == (["narrow", "transpose"] if dtype == torch.float32 else ["transpose", "narrow"])


@pytest.mark.parametrize("q_len, capability, unrounded", [(1, 9, True), (4, 9, True), (5, 9, False), (1, 8, False)])
def test_few_queries_reach_attention_unrounded_on_hopper(
    q_len: int, capability: int, unrounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 up to 16 of them, of all heads. The graph, run on a CPU, rounds less then than SDPA does."""
    monkeypatch.setattr(absorb, "capability", lambda device: (capability, 0))
    args = inputs(q_len, dtype=torch.bfloat16)
    gm = as_on_cuda(capture(lambda *x: attend(*x, join=joined), *args))
    rewrite(gm)
    (op,) = (x for x in gm.graph.nodes if x.target is torch.ops.tatten.latent_attention.default)
    assert op.args[0].args[2] == (torch.float32 if unrounded else torch.bfloat16)
    want, by_sdpa = attend(*(x.double() for x in args[:4]), args[4]), attend(*args)
    (got,) = gm(*(args[int(x.name.split("_")[2])] for x in gm.graph.find_nodes(op="placeholder")))
    assert (got - want).norm() <= (1.0 if unrounded else 1.2) * (by_sdpa - want).norm()


@pytest.mark.parametrize("most", [B * 5, B * 5 - 1])
def test_many_queries_are_multiplied_by_bmm_on_a_gpu(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absorb, "MOST_ROWS", most)
    gm = as_on_cuda(capture(lambda *x: attend(*x, join=joined), *inputs(5, dtype=torch.bfloat16)))
    rewrite(gm)
    project = torch.ops.tatten.project_heads.default
    products = [node.target for node in gm.graph.nodes if node.target in (torch.bmm, project)]
    assert products == [project if most == B * 5 else torch.bmm, project]


@pytest.mark.parametrize(
    ("rank", "width", "dtype"), [(513, 8, torch.bfloat16), (257, 8, torch.float32), (512, 65, torch.bfloat16)]
)
def test_widths_that_no_kernel_takes(rank: int, width: int, dtype: torch.dtype) -> None:
    (finding,) = rewrite(on_cuda(rank, dtype, width)).findings
    assert isinstance(finding, Rewritten)
    assert f"not absorbed [head_dim]: latents have rank {rank}, their rope {width} columns" in finding.note


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"cpp_wrapper": True}], ids=["python", "cpp"])
def test_on_a_gpu_sums_are_multiplied_by_one_kernel_unrounded(options: dict[str, bool]) -> None:
    fn, args = parts_of_query, [x.to("cuda") for x in inputs(dtype=torch.bfloat16)]
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(fn, backend="tatten", fullgraph=True, options=options)
        got, code = run_and_get_code(compiled, *args)
        want, by_sdpa = fn(*(x.double() if x.is_floating_point() else x for x in args)), fn(*args)
    without_comments = re.sub(r"^\s*(#|//).*$", "", code[0], flags=re.M)
    assert "project_heads_kernel" in without_comments
    assert "torch.ops.tatten" not in without_comments
    assert "tatten::" not in without_comments
    assert (got - want).norm() <= 1.2 * (by_sdpa - want).norm()


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
