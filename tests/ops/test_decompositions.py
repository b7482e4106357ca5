"""The ops decomposed into aten: as exact as the ops, whatever the masks hold, in graphs that need no tatten."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import Case, assert_state
from fuzz import settings
from hypothesis import given
from hypothesis import strategies as st
from latent_calls import LatentCall, draw_latent_call
from op_bounds import assert_within_bound
from op_calls import Call, draw_call, together
from picked_calls import PickedCall, draw_picked_call
from slow import slow_after, slow_but
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.utils._python_dispatch import TorchDispatchMode

import tatten

pytestmark = pytest.mark.drawn(5)

LOW = (torch.bfloat16, torch.float16)
CASES = [
    Case(),
    Case(kv_len=0, lens=True, mask="holes"),
    Case(mask="causal", q_len=3, lens=True),
    Case(mask="broadcast", q_heads=71, kv_heads=1, head_dim=64, kv_len=130),
    Case(mask="all_false", q_len=2),
    Case(mask="all_false", batch=1),
    Case(mask="empty_rows", dtype=torch.bfloat16, lens=True),
    Case(mask="additive_f32", dtype=torch.float16, q_len=2),
    Case(head_dim=48, value_dim=32, mask="alibi", kv_len=77),
    Case(head_dim=32, value_dim=64, mask="one_column"),
    Case(window=5, softcap=2.0, sinks=True, q_len=3, lens=True, mask="causal"),
    Case(window=1000, q_len=3, lens=True),
    Case(narrow="scaled", lens=True, mask="empty_rows", dtype=torch.float64),
    Case(narrow="plain", mask="additive", dtype=torch.bfloat16, window=5),
    Case(narrow="per_key", int8=True, mask="causal", dtype=torch.bfloat16, q_len=2, lens=True),
    Case(mask="2d", dtype=torch.float64, sinks=True, scale=-1.0),
    Case(kv_len=1, softcap=2.0, mask="all_false"),
    Case(batch=12, q_heads=2, kv_heads=2, kv_len=900, lens=True),
    *(
        Case(mask=mask, q_len=n, lens=lens, dtype=dtype, kv_len=67)
        for mask in ("keys", "holes", "per_head", "empty_rows", "one_key", "additive", "finfo_min", "alibi")
        for n in (1, 3)
        for lens in (False, True)
        for dtype in (torch.float32, *LOW)
    ),
]


class Decomposed(TorchDispatchMode):
    """Runs the decompositions in place of the ops."""

    def __init__(self, core_aten: bool = False) -> None:
        super().__init__()
        self.core_aten = core_aten

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not (self.core_aten and "flash" in str(func))
        return tatten.decompositions(core_aten=self.core_aten).get(func, func)(*args, **(kwargs or {}))


@st.composite
def calls(draw: st.DrawFn) -> Call:
    return draw_call(lambda options: draw(st.sampled_from(options)))


@pytest.mark.parametrize("core_aten", [False, True])
@pytest.mark.parametrize("case", slow_after(40, CASES), ids=str)
def test_equals_float64(case: Case, core_aten: bool) -> None:
    inputs = case.inputs(poison=case.mask != "finfo_min")
    with Decomposed(core_aten):
        out, lse = torch.ops.tatten.decode_attention(**inputs)
    assert_state(out, lse, inputs)
    assert out.is_contiguous()
    assert lse.is_contiguous()


@pytest.mark.parametrize("core_aten", [False, True])
@pytest.mark.parametrize("n", slow_but([30], [30, 300]))
def test_random_calls(n: int, core_aten: bool) -> None:
    @settings(n)
    @given(calls())
    def test(call: Call) -> None:
        inputs = call.inputs()
        with Decomposed(core_aten):
            out, lse = call.run(inputs)
        assert_within_bound(out, lse, together(inputs), call.most_parts)

    test()


@pytest.mark.parametrize("n", slow_but([20], [20, 300]))
def test_random_calls_of_latent_attention(n: int) -> None:
    @settings(n)
    @given(st.composite(lambda draw: draw_latent_call(lambda options: draw(st.sampled_from(options))))())
    def test(call: LatentCall) -> None:
        inputs, expanded = call.inputs()
        with Decomposed():
            out, lse = call.run(inputs)
        dtype = call.expanded.dtype
        wide = torch.promote_types(dtype, torch.float32) if call.wide else dtype
        assert_within_bound(out, lse, expanded, parts=1, summed_wide=True, out_dtype=wide)

    test()


@pytest.mark.parametrize("latents", [False, True])
@pytest.mark.parametrize("n", slow_but([15], [15, 300]))
def test_random_calls_with_picks(n: int, latents: bool) -> None:
    @settings(n)
    @given(st.composite(lambda draw: draw_picked_call(lambda options: draw(st.sampled_from(options)), latents))())
    def test(call: PickedCall) -> None:
        inputs, dense = call.inputs()
        with Decomposed():
            out, lse = call.run(inputs)
        roundings = call.parts if call.rest else 1
        assert_within_bound(out, lse, dense, call.parts, roundings, summed_wide=not call.rest)

    test()


class Decode(torch.nn.Module):
    """`tatten.decode_attention` with the tensors as inputs and the rest as constants."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        super().__init__()
        self.constants = {name: x for name, x in inputs.items() if not isinstance(x, Tensor) and name != "block_mask"}

    def forward(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        mask = tensors.get("attn_mask")
        found = None if mask is None or mask.shape[-1] == 1 else tatten.block_mask(mask)
        return tatten.decode_attention(**tensors, **self.constants, block_mask=found, return_lse=True)


def decomposed(module: torch.nn.Module, *args: Any, **options: Any) -> ExportedProgram:
    with torch.no_grad():
        program = torch.export.export(module, args, **options).run_decompositions(tatten.decompositions())
    program.validate()
    assert not [node.target for node in program.graph.nodes if "tatten" in str(node.target)]
    return program


def tensors_of(inputs: dict[str, Any]) -> dict[str, Tensor]:
    return {name: x for name, x in inputs.items() if isinstance(x, Tensor)}


@pytest.mark.parametrize("case", slow_after(8, CASES[:16]), ids=str)
def test_an_exported_program_answers_for_other_inputs_than_its_example(case: Case) -> None:
    inputs = case.inputs()
    example = {name: torch.ones_like(x) for name, x in tensors_of(inputs).items()}
    program = decomposed(Decode(inputs), example)
    assert_state(*program.module()(tensors_of(inputs)), inputs)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_sizes_may_be_dynamic(softcap: float | None) -> None:
    inputs = Case(batch=3, mask="causal", q_len=2, softcap=softcap).inputs()
    batch, length = Dim("batch", min=2, max=64), Dim("length", min=2, max=4096)
    rows = {0: batch, 2: length}
    sizes = {"query": {0: batch}, "key": rows, "value": rows, "attn_mask": {0: batch, 3: length}}
    program = decomposed(Decode(inputs), tensors_of(inputs), dynamic_shapes=(sizes,))
    for batch, mask, kv_len in ((5, "causal", 70), (2, "all_false", 33)):
        inputs = Case(batch=batch, mask=mask, q_len=2, kv_len=kv_len, softcap=softcap).inputs()
        assert_state(*program.module()(tensors_of(inputs)), inputs)


class Segments(torch.nn.Module):
    def forward(self, query: Tensor, shared: Tensor, own: Tensor) -> Tensor:
        return tatten.bifurcated_attention(query, [shared, own], [shared, own])


def test_a_dynamic_segment_without_keys_is_an_error() -> None:
    """PyTorch's flash kernel would end the process."""
    query, shared, own = torch.randn(3, 4, 1, 16), torch.randn(1, 2, 40, 16), torch.randn(3, 2, 20, 16)
    sizes = {"query": {}, "shared": {}, "own": {2: Dim("length", max=64)}}
    for core_aten in (False, True):
        table = tatten.decompositions(core_aten=core_aten)
        with torch.no_grad():
            program = torch.export.export(Segments(), (query, shared, own), dynamic_shapes=sizes)
            module = program.run_decompositions(table).module()
            one_key = own[:, :, :1]
            torch.testing.assert_close(module(query, shared, one_key), Segments()(query, shared, one_key))
            with pytest.raises(RuntimeError, match="a segment of dynamic length must have at least 1 key in"):
                module(query, shared, own[:, :, :0])


def test_a_dynamic_masked_segment_of_one_key_is_an_error_for_products() -> None:
    inputs = tensors_of(Case(batch=3, mask="causal").inputs())
    length = Dim("length", min=1, max=4096)
    sizes = {name: {3: length} if name == "attn_mask" else {2: length} for name in ("key", "value", "attn_mask")}
    with torch.no_grad():
        program = torch.export.export(Decode({}), (inputs,), dynamic_shapes=({"query": {}, **sizes},))
    short = {name: x if name == "query" else x.narrow(sizes[name].popitem()[0], 0, 1) for name, x in inputs.items()}
    module = program.run_decompositions(tatten.decompositions(core_aten=True)).module()
    with pytest.raises(RuntimeError, match="a segment of dynamic length must have at least 2 keys in"):
        module(short)


class Latent(torch.nn.Module):
    def forward(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return tatten.latent_attention(**tensors, scale=0.2, out_dtype=torch.float32, return_lse=True)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_exported_program_reads_latents(dtype: torch.dtype, masked: bool) -> None:
    """Latents may have any length, and none lies beside poison."""

    def inputs(batch: int, kv_len: int) -> dict[str, Tensor]:
        shapes = {"query": (batch, 3, 2, 16), "query_rope": (batch, 3, 2, 8)}
        shapes |= {"latent": (batch, 1, kv_len, 16), "key_rope": (batch, 1, kv_len, 8)}
        made = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
        if masked:
            used = torch.arange(kv_len) < torch.arange(batch)[:, None, None, None] * 5
            made |= {"attn_mask": used}
            poison = ~used.mT
            made |= {name: made[name].masked_fill(poison, float("nan")) for name in ("latent", "key_rope")}
        return made

    batch, length = Dim("batch", min=2, max=64), Dim("length", min=2, max=4096)
    example = inputs(3, 40)
    sizes = {name: {0: batch} if "query" in name else {0: batch, 2: length} for name in example}
    if masked:
        sizes["attn_mask"] = {0: batch, 3: length}
    program = decomposed(Latent(), example, dynamic_shapes=(sizes,))
    for other in (inputs(2, 33), inputs(5, 70)):
        torch.testing.assert_close(program.module()(other), Latent()(other))


def test_the_program_does_not_depend_on_the_cores_of_the_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Case(batch=1, q_heads=3, kv_heads=3, kv_len=9001, head_dim=64, mask="causal").inputs()
    graphs = []
    for threads in (1, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        graphs.append(str(decomposed(Decode(inputs), tensors_of(inputs)).graph))
    assert graphs[0] == graphs[1]


class Bifurcated(torch.nn.Module):
    def forward(self, query: Tensor, keys: list[Tensor], values: list[Tensor], masks: list[Tensor], rows: Tensor):
        segments = {"attn_masks": [None, *masks], "rows": [rows, None]}
        return tatten.bifurcated_attention(query, keys, values, **segments, return_lse=True)


@pytest.mark.parametrize("additive", [False, True])
def test_an_exported_program_reads_shared_rows(additive: bool) -> None:
    torch.manual_seed(0)
    query, rows = torch.randn(4, 6, 1, 16), torch.tensor([2, 0, 2, 2])
    keys, values = ([torch.randn(3, 2, 9, 16), torch.randn(4, 2, 33, 16)] for _ in range(2))
    mask = torch.arange(33) < torch.tensor([5, 0, 33, 8])[:, None, None, None]
    poison = ~mask[:, 0, 0, None, :, None]
    keys[1], values[1] = (x.masked_fill(poison, float("nan")) for x in (keys[1], values[1]))
    keys[0][1], values[0][1] = float("nan"), float("nan")  # which nothing reads
    masks = [torch.where(mask, 0.5, float("-inf")) if additive else mask]
    example = ([torch.ones_like(x) for x in parts] for parts in (keys, values, masks))
    program = decomposed(Bifurcated(), query, *example, torch.zeros_like(rows))
    got = program.module()(query, keys, values, masks, rows)
    torch.testing.assert_close(got, Bifurcated()(query, keys, values, masks, rows))


class OneStorage(torch.nn.Module):
    """Attention whose keys and values, and maybe queries, are views of one tensor with 6 heads."""

    def __init__(self, views: str) -> None:
        super().__init__()
        self.views = views

    def forward(self, query: Tensor, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        if self.views == "key is value":
            key = value = x
        elif self.views == "value in key":
            key, value = x, x[..., :8]
        else:
            key, value = x[:, :3], x[:, 3:]
        if self.views == "one projection":
            query, key, value = (part[:, :, -1:] if i == 0 else part for i, part in enumerate(x.split(2, dim=1)))
        return tatten.decode_attention(query, key, value, attn_mask=mask, return_lse=True)


@pytest.mark.parametrize("views", ["key is value", "value in key", "one buffer", "one projection"])
def test_views_of_one_storage_decompose_twice(views: str) -> None:
    """As packaging does."""
    torch.manual_seed(0)
    query, x, module = torch.randn(3, 6, 1, 16), torch.randn(3, 6, 33, 16), OneStorage(views)
    mask = torch.arange(33) >= torch.tensor([5, 0, 32])[:, None, None, None]
    x = x.masked_fill(~mask.transpose(2, 3), float("nan"))
    once = decomposed(module, torch.ones_like(query), torch.ones_like(x), torch.ones_like(mask))
    expected = module(query, x, mask)
    assert not any(state.isnan().any() for state in expected)
    for program in (once, once.run_decompositions({})):
        torch.testing.assert_close(program.module()(query, x, mask), expected)


class Merge(torch.nn.Module):
    def forward(self, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        stack = torch.ops.tatten.merge_states(out, lse)
        return *stack, *tatten.merge_state(out[0], lse[0], out[1], lse[1])


def test_an_exported_program_merges_states() -> None:
    out, lse = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4)
    lse[0, 1], out[0, 1] = float("-inf"), float("nan")
    program = decomposed(Merge(), torch.zeros_like(out), torch.zeros_like(lse))
    torch.testing.assert_close(program.module()(out, lse), Merge()(out, lse), rtol=0, atol=0)


def test_row_groups_are_those_of_the_op() -> None:
    rows = torch.tensor([2, 0, 2, 2, 1, 0, 2])
    with Decomposed():
        got = torch.ops.tatten.row_groups(rows, 3, 8)
    assert torch.equal(got, torch.ops.tatten.row_groups(rows, 3, 8))


def test_products_of_heads_are_those_of_the_op() -> None:
    x, weight = torch.randn(2, 3, 1, 20), torch.randn(3, 9, 20).bfloat16()[:, 4:]
    with Decomposed():
        got = torch.ops.tatten.project_heads(x, weight)
    assert torch.equal(got, torch.ops.tatten.project_heads(x, weight))


def test_scores_of_an_indexer_are_those_of_the_op() -> None:
    query, key, weights = torch.randn(2, 3, 5, 8), torch.randn(2, 9, 8), torch.randn(2, 3, 5)
    mask = torch.rand(2, 1, 9) < 0.7
    with Decomposed():
        got = torch.ops.tatten.index_scores(query, key, weights, scale=0.3, attn_mask=mask)
    torch.testing.assert_close(got, torch.ops.tatten.index_scores(query, key, weights, scale=0.3, attn_mask=mask))


def test_ops_on_other_devices_stay() -> None:
    x = torch.empty(1, 2, 1, 8, device="meta")
    for op, decomposition in tatten.decompositions().items():
        if op is not torch.ops.tatten.block_mask.default:  # which is `block_list` there
            assert decomposition(x, x, x) is NotImplemented, op
