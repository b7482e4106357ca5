"""Latent attention on a CPU: within a derived bound of float64, reading latents in place and only those that count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fuzz import settings
from hypothesis import given
from hypothesis import strategies as st
from latent_calls import LatentCall, draw_latent_call
from op_bounds import assert_within_bound
from op_calls import Call, Segment
from op_masks import Mask
from slow import slow_but
from torch import Tensor
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import tatten
from tatten.ops.cpu.latent import latent_attention as latent_on_cpu
from tatten.ops.kernel_signatures import latent_call
from tatten.ops.reference import latent_attention_reference

op = torch.ops.tatten.latent_attention.default
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [  # batch, heads, q_len, kv_len, rank, width
    (2, 1, 1, 1, 16, 0),
    (2, 5, 1, 33, 24, 8),
    (1, 7, 3, 1500, 128, 64),
    (1, 128, 1, 130, 512, 64),
    (2, 2, 16, 300, 1024, 7),
    (3, 16, 2, 70, 256, 1),
]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "holes": {"mask": Mask(pattern="holes")},
    "padding": {"mask": Mask(pattern="padding", dims="bk")},
    "causal": {"mask": Mask(pattern="causal", dims="qk")},
    "heads": {"mask": Mask(pattern="holes", dims="hk")},
    "nothing": {"mask": Mask(pattern="nothing", dims="k")},
    "rows": {"mask": Mask(pattern="rows")},
    "column": {"mask": Mask(pattern="rows", dims="bq")},
    "bias": {"mask": Mask(torch.float32, pattern="holes", bias="noise")},
    "floor": {"mask": Mask(torch.float32, pattern="rows", floor="min")},
    "lens": {"lens": torch.int64},
    "window": {"lens": torch.int32, "window": 5},
    "everything": {"mask": Mask(pattern="padding"), "window": 40, "softcap": 3.0, "sinks": "some", "lens": torch.int64},
}


def call_of(
    shape: tuple[int, ...], dtype: torch.dtype, mask: Mask | None = None, unrounded: bool = False, **options: Any
) -> LatentCall:
    batch, heads, q_len, kv_len, rank, width = shape
    sizes = {"q_heads": heads, "kv_heads": 1, "q_len": q_len, "head_dim": rank + width, "value_dim": rank}
    mask_rows = batch if mask is not None and "b" in mask.dims else 1
    segment = Segment(batch, kv_len, mask, mask_rows)
    expanded = Call(dtype, segments=(segment,), batch=batch, scale=(rank + width) ** -0.5, **sizes, **options)
    return LatentCall(expanded, unrounded=unrounded, block_keys=60 if kv_len > 100 else None)


def check(call: LatentCall) -> None:
    inputs, expanded = call.inputs()
    out, lse = call.run(inputs)
    dtype = call.expanded.dtype
    wide = torch.promote_types(dtype, torch.float32) if call.wide else dtype
    assert_within_bound(out, lse, expanded, call.blocks, summed_wide=True, out_dtype=wide)


@pytest.mark.drawn(10)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_float64(shape: tuple[int, ...], dtype: torch.dtype, variant: str) -> None:
    check(call_of(shape, dtype, **VARIANTS[variant]))


@pytest.mark.drawn(3)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_queries_that_were_not_rounded(shape: tuple[int, ...], variant: str) -> None:
    check(call_of(shape, torch.bfloat16, unrounded=True, **VARIANTS[variant]))


@pytest.mark.parametrize("n", slow_but([60], [60, 600]))
def test_random_calls(n: int) -> None:
    @settings(n)
    @given(st.composite(lambda draw: draw_latent_call(lambda options: draw(st.sampled_from(options))))())
    def test(call: LatentCall) -> None:
        check(call)

    test()


def tensors(dtype: torch.dtype = torch.float32, kv_len: int = 90) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 6, 2, 32), (2, 6, 2, 8), (2, 1, kv_len, 32), (2, 1, kv_len, 8)
    query, query_rope, latent, key_rope = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return query, query_rope, latent, key_rope


def test_the_reference_is_attention_of_what_is_expanded() -> None:
    """Keys and values for each head from one up-projection, as models make them."""
    q, rope, latent, key_rope = tensors(torch.float64)
    w_uk, w_uv = torch.randn(2, 6, 20, 32, dtype=torch.float64)
    q = q[..., :20]
    key = torch.cat((latent @ w_uk.mT, key_rope.expand(-1, 6, -1, -1)), dim=3)
    want = torch.nn.functional.scaled_dot_product_attention(torch.cat((q, rope), dim=3), key, latent @ w_uv.mT)
    out, _ = latent_attention_reference(q @ w_uk, rope, latent, key_rope, scale=28**-0.5)
    torch.testing.assert_close(out @ w_uv.mT, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_of_parts_merge_to_the_whole(dtype: torch.dtype) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    query, query_rope, latent, key_rope = tensors(dtype)
    mask = torch.rand(2, 1, 2, 90) < 0.5
    states = []
    for part in (slice(0, 30), slice(30, 31), slice(31, 90)):
        cut = latent[:, :, part], key_rope[:, :, part]
        given = {"attn_mask": mask[..., part], "scale": 0.2, "out_dtype": wide, "return_lse": True}
        states.append(tatten.latent_attention(query, query_rope, *cut, **given))
    out, lse = tatten.merge_states(*map(torch.stack, zip(*states, strict=True)))
    expanded = {"query": torch.cat((query, query_rope), 3), "key": torch.cat((latent, key_rope), 3), "value": latent}
    expanded |= {"attn_mask": mask, "kv_lens": None, "scale": 0.2}
    assert_within_bound(out, lse, expanded, parts=3, summed_wide=True, out_dtype=wide)


MASKS = {
    "none": None,
    "keys": (90,),
    "of a query": (2, 90),
    "of a sequence": (6, 1, 1, 90),
    "of all": (6, 6, 2, 90),
}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_sequences_share_latents(mask: str, dtype: torch.dtype, rows: int) -> None:
    query, query_rope = (torch.cat([x] * 3) for x in tensors(dtype)[:2])
    latent, key_rope = (x[:rows] for x in tensors(dtype)[2:])
    shape, sinks = MASKS[mask], torch.randn(6)
    attn_mask = None if shape is None else torch.rand(shape) < 0.4
    given = {"attn_mask": attn_mask, "scale": 0.2, "sinks": sinks, "softcap": 4.0, "return_lse": True}
    state = tatten.latent_attention(query, query_rope, latent, key_rope, **given)
    if attn_mask is not None:
        found = tatten.block_mask(attn_mask, kv_batch=rows)
        again = tatten.latent_attention(query, query_rope, latent, key_rope, **given, block_mask=found)
        assert all(map(torch.equal, state, again))
    key, value = (x.repeat_interleave(6 // rows, dim=0) for x in (torch.cat((latent, key_rope), dim=3), latent))
    expanded = {"query": torch.cat((query, query_rope), dim=3), "key": key, "value": value, "attn_mask": attn_mask}
    expanded |= {"kv_lens": None, "scale": 0.2, "softcap": 4.0, "sinks": sinks}
    assert_within_bound(*state, expanded, parts=2, summed_wide=True)


def test_out_in_float32_is_what_is_rounded() -> None:
    inputs = tensors(torch.bfloat16)
    wide = tatten.latent_attention(*inputs, scale=0.2, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(tatten.latent_attention(*inputs, scale=0.2), wide.bfloat16())
    assert torch.equal(tatten.latent_attention(*inputs, scale=0.2, out_dtype=torch.bfloat16), wide.bfloat16())
    with pytest.raises(TypeError, match=r"`out_dtype` must be a torch.dtype or None, got str"):
        tatten.latent_attention(*inputs, scale=0.2, out_dtype="float32")


def test_out_has_the_dtype_of_queries_that_were_not_rounded() -> None:
    query, query_rope, latent, key_rope = tensors(torch.bfloat16)
    query = query.float() * 1.001
    wide = tatten.latent_attention(query, query_rope, latent, key_rope, scale=0.2)
    narrow = tatten.latent_attention(query, query_rope, latent, key_rope, scale=0.2, out_dtype=torch.bfloat16)
    assert wide.dtype == torch.float32
    assert torch.equal(narrow, wide.bfloat16())


class Largest(TorchDispatchMode):
    """The most bytes of new memory that one aten op makes."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not any(returned.alias_info for returned in func._schema.returns):
            made = [x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor)]
            given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
            new = [x.numel() * x.itemsize for x in made if x.untyped_storage().data_ptr() not in given]
            self.bytes = max(self.bytes, *new, 0)
        return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("joined", [False, True])
