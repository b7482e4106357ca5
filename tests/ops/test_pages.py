"""`block_table`: keys and values are read where a pool has them, page by page."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fuzz import settings
from hypothesis import given
from hypothesis import strategies as st
from op_bounds import assert_within_bound
from paged_calls import POOLS, PagedCall, draw_paged_call
from poisoned_pages import assert_same, keys_of, one_by_one, paged
from slow import slow_but
from torch import Tensor
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import tatten
from tatten.ops.cpu import thresholds
from tatten.ops.cpu.attention import decode_attention as decode_on_cpu
from tatten.ops.kernel_signatures import decode_kernel
from tatten.ops.pages import gather_pages
from tatten.ops.reference import decode_attention_reference

PAGE_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]


@st.composite
def calls(draw: st.DrawFn) -> PagedCall:
    return draw_paged_call(lambda options: draw(st.sampled_from(options)))


@pytest.mark.parametrize("n", slow_but([50], [50, 600]))
def test_random_calls(n: int) -> None:
    @settings(n)
    @given(calls())
    def test(drawn: PagedCall) -> None:
        inputs, dense = drawn.inputs()
        with drawn.small_tiles():
            out, lse = drawn.run(inputs)
            for b in range(drawn.call.batch if drawn.batch_invariant else 0):
                for x, y in zip((out, lse), drawn.run(drawn.alone(inputs, b)), strict=True):
                    torch.testing.assert_close(x[b : b + 1], y, rtol=0, atol=0, equal_nan=True)
        tiles = drawn.most_tiles
        assert_within_bound(out, lse, dense, drawn.call.most_parts + tiles, roundings=1 if tiles == 1 else 2)

    test()


def test_the_reference_of_random_calls() -> None:
    @settings(40)
    @given(calls())
    def test(drawn: PagedCall) -> None:
        inputs, dense = drawn.inputs()
        for got, want in zip(decode_attention_reference(**inputs), decode_attention_reference(**dense), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, equal_nan=True)

    test()


@pytest.mark.parametrize("page", PAGE_SIZES)
def test_page_sizes_and_lengths(page: int) -> None:
    inputs = paged(page, [3 * page, 0, 1, page, 2 * page + page // 2, max(page - 1, 0)], 3)
    assert_same(tatten.decode_attention(**inputs, return_lse=True), one_by_one(inputs))


@pytest.mark.parametrize("layout", POOLS)
@pytest.mark.parametrize(
    "variant", [{}, {"window": 5}, {"window": 40, "softcap": 3.0}, {"sinks": torch.randn(4)}, {"scale": -0.3}]
)
def test_layouts_and_variants(layout: str, variant: dict[str, Any]) -> None:
    inputs = paged(4, [40, 3, 0, 17], 10, layout, q_len=3)
    assert_same(tatten.decode_attention(**inputs, **variant, return_lse=True), one_by_one(inputs, **variant))


def test_pages_that_sequences_share() -> None:
    inputs = paged(4, [12, 12, 10], 3)
    inputs["block_table"][1:, :2] = inputs["block_table"][0, :2]
    inputs["block_table"][2, 2] = inputs["block_table"][1, 2]
    assert_same(tatten.decode_attention(**inputs, return_lse=True), one_by_one(inputs))


def test_a_page_twice_in_a_sequence() -> None:
    inputs = paged(4, [12], 3)
    inputs["block_table"][0, 1] = inputs["block_table"][0, 2]
    assert_same(tatten.decode_attention(**inputs, return_lse=True), one_by_one(inputs))


@pytest.mark.parametrize("entry", [-1, -(2**31), 2**31 - 1, 9])
@pytest.mark.parametrize("variant", [{}, {"window": 6}, {"attn_mask": torch.randn(12)}])
def test_keys_of_an_entry_that_names_no_page_are_left_out(entry: int, variant: dict[str, Any]) -> None:
    inputs = paged(4, [12, 10], 3)
    assert len(inputs["key"]) <= 9
    whole, named = one_by_one(inputs), torch.ones(2, 1, 1, 12, dtype=torch.bool)
    inputs["block_table"][0, 1], named[0, :, :, 4:8] = entry, False
    mask = named if "attn_mask" not in variant else torch.where(named, variant["attn_mask"].double(), -torch.inf)
    padded = [torch.zeros(2, 2, 12, 8, dtype=torch.float64) for _ in range(2)]
    for b, n in enumerate([12, 10]):
        table = inputs["block_table"].clamp(0, len(inputs["key"]) - 1)
        for x, name in zip(padded, ("key", "value"), strict=True):
            x[b, :, :n] = keys_of(inputs[name], table, b, n)[0]
    got = tatten.decode_attention(**inputs, **variant, return_lse=True)
    dense = {"window": variant.get("window"), "kv_lens": inputs["kv_lens"], "attn_mask": mask}
    assert_same(got, decode_attention_reference(inputs["query"], *padded, **dense))
    assert not torch.allclose(got[0], whole[0])
    inputs["block_table"][0] = entry
    out, lse = tatten.decode_attention(**inputs, return_lse=True)
    assert not out[0].any()
    assert (lse[0] == -torch.inf).all()


def test_entries_before_every_window_may_be_anything() -> None:
    inputs = paged(4, [12, 10], 3)
    want = one_by_one(inputs, window=3)
    for b, first in enumerate([9, 7]):
        unread = inputs["block_table"][b, : first // 4]
        for name in ("key", "value"):
            inputs[name][unread] = torch.nan
        inputs["block_table"][b, : first // 4] = 0  # vLLM has its null page there
    assert_same(tatten.decode_attention(**inputs, window=3, return_lse=True), want)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("missing", [False, True])
def test_scales_in_pages(dtype: torch.dtype, missing: bool) -> None:
    inputs = paged(4, [12, 10, 0], 3)
    if missing:
        inputs["block_table"][0, 1] = -1
    want = dict(inputs)
    for name in ("key", "value"):
        pool = inputs[name].nan_to_num(0.0).mul(20).to(dtype)
        scale = torch.rand(pool.shape[:3]).mT.contiguous().mT
        want[name] = pool.double() * scale[..., None].double()
        inputs |= {name: pool, f"{name}_scale": scale.masked_fill(inputs[name].isnan()[..., 0], torch.nan)}
    got = tatten.decode_attention(**inputs, return_lse=True)
    assert_same(got, decode_attention_reference(**want))
    assert_same(decode_attention_reference(**inputs), decode_attention_reference(**want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bits_of_a_sequence_do_not_depend_on_the_others(dtype: torch.dtype) -> None:
    inputs = paged(16, [300, 77, 0, 128], 20, "interleaved", q_len=2)
    inputs |= {name: inputs[name].to(dtype) for name in ("query", "key", "value")}
    sinks = torch.randn(4)
    together = tatten.decode_attention(**inputs, sinks=sinks, batch_invariant=True, return_lse=True)
    for b in range(4):
        own = inputs | {name: inputs[name][b : b + 1] for name in ("query", "block_table", "kv_lens")}
        alone = tatten.decode_attention(**own, sinks=sinks, batch_invariant=True, return_lse=True)
        assert all(torch.equal(x[b : b + 1], y) for x, y in zip(together, alone, strict=True))


@pytest.mark.parametrize(("tile_pages", "copied"), [(100, 80), (50, 40), (39, 20), (20, 20), (19, 19), (3, 3), (1, 1)])
def test_one_tile_at_a_time_is_copied(tile_pages: int, copied: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most the pages that the cache has room for: those of a sequence, or of several, padded to the longest one."""
    inputs = paged(16, [320, 160, 320, 16], 40)
    page_bytes = 16 * 2 * (8 + 8) * 8
    monkeypatch.setattr(thresholds.CPU, "block_bytes", -(-tile_pages * page_bytes // torch.get_num_threads()))
    want = one_by_one(inputs)
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in [out] if isinstance(out, Tensor) else []:
                if x.untyped_storage().data_ptr() not in held:
                    largest = max(largest, x.untyped_storage().nbytes())
            return out

    held = {x.untyped_storage().data_ptr() for x in inputs.values()}
    attend = decode_kernel(decode_on_cpu)
    with Sizes():  # the op itself hides the operators that it calls
        state = attend(**inputs)
    assert_same(state, want)
    assert largest == copied * page_bytes // 2


MASKS = {
    "lengths": lambda keys: keys < torch.tensor([[[[10]]], [[[24]]], [[[0]]]]),
    "holes": lambda keys: (keys % 5 > 1) & (keys >= torch.tensor([[[[6]]], [[[0]]], [[[23]]]])),
    "one row": lambda keys: ((keys >= 5) & (keys < 14))[None, None, None],
    "queries": lambda keys: keys <= torch.tensor([[3], [17]]),
    "bias": lambda keys: torch.where(keys < 15, torch.randn(3, 1, 2, 24, dtype=torch.float64), -torch.inf),
    "lowest": lambda keys: torch.full((3, 4, 1, 24), torch.finfo(torch.float32).min),
}


@pytest.mark.parametrize("page", [1, 4, 8])
@pytest.mark.parametrize("kind", MASKS)
def test_the_op_takes_a_block_mask_in_place_of_lengths(kind: str, page: int) -> None:
    mask = MASKS[kind](torch.arange(24))
    inputs = paged(page, [24] * 3, 24 // page, "interleaved", q_len=2)
    inputs["block_mask"] = torch.ops.tatten.block_mask(mask)
    keys, values = (
        torch.cat([keys_of(inputs[name], inputs["block_table"], b, 24) for b in range(3)]) for name in ("key", "value")
    )
    want = decode_attention_reference(inputs["query"], keys, values, attn_mask=mask)
    start, stop, _ = inputs["block_mask"].expand(3, -1).unbind(1)
    pages = torch.arange(24 // page)
    unread = (pages < start[:, None] // page) | (pages * page >= stop[:, None])
    for name in ("key", "value"):
        inputs[name][inputs["block_table"][unread]] = torch.nan
    inputs["block_table"][unread] = torch.tensor([-1, 2**31 - 1, 0])[torch.arange(int(unread.sum())) % 3].int()
    del inputs["kv_lens"]
    got = torch.ops.tatten.decode_attention(**inputs, attn_mask=mask)
    assert_same(got, want)
    copies = decode_kernel(gather_pages)(**inputs, attn_mask=mask)
    assert copies.segments[0].kv_lens is None


def test_opcheck_and_fakes() -> None:
    inputs = paged(4, [12, 10, 0], 3, "interleaved", q_len=2)
    variant = {"window": 5, "attn_mask": torch.rand(3, 1, 2, 12) > 0.3}
    query, key, value = (inputs.pop(name) for name in ("query", "key", "value"))
    opcheck(torch.ops.tatten.decode_attention.default, (query, key, value), {**inputs, **variant})


def test_compiles_with_dynamic_shapes() -> None:
    torch._dynamo.reset()  # other tests compile the same function, and count towards its recompile limit
    compiled = torch.compile(tatten.decode_attention, backend="eager", dynamic=True, fullgraph=True)
    for columns, lens in ((3, [12, 10, 0]), (5, [20, 3, 7])):
        inputs = paged(4, lens, columns)
        assert_same(compiled(**inputs, return_lse=True), one_by_one(inputs))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("core_aten", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
@pytest.mark.parametrize("masked", [False, True])
def test_decomposes(core_aten: bool, dtype: torch.dtype, masked: bool) -> None:
    inputs = paged(4, [12, 10, 0], 3, "interleaved", q_len=2)
    inputs["block_table"][0, 1] = -1
    variant: dict[str, Any] = {"window": 7, "sinks": torch.randn(4)}
    if masked:
        variant["attn_mask"] = torch.rand(3, 1, 2, 12) > 0.3
    if dtype == torch.int8:
        scales = {f"{name}_scale": torch.rand(inputs[name].shape[:3]) for name in ("key", "value")}
        pools = {name: inputs[name].nan_to_num(0.0).mul(20).to(dtype) for name in ("key", "value")}
        inputs |= scales | pools

    class Step(torch.nn.Module):
        def forward(self, inputs: dict[str, Any]) -> Any:
            return tatten.decode_attention(**inputs, **variant, return_lse=True)

    with torch.no_grad():
        program = torch.export.export(Step(), (inputs,))
    program = program.run_decompositions(tatten.decompositions(core_aten=core_aten))
    assert not [node for node in program.graph.nodes if "tatten" in str(node.target)]
    want = decode_attention_reference(**inputs, **variant)
    for got, x in zip(program.module()(inputs), want, strict=True):
        torch.testing.assert_close(got, x, rtol=1e-5, atol=1e-5)


class Attention(torch.nn.Module):
    def forward(self, inputs: dict[str, Any]) -> Any:
        return tatten.decode_attention(**inputs)


def decomposed(inputs: dict[str, Any]) -> torch.nn.Module:
    """The attention of inputs like these, exported and decomposed."""
    with torch.no_grad():
        program = torch.export.export(Attention(), (inputs,))
    return program.run_decompositions(tatten.decompositions()).module()


@pytest.mark.parametrize("exported_transposed", [False, True])
def test_a_decomposed_program_takes_tables_of_any_strides(exported_transposed: bool) -> None:
    inputs = paged(4, [12, 10, 0], 3, "interleaved")
    transposed = inputs | {"block_table": inputs["block_table"].t().contiguous().t()}
    program = decomposed(transposed if exported_transposed else inputs)
    want = tatten.decode_attention(**inputs)
    torch.testing.assert_close(program(inputs), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(program(transposed), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("scaled", ["key_scale", "value_scale"])
def test_decomposes_with_scales_of_keys(kv_heads: int, scaled: str) -> None:
    pools = {name: torch.randint(-100, 100, (12, 16, kv_heads, 8), dtype=torch.int8) for name in ("key", "value")}
    table, lens = torch.arange(12, dtype=torch.int32).view(3, 4), torch.tensor([20, 33, 10])
    inputs = {"query": torch.randn(3, 4, 1, 8), **pools, "block_table": table, "kv_lens": lens}
    inputs[scaled] = torch.rand(12, 16, kv_heads)
    want = tatten.decode_attention(**inputs)
    torch.testing.assert_close(decomposed(inputs)(inputs), want, rtol=1e-4, atol=1e-4)


def test_a_copy_has_no_number_that_no_length_covers() -> None:
    inputs = paged(4, [12, 10, 0], 3)
    inputs["block_table"][0, 1] = -1
    copies = decode_kernel(gather_pages)(**inputs).segments[0]
    assert not copies.key.isnan().any()
    assert not copies.value.isnan().any()
    assert not copies.key[0, :, 4:8].any()


@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}])
def test_the_backend_leaves_calls_over_pages_as_they_are(options: dict[str, Any]) -> None:
    inputs = paged(4, [12, 10, 0], 3, "interleaved")

    def step(query: Tensor, **rest: Any) -> Tensor:
        attended = tatten.decode_attention(query, **rest)
        return torch.nn.functional.scaled_dot_product_attention(attended, attended, attended)

    with torch.no_grad():
        compiled = torch.compile(step, backend="tatten", options=options, fullgraph=True)
        torch.testing.assert_close(compiled(**inputs), step(**inputs))
