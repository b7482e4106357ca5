"""`block_table` of `latent_attention`: latents are read where a pool has them, page by page."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fuzz import settings
from hypothesis import given
from hypothesis import strategies as st
from op_bounds import assert_within_bound
from paged_latents import PagedLatentCall, draw_paged_latents
from slow import slow_but
from torch import Tensor
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import tatten
from tatten.ops.cpu.latent import latent_attention as latent_on_cpu
from tatten.ops.kernel_signatures import latent_kernel
from tatten.ops.pages import gather_pages
from tatten.ops.reference import decode_attention_reference, latent_attention_reference

RANK, WIDTH = 16, 5
SCALE = (RANK + WIDTH) ** -0.5
PER_SEQUENCE = ("query", "query_rope", "block_table", "kv_lens")


@st.composite
def calls(draw: st.DrawFn) -> PagedLatentCall:
    return draw_paged_latents(lambda options: draw(st.sampled_from(options)))


@pytest.mark.parametrize("n", slow_but([50], [50, 600]))
def test_random_calls(n: int) -> None:
    @settings(n)
    @given(calls())
    def test(drawn: PagedLatentCall) -> None:
        inputs, expanded = drawn.inputs()
        out, lse = drawn.run(inputs)
        blocks = drawn.latents.blocks
        assert_within_bound(out, lse, expanded, blocks, summed_wide=True, out_dtype=drawn.out_dtype)

    test()


def test_the_reference_of_random_calls() -> None:
    @settings(40)
    @given(calls())
    def test(drawn: PagedLatentCall) -> None:
        inputs, expanded = drawn.inputs()
        states = latent_attention_reference(**inputs), decode_attention_reference(**expanded)
        for got, want in zip(*states, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, equal_nan=True)

    test()


def paged(page: int, lens: list[int], columns: int, layout: str = "joined", heads: int = 4, q_len: int = 1) -> Any:
    """Arguments of a call in float64 whose pages are in random order; keys that no length reaches are NaN.

    `joined`: latents and rope are columns of one pool, as engines have them.
    """
    batch, n_pages = len(lens), len(lens) * columns + 2
    table = torch.randperm(n_pages)[: batch * columns].view(batch, columns).int()
    numbers = torch.full((n_pages, page, RANK + WIDTH), torch.nan, dtype=torch.float64)
    for b, n in enumerate(lens):
        for j in range(n):
            numbers[table[b, j // page], j % page] = torch.randn(RANK + WIDTH, dtype=torch.float64)
        table[b, -(-n // page) :] = torch.tensor([-1, 2**31 - 1, n_pages, 0])[torch.arange(columns - -(-n // page)) % 4]
    latent, key_rope = numbers.unsqueeze(2).split((RANK, WIDTH), dim=3)
    if layout == "apart":
        latent, key_rope = latent.clone(), key_rope.contiguous()
    if layout == "transposed":
        latent, key_rope = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (latent, key_rope))
    query, query_rope = (torch.randn(batch, heads, q_len, n, dtype=torch.float64) for n in (RANK, WIDTH))
    return {
        "query": query,
        "query_rope": query_rope,
        "latent": latent,
        "key_rope": key_rope,
        "block_table": table,
        "kv_lens": torch.tensor(lens, dtype=torch.int32),
        "scale": SCALE,
    }


def one_by_one(inputs: dict[str, Any], **variant: Any) -> tuple[Tensor, Tensor]:
    """The states of the sequences over their keys in order, each in a call of its own."""
    states = []
    for b, n in enumerate(inputs["kv_lens"].tolist()):
        page = inputs["latent"].shape[1]
        at = [(int(inputs["block_table"][b, j // page]), j % page) for j in range(n)]
        latent, rope = (
            torch.stack([inputs[name][place] for place in at], dim=1)[None] if n else inputs[name].new_empty(1, 1, 0, d)
            for name, d in (("latent", RANK), ("key_rope", WIDTH))
        )
        queries = inputs["query"][b : b + 1], inputs["query_rope"][b : b + 1]
        states.append(latent_attention_reference(*queries, latent, rope, scale=SCALE, **variant))
    return tuple(torch.cat(x) for x in zip(*states, strict=True))


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("page", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_page_sizes_and_lengths(page: int) -> None:
    inputs = paged(page, [3 * page, 0, 1, page, 2 * page + page // 2, max(page - 1, 0)], 3)
    assert_same(tatten.latent_attention(**inputs, return_lse=True), one_by_one(inputs))


@pytest.mark.parametrize("layout", ["joined", "apart", "transposed"])
@pytest.mark.parametrize(
    "variant", [{}, {"window": 5}, {"window": 40, "softcap": 3.0}, {"sinks": torch.randn(4).double()}]
)
def test_layouts_and_variants(layout: str, variant: dict[str, Any]) -> None:
    inputs = paged(4, [40, 3, 0, 17], 10, layout, q_len=3)
    assert_same(tatten.latent_attention(**inputs, **variant, return_lse=True), one_by_one(inputs, **variant))


def test_without_rope() -> None:
    inputs = paged(4, [12, 0, 10], 3)
    zero = inputs | {"query_rope": torch.zeros_like(inputs["query_rope"])}
    none = inputs | dict.fromkeys(("query_rope", "key_rope"))
    assert_same(tatten.latent_attention(**none, return_lse=True), one_by_one(zero))


def test_a_pool_without_a_dim_of_heads() -> None:
    """vLLM's pool is [pages, page, rank + width]."""
    inputs = paged(4, [12, 0, 10], 3)
    pool = torch.cat((inputs["latent"], inputs["key_rope"]), dim=3).squeeze(2)
    latent, key_rope = pool.unsqueeze(2).split((RANK, WIDTH), dim=3)
    got = tatten.latent_attention(**inputs | {"latent": latent, "key_rope": key_rope}, return_lse=True)
    assert_same(got, one_by_one(inputs))