def test_latents_are_neither_copied_nor_converted_as_a_whole(joined: bool, dtype: torch.dtype) -> None:
    """Latents may be tensors of their own or views of one cache; no block is larger than the threshold."""
    cache = torch.randn(3, 1, 5000, 72).to(dtype)
    latent, key_rope = (x if joined else x.clone() for x in cache.split((64, 8), dim=3))
    query, query_rope = torch.randn(3, 2, 1, 64).to(dtype), torch.randn(3, 2, 1, 8).to(dtype)
    with pytest.MonkeyPatch.context() as patch, Largest() as largest:
        patch.setattr(torch, "get_num_threads", lambda: 2)
        patch.setattr("tatten.ops.cpu.thresholds.CPU.block_bytes", 1 << 15)
        latent_on_cpu(latent_call(query, query_rope, latent, key_rope, scale=0.1))
    assert 0 < largest.bytes <= 1 << 16


def test_only_used_latents_are_read() -> None:
    """A few hundred of 2^31 numbers are read. The others are never touched, so they cost neither time nor memory."""
    dtype = torch.bfloat16
    kv_len = (1 << 31) // 512
    latent, rope = (torch.empty(1, 1, kv_len, n, dtype=dtype) for n in (512, 64))
    tail = slice(kv_len - 300, kv_len - 50)
    for x in (latent, rope):
        x[:, :, tail] = torch.randn(250, x.shape[3]).to(dtype)
    query, query_rope = torch.randn(1, 4, 1, 512).to(dtype), torch.randn(1, 4, 1, 64).to(dtype)
    lens = torch.tensor([kv_len - 50])
    got = op(query, query_rope, latent, rope, None, lens, scale=0.1, window=250)
    want = op(query, query_rope, latent[:, :, tail], rope[:, :, tail], scale=0.1)
    torch.testing.assert_close(got, want)


