"""`paged_attention`: mixed batches, in which each query is held to float64 over the keys that it sees."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from fuzz import settings
from hypothesis import given
from hypothesis import strategies as st
from mixed_calls import MixedBatch, draw_mixed_batch
from slow import slow_but
from torch import Tensor
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import tatten
from tatten.ops.cpu.mixed import paged_attention as mixed_on_cpu
from tatten.ops.mixed_batch import mixed_kernel
from tatten.ops.reference import decode_attention_reference, paged_attention_reference


@st.composite
def batches(draw: st.DrawFn) -> MixedBatch:
    return draw_mixed_batch(lambda options: draw(st.sampled_from(options)))


@pytest.mark.parametrize("n", slow_but([60], [60, 600]))
def test_random_calls(n: int) -> None:
    @settings(n)
    @given(batches())
    def test(drawn: MixedBatch) -> None:
        inputs, dense = drawn.inputs()
        out, lse = tatten.paged_attention(**inputs, return_lse=True)
        drawn.check(out, lse, dense, parts=8)

    test()


def test_the_reference_of_random_calls() -> None:
    @settings(40)
    @given(batches())
    def test(drawn: MixedBatch) -> None:
        inputs, dense = drawn.inputs()
        out, lse = paged_attention_reference(**inputs)
        assert not out[drawn.used :].any()
        assert (lse[drawn.used :] == -torch.inf).all()
        if drawn.used:
            for got, want in zip((out, lse), decode_attention_reference(**dense), strict=True):
                torch.testing.assert_close(got[: drawn.used], want.squeeze(2), rtol=1e-12, atol=1e-12)

    test()


def mixed(sequences: list[tuple[int, int]], **changes: Any) -> tuple[MixedBatch, dict[str, Any], dict[str, Any]]:
    """A batch of (queries, keys before them), its arguments in float64, and the dense call of its tokens."""
    drawn = MixedBatch(tuple(sequences), **{"dtype": torch.float64, **changes})
    return (drawn, *drawn.inputs())


def assert_exact(drawn: MixedBatch, state: tuple[Tensor, Tensor], dense: dict[str, Any]) -> None:
    for got, want in zip(state, decode_attention_reference(**dense), strict=True):
        torch.testing.assert_close(got[: drawn.used], want.squeeze(2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("page", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_page_sizes(page: int) -> None:
    drawn, inputs, dense = mixed([(1, 70), (40, 30), (3, 0), (0, 9), (20, 0)], page=page, padding=3)
    assert_exact(drawn, tatten.paged_attention(**inputs, return_lse=True), dense)


@pytest.mark.parametrize(
    "variant", [{"window": 5}, {"window": 40, "softcap": 3.0}, {"sinks": "random"}, {"scale": -0.3}, {"scale": 0.0}]
)
def test_variants(variant: dict[str, Any]) -> None:
    drawn, inputs, dense = mixed([(1, 70), (130, 30), (3, 0)], page=4, pools="interleaved", **variant)
    assert_exact(drawn, tatten.paged_attention(**inputs, return_lse=True), dense)


def test_queries_before_the_first_key_are_empty() -> None:
    drawn, inputs, dense = mixed([(40, -30), (5, -3), (2, -5)])
    out, lse = tatten.paged_attention(**inputs, return_lse=True)
    assert_exact(drawn, (out, lse), dense)
    empty = torch.tensor([*range(30), *range(40, 43), 45, 46])
    assert not out[empty].any()
    assert (lse[empty] == -torch.inf).all()
    assert lse.isfinite().sum() == 4 * (47 - len(empty))


def test_sinks_count_for_queries_without_keys_and_not_for_padding() -> None:
    drawn, inputs, _ = mixed([(40, -30), (2, -5)], sinks="random", padding=4)
    for state in (tatten.paged_attention(**inputs, return_lse=True), paged_attention_reference(**inputs)):
        assert not state[0][:30].any()
        torch.testing.assert_close(state[1][:30], inputs["sinks"].double().expand(30, -1))
        assert (state[1][drawn.used :] == -torch.inf).all()


def test_zeros_are_fine_as_padding_of_sequences() -> None:
    """Engines pad batches: sequences of one zero query without keys, whose entries are -1."""
    _, inputs, _ = mixed([(3, 20), (1, -1), (1, -1)])
    inputs["query"][3:] = 0
    inputs["block_table"][1:] = -1
    out, lse = tatten.paged_attention(**inputs, return_lse=True)
    assert not out[3:].any()
    assert (lse[3:] == -torch.inf).all()


@pytest.mark.parametrize("window", [None, 6])
def test_one_query_each_is_a_decode_step(window: int | None) -> None:
    _, inputs, _ = mixed([(1, 70), (1, 0), (1, 33)], window=window)
    starts, query = inputs.pop("cu_seqlens_q"), inputs.pop("query")
    want = tatten.decode_attention(query[:, :, None], **inputs, return_lse=True)
    got = tatten.paged_attention(query, cu_seqlens_q=starts, **inputs, return_lse=True)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y.squeeze(2), rtol=1e-12, atol=1e-12)


def test_keys_of_an_entry_that_names_no_page_are_left_out() -> None:
    drawn, inputs, dense = mixed([(1, 70), (130, 30)], missing=True, seed=5)
    assert ((inputs["block_table"] < 0) | (inputs["block_table"] >= len(inputs["key"])))[:, :5].any()
    assert_exact(drawn, tatten.paged_attention(**inputs, return_lse=True), dense)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("scaled", ["", "head", "key"])
def test_eight_bits(dtype: str, scaled: str) -> None:
    drawn, inputs, dense = mixed([(1, 70), (130, 30), (3, 5)], narrow=dtype, scaled=scaled)
    assert_exact(drawn, tatten.paged_attention(**inputs, return_lse=True), dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("window", [None, 20])
def test_bits_of_a_sequence_do_not_depend_on_the_others(dtype: torch.dtype, window: int | None) -> None:
    sequences = [(1, 300), (100, 50), (4, 77), (17, 0)]
    _, inputs, _ = mixed(sequences, dtype=dtype, window=window, sinks="random")
    together = tatten.paged_attention(**inputs, batch_invariant=True, return_lse=True)
    starts = inputs["cu_seqlens_q"].tolist()
    for b, (start, stop) in enumerate(itertools.pairwise(starts)):
        own = inputs | {name: inputs[name][b : b + 1] for name in ("block_table", "kv_lens")}
        own |= {"query": inputs["query"][start:stop], "cu_seqlens_q": torch.tensor([0, stop - start]).int()}
        alone = tatten.paged_attention(**own, batch_invariant=True, return_lse=True)
        assert all(torch.equal(x[start:stop], y) for x, y in zip(together, alone, strict=True))


@pytest.mark.parametrize("variant", [{}, {"window": 200}, {"softcap": 3.0}])
def test_no_mask_has_all_queries_and_all_keys(variant: dict[str, Any]) -> None:
    _, inputs, _ = mixed([(2000, 1000)], dtype=torch.float32, **variant)
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in [out] if isinstance(out, Tensor) else []:
                if x.untyped_storage().data_ptr() not in held:
                    largest = max(largest, x.untyped_storage().nbytes())
            return out

    held = {x.untyped_storage().data_ptr() for x in inputs.values() if isinstance(x, Tensor)}
    attend = mixed_kernel(mixed_on_cpu)
    with Sizes():  # the op itself hides the operators that it calls
        attend(**inputs)
    scores_of_a_block = 64 * 3000 * 4 * 4
    assert largest <= scores_of_a_block < 2000 * 3000


def test_opcheck_and_fakes() -> None:
    for change in ({"window": 5, "sinks": "some"}, {"narrow": "int8", "scaled": "key", "dtype": torch.float32}):
        _, inputs, _ = mixed([(1, 70), (30, 3)], padding=2, **change)
        names = "query", "key", "value", "block_table", "cu_seqlens_q", "kv_lens"
        required = tuple(inputs.pop(name) for name in names)
        opcheck(torch.ops.tatten.paged_attention.default, required, inputs)


def test_compiles_with_dynamic_shapes() -> None:
    torch._dynamo.reset()  # other tests compile the same function, and count towards its recompile limit
    compiled = torch.compile(tatten.paged_attention, backend="eager", dynamic=True, fullgraph=True)
    for sequences in ([(1, 20), (5, 10)], [(3, 40), (30, 0), (1, 9)]):
        drawn, inputs, dense = mixed(sequences)
        assert_exact(drawn, compiled(**inputs, return_lse=True), dense)


@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}])
def test_the_backend_leaves_the_op_as_it_is(options: dict[str, Any]) -> None:
    _, inputs, _ = mixed([(1, 20), (5, 10)], dtype=torch.float32)
    with torch.no_grad():
        compiled = torch.compile(tatten.paged_attention, backend="tatten", options=options, fullgraph=True)
        torch.testing.assert_close(compiled(**inputs), tatten.paged_attention(**inputs))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("core_aten", [False, True])
@pytest.mark.parametrize("narrow", ["", "int8"])
def test_decomposes(core_aten: bool, narrow: str) -> None:
    change = {"narrow": narrow, "scaled": "key"} if narrow else {}
    drawn, inputs, dense = mixed([(1, 20), (5, 10), (0, 0), (3, -2)], padding=2, window=9, sinks="random", **change)

    class Step(torch.nn.Module):
        def forward(self, inputs: dict[str, Any]) -> Any:
            return tatten.paged_attention(**inputs, return_lse=True)

    with torch.no_grad():
        program = torch.export.export(Step(), (inputs,))
    program = program.run_decompositions(tatten.decompositions(core_aten=core_aten))
    assert not [node for node in program.graph.nodes if "tatten" in str(node.target)]
    out, lse = program.module()(inputs)
    for got, want in zip((out, lse), decode_attention_reference(**dense), strict=True):
        torch.testing.assert_close(got[: drawn.used], want.squeeze(2), rtol=1e-5, atol=1e-5)
    assert not out[drawn.used :].any()
    assert (lse[drawn.used :] == -torch.inf).all()


def test_batch_invariant_has_no_decomposition() -> None:
    _, inputs, _ = mixed([(1, 20)])
    decompose = tatten.decompositions()[torch.ops.tatten.paged_attention.default]
    with pytest.raises(NotImplementedError, match="`batch_invariant` must be False where paged_attention"):
        decompose(inputs.pop("query"), **inputs, batch_invariant=True)


@pytest.mark.parametrize(
    ("given_starts", "read"),
    [([7, 3, 6], [0, 3, 6]), ([0, 5, 3], [0, 5, 5]), ([-9, -3, 40], [0, 0, 8]), ([0, 2**31 - 1, 0], [0, 8, 8])],
)
def test_starts_that_do_not_add_up_are_read_as_a_gpu_reads_them(given_starts: list[int], read: list[int]) -> None:
    _, inputs, _ = mixed([(2, 20), (6, 10)])
    got = paged_attention_reference(**inputs | {"cu_seqlens_q": torch.tensor(given_starts).int()})
    want = tatten.paged_attention(**inputs | {"cu_seqlens_q": torch.tensor(read).int()}, return_lse=True)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