def test_a_mask_counts_keys_of_a_sequence_from_its_first() -> None:
    inputs = paged(4, [12, 10], 3, q_len=2)
    mask = torch.rand(2, 1, 2, 12) > 0.4
    want = [
        one_by_one({name: x[b : b + 1] if name in PER_SEQUENCE else x for name, x in inputs.items()}, attn_mask=own)
        for b, own in enumerate((mask[:1], mask[1:, ..., :10]))
    ]
    got = tatten.latent_attention(**inputs, attn_mask=mask, return_lse=True)
    assert_same(got, tuple(torch.cat(x) for x in zip(*want, strict=True)))


@pytest.mark.parametrize("entry", [-1, -(2**31), 2**31 - 1, 9])
def test_keys_of_an_entry_that_names_no_page_are_left_out(entry: int) -> None:
    inputs = paged(4, [12, 10], 3)
    assert len(inputs["latent"]) <= 9
    shorter = inputs | {"kv_lens": torch.tensor([8, 10])}
    shorter["block_table"] = inputs["block_table"].clone()
    shorter["block_table"][0, 1] = inputs["block_table"][0, 2]
    inputs["block_table"][0, 1] = entry
    assert_same(tatten.latent_attention(**inputs, return_lse=True), one_by_one(shorter))
    inputs["block_table"][0] = entry
    out, lse = tatten.latent_attention(**inputs, return_lse=True)
    assert not out[0].any()
    assert (lse[0] == -torch.inf).all()