def test_no_rope_is_a_rope_of_width_0() -> None:
    query, _, latent, _ = tensors()
    want = op(query, None, latent, None, scale=0.2)
    assert torch.equal(op(query, query[..., :0], latent, latent[..., :0], scale=0.2)[0], want[0])
    torch.testing.assert_close(want, tatten.decode_attention(query, latent, latent, scale=0.2, return_lse=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["latent", "key_rope"])
def test_nan_comes_out(name: str, bad: float) -> None:
    given = dict(zip(("query", "query_rope", "latent", "key_rope"), tensors(), strict=True))
    given[name][0, 0, 7, 3] = bad
    out, lse = tatten.latent_attention(**given, scale=0.2, return_lse=True)
    hit = lse[0].isnan() | (lse[0] == float("inf"))
    assert hit.all() if bad != bad else hit.any()
    assert out[0][hit].isnan().any(dim=-1).all()
    assert out[1].isfinite().all()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    inputs = tensors(dtype)
    lens, mask = torch.tensor([90, 3]), torch.rand(2, 1, 2, 90) < 0.5
    opcheck(op, (*inputs, mask, lens), {"scale": 0.2, "sinks": torch.randn(6), "window": 50, "softcap": 5.0})
    opcheck(op, (inputs[0], None, inputs[2], None), {"scale": 0.2, "out_dtype": torch.float32})
    opcheck(op, (inputs[0].float(), *inputs[1:], mask), {"scale": 0.2})


@pytest.mark.drawn(1)
@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_public_function_compiles(inner: str) -> None:
    inputs, mask = tensors(torch.bfloat16), torch.rand(2, 1, 2, 90) < 0.5
    options = {"attn_mask": mask, "scale": 0.2, "sinks": torch.randn(6), "out_dtype": torch.float32}
    torch._dynamo.reset()
    compiled = torch.compile(tatten.latent_attention, backend=inner, fullgraph=True)
    got = compiled(*inputs, **options, return_lse=True)
    want = tatten.latent_attention(*inputs, **options, return_lse=True)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


GOOD = dict(zip(("query", "query_rope", "latent", "key_rope"), tensors(), strict=True))
BAD = [
    ({"query": torch.zeros(6, 2, 32)}, ValueError, ["`query`", "(6, 2, 32)"]),
    ({"query": torch.zeros(2, 6, 2, 32).long()}, TypeError, ["`query`", "torch.int64"]),
    ({"query": torch.zeros(2, 6, 2, 0)}, ValueError, ["`query`", "size 0", "(2, 6, 2, 0)"]),
    ({"query": torch.zeros(2, 6, 2, 31)}, ValueError, ["`latent`", "31]", "(2, 6, 2, 31)", "(2, 1, 90, 32)"]),
    ({"latent": torch.zeros(2, 1, 90, 48)}, ValueError, ["`latent`", "1, kv_length, 32]", "(2, 1, 90, 48)"]),
    ({"latent": torch.zeros(2, 2, 90, 32)}, ValueError, ["`latent`", "1, kv_length, 32]", "(2, 2, 90, 32)"]),
    ({"latent": torch.zeros(2, 90, 32)}, ValueError, ["`latent`", "(2, 90, 32)"]),
    ({"latent": torch.zeros(3, 1, 90, 32)}, ValueError, ["`latent`", "divides 2", "(3, 1, 90, 32)"]),
    ({"latent": torch.zeros(1, 1, 90, 32)}, ValueError, ["`key_rope`", "[1, 1, 90, width]", "(2, 1, 90, 8)"]),
    ({"latent": torch.zeros(2, 1, 0, 32)}, ValueError, ["`latent`", "at least 1", "(2, 1, 0, 32)"]),
    ({"latent": torch.zeros(2, 1, 90, 32).double()}, TypeError, ["`latent`", "torch.float32", "torch.float64"]),
    ({"latent": torch.zeros(2, 1, 90, 32).half()}, TypeError, ["`latent`", "`query`, torch.float32", "torch.float16"]),
    ({"latent": torch.zeros(2, 1, 90, 32).bfloat16()}, TypeError, ["`query_rope`", "torch.bfloat16", "torch.float32"]),
    (
        {name: x.half() for name, x in GOOD.items() if name != "latent"},
        TypeError,
        ["`latent`", "`query`, torch.float16", "torch.float32"],
    ),
    ({"latent": torch.zeros(2, 1, 90, 32, requires_grad=True)}, NotImplementedError, ["`latent`", "requires_grad"]),
    ({"query_rope": None}, ValueError, ["`query_rope`", "`key_rope`", "None"]),
    ({"key_rope": None}, ValueError, ["`key_rope`", "`query_rope`", "None"]),
    ({"query_rope": torch.zeros(2, 6, 2, 7)}, ValueError, ["`key_rope`", "`query_rope`, 7", "got 8"]),
    ({"query_rope": torch.zeros(2, 5, 2, 8)}, ValueError, ["`query_rope`", "[2, 6, 2, width]", "(2, 5, 2, 8)"]),
    (
        {"query_rope": torch.zeros(2, 6, 2, 8).half()},
        TypeError,
        ["`query_rope`", "`latent`, torch.float32", "torch.float16"],
    ),
    ({"key_rope": torch.zeros(2, 6, 90, 8)}, ValueError, ["`key_rope`", "[2, 1, 90, width]", "(2, 6, 90, 8)"]),
    ({"key_rope": torch.zeros(2, 1, 89, 8)}, ValueError, ["`key_rope`", "[2, 1, 90, width]", "(2, 1, 89, 8)"]),
    ({"key_rope": torch.zeros(2, 1, 90, 8).half()}, TypeError, ["`key_rope`", "torch.float32", "torch.float16"]),
    ({"key_rope": torch.zeros(2, 1, 90, 8, requires_grad=True)}, NotImplementedError, ["`key_rope`"]),
    ({"attn_mask": torch.zeros(2, 1, 2, 91)}, ValueError, ["`attn_mask`", "[2, 6, 2, 90]", "(2, 1, 2, 91)"]),
    ({"attn_mask": torch.zeros(90, dtype=torch.int32)}, TypeError, ["`attn_mask`", "bool", "torch.int32"]),
    ({"kv_lens": torch.tensor([3])}, ValueError, ["`kv_lens`", "(2,)", "(1,)"]),
    ({"kv_lens": torch.tensor([3, 91])}, ValueError, ["`kv_lens`", "`latent`'s length 90", "91"]),
    ({"window": 0}, ValueError, ["`window`", "at least 1", "0"]),
    ({"softcap": -1.0}, ValueError, ["`softcap`", "-1.0"]),
    ({"sinks": torch.zeros(5)}, ValueError, ["`sinks`", "(6,)", "(5,)"]),
    ({"sinks": torch.zeros(6, requires_grad=True)}, NotImplementedError, ["`sinks`"]),
    ({"out_dtype": torch.bfloat16}, TypeError, ["`out_dtype`", "torch.float32", "torch.bfloat16"]),
    (
        {name: x.bfloat16() for name, x in GOOD.items() if name != "query"} | {"out_dtype": torch.float16},
        TypeError,
        ["`out_dtype`", "torch.bfloat16 or torch.float32", "torch.float16"],
    ),
]


@pytest.mark.parametrize(("change", "error", "says"), BAD, ids=[" ".join(bad[2][:1] + bad[2][-1:]) for bad in BAD])
def test_bad_input(change: dict[str, Any], error: type[Exception], says: list[str]) -> None:
    for function in (tatten.latent_attention, torch.ops.tatten.latent_attention):
        with pytest.raises(error) as raised:
            function(**{**GOOD, "scale": 0.2, **change})
        for part in says:
            assert part in str(raised.value)


def test_bad_input_of_the_public_function() -> None:
    inputs = tensors()
    mask = torch.ones(90, dtype=torch.bool)
    with pytest.raises(TypeError, match=r"`scale` must be a number: .* got None"):
        tatten.latent_attention(*inputs, scale=None)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'scale'"):
        tatten.latent_attention(*inputs)
    with pytest.raises(TypeError, match="`attn_mask` must be passed by keyword"):
        tatten.latent_attention(*inputs, mask, scale=0.2)
    with pytest.raises(TypeError, match="`key_rope` must be a Tensor, got float"):
        tatten.latent_attention(*inputs[:3], 0.2, scale=0.2)
    with pytest.raises(ValueError, match="`block_mask` must be over the 90 keys of `latent`, got one over 80"):
        tatten.latent_attention(*inputs, scale=0.2, attn_mask=mask, block_mask=tatten.block_mask(mask[:80]))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_gradients_are_refused_in_compiled_code_too(inner: str) -> None:
    inputs = tensors()
    for name in range(4):
        wanted = [x.clone().requires_grad_(i == name) for i, x in enumerate(inputs)]
        torch._dynamo.reset()
        with pytest.raises(NotImplementedError, match="requires_grad=True"):
            torch.compile(lambda *given: tatten.latent_attention(*given, scale=0.2) + 1, backend=inner)(*wanted)
        with torch.no_grad():
            tatten.latent_attention(*wanted, scale=0.2)


@pytest.mark.parametrize("name, given", [("kv_lens", torch.tensor([3, 4])), ("window", 5)])
def test_lengths_and_windows_are_not_shared(name: str, given: Any) -> None:
    query, query_rope, latent, key_rope = tensors()
    with pytest.raises(ValueError, match=f"`{name}` must be None where sequences share latents: 2 read 1"):
        tatten.latent_attention(query, query_rope, latent[:1], key_rope[:1], scale=0.2, **{name: given})


def test_variants_reach_the_reference() -> None:
    inputs, lens = tensors(torch.float64), torch.tensor([0, 40])
    variant = {"window": 7, "softcap": 2.0, "sinks": torch.randn(6)}
    want = latent_attention_reference(*inputs, kv_lens=lens, scale=0.2, **variant)
    got = op(*inputs, kv_lens=lens, scale=0.2, **variant)
    torch.testing.assert_close(got, want)