def test_entries_before_every_window_may_be_anything() -> None:
    inputs = paged(4, [12, 10], 3)
    want = one_by_one(inputs, window=3)
    for b, first in enumerate([9, 7]):
        inputs["latent"][inputs["block_table"][b, : first // 4]] = torch.nan
        inputs["block_table"][b, : first // 4] = 0
    assert_same(tatten.latent_attention(**inputs, window=3, return_lse=True), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bits_of_a_sequence_do_not_depend_on_the_others(dtype: torch.dtype) -> None:
    inputs = paged(16, [300, 77, 0, 128], 20, q_len=2)
    inputs |= {name: inputs[name].to(dtype) for name in ("query", "query_rope", "latent", "key_rope")}
    given = {"sinks": torch.randn(4), "batch_invariant": True, "return_lse": True}
    together = tatten.latent_attention(**inputs, **given)
    for b in range(4):
        own = {name: inputs[name][b : b + 1] for name in PER_SEQUENCE}
        alone = tatten.latent_attention(**inputs | own, **given)
        assert all(torch.equal(x[b : b + 1], y) for x, y in zip(together, alone, strict=True))


def test_one_sequence_at_a_time_is_copied() -> None:
    inputs = paged(16, [320, 160, 320, 16], 40)
    held = {x.untyped_storage().data_ptr() for x in inputs.values() if isinstance(x, Tensor)}
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in [out] if isinstance(out, Tensor) else []:
                if x.untyped_storage().data_ptr() not in held:
                    largest = max(largest, x.untyped_storage().nbytes())
            return out

    attend = latent_kernel(latent_on_cpu)
    with Sizes():  # the op itself hides the operators that it calls
        attend(**inputs)
    assert largest == 320 * RANK * 8


def test_opcheck_and_fakes() -> None:
    inputs = paged(4, [12, 10, 0], 3, q_len=2)
    tensors = [inputs.pop(name) for name in ("query", "query_rope", "latent", "key_rope")]
    variant = {"window": 5, "attn_mask": torch.rand(3, 1, 2, 12) > 0.3, "out_dtype": torch.float64}
    opcheck(torch.ops.tatten.latent_attention.default, tuple(tensors), {**inputs, **variant})


def test_compiles_with_dynamic_shapes() -> None:
    compiled = torch.compile(tatten.latent_attention, backend="eager", dynamic=True, fullgraph=True)
    for columns, lens in ((3, [12, 10, 0]), (5, [20, 3, 7])):
        inputs = paged(4, lens, columns)
        assert_same(compiled(**inputs, return_lse=True), one_by_one(inputs))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("core_aten", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_decomposes(core_aten: bool, masked: bool) -> None:
    inputs = paged(4, [12, 10, 0], 3, q_len=2)
    inputs["block_table"][0, 1] = -1
    scale = inputs.pop("scale")
    variant: dict[str, Any] = {"window": 7, "sinks": torch.randn(4).double(), "scale": scale}
    if masked:
        variant["attn_mask"] = torch.rand(3, 1, 2, 12) > 0.3

    class Step(torch.nn.Module):
        def forward(self, inputs: dict[str, Any]) -> Any:
            return tatten.latent_attention(**inputs, **variant, return_lse=True)

    with torch.no_grad():
        program = torch.export.export(Step(), (inputs,))
    program = program.run_decompositions(tatten.decompositions(core_aten=core_aten))
    assert not [node for node in program.graph.nodes if "tatten" in str(node.target)]
    want = latent_attention_reference(**inputs, **variant)
    for got, x in zip(program.module()(inputs), want, strict=True):
        torch.testing.assert_close(got, x, rtol=1e-5, atol=1e-5)


def test_a_copy_has_no_number_that_no_length_covers() -> None:
    inputs = paged(4, [12, 10, 0], 3)
    inputs["block_table"][0, 1] = -1
    copies = latent_kernel(gather_pages)(**inputs).segments[0]
    assert copies.value is copies.key
    for x in (copies.key, copies.rope):
        assert not x.isnan().any()
        assert not x[0, :, 4:8].any()


@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}])
def test_the_backend_leaves_calls_over_pages_as_they_are(options: dict[str, Any]) -> None:
    inputs = paged(4, [12, 10, 0], 3)

    def step(query: Tensor, **rest: Any) -> Tensor:
        attended = tatten.latent_attention(query, **rest)
        return torch.nn.functional.scaled_dot_product_attention(attended, attended, attended)

    with torch.no_grad():
        compiled = torch.compile(step, backend="tatten", options=options, fullgraph=True)
        torch.testing.assert_close(compiled(**inputs), step(**inputs))
