"""Linear layers of few rows: those that read one input share a launch, in decode steps on a GPU of Hopper."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from graphs import capture, listing, name_of
from one_row_layers import take_any_size
from torch import Tensor
from torch.fx import GraphModule
from torch.testing._internal.two_tensor import TwoTensor
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from tatten.integrations.transformers import cache_kwargs
from tatten.ops.cuda import skinny_linear as on_cuda
from tatten.passes import rewrite, skinny_linears
from tatten.passes.findings import Declined, Rewritten
from tatten.passes.mutation import movers
from tatten.passes.reasons import Reason
from tatten.passes.skinny_linears import LinearGroup, apply_linear_group, find_skinny_linears
from tatten.passes.symbolic import hint, tensor_of, value_of

bf16 = torch.bfloat16
B, HEADS, DIM, SLOTS, WIDTH, INNER = 3, 2, 16, 64, 32, 48
OP = torch.ops.tatten.skinny_linear.default
LEAST_BYTES, PAYS_ON = skinny_linears.LEAST_BYTES, skinny_linears.pays_on
LEAST_BYTES_OF_ONE_ROW = skinny_linears.LEAST_BYTES_OF_ONE_ROW


@pytest.fixture(autouse=True)
def _as_on_hopper_with_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    take_any_size(monkeypatch)


def weight(n_out: int = INNER, n_in: int = WIDTH, dtype: torch.dtype = bf16) -> Tensor:
    return torch.randn(n_out, n_in).to(dtype)


def inputs(rows: int = B, dtype: torch.dtype = bf16) -> dict[str, Tensor]:
    torch.manual_seed(0)
    named = {"x": torch.randn(rows, 1, WIDTH).to(dtype), "a": weight(dtype=dtype), "b": weight(16, dtype=dtype)}
    return named | {"c": weight(20, dtype=dtype), "d": weight(WIDTH, INNER, dtype), "bias": torch.randn(16).to(dtype)}


def search(fn: Callable[..., Any], named: dict[str, Tensor], **options: Any) -> tuple[GraphModule, list[LinearGroup]]:
    """The graph of a function, and the groups that the pass finds in it."""
    gm = capture(fn, *named.values(), **options)
    return gm, find_skinny_linears(gm.graph, movers(gm.graph))


def run(gm: GraphModule, named: dict[str, Tensor]) -> Any:
    """Run an edited graph on copies of the inputs, which it takes in an order of its own."""
    gm.graph.lint()
    gm.recompile()
    inputs = gm.graph.find_nodes(op="placeholder")
    return gm(*(named[name_of(x)].clone() if tensor_of(x) is not None else hint(value_of(x)) for x in inputs))


def names(groups: list[LinearGroup]) -> list[list[str]]:
    """The weights of each group."""
    return [[name_of(layer.weight) for layer in x.layers] for x in groups]


def check_same(fn: Callable[..., Any], named: dict[str, Tensor]) -> None:
    """The graph computes the same after the groups are replaced."""
    gm, groups = search(fn, named)
    for group in groups:
        apply_linear_group(group)
    got, want = run(gm, named), fn(*(x.clone() for x in named.values()))
    for a, b in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7)
        assert a.stride() == b.stride()


def projections(x, a, b, c, d, bias):
    return F.linear(x, a), F.linear(x, weight=b), F.linear(x, c)


def one_layer(x, b):
    return (F.linear(x, b),)


def mlp(x, a, b, c, d, bias):
    return F.linear(F.silu(F.linear(x, a)), d) + x


def with_bias(x, a, b, c, d, bias):
    return F.linear(x, b, bias), F.linear(x, c)


def five_layers(x, a, b, c, d, bias):
    return tuple(F.linear(x, w) for w in (a, b, c, a, b))


def read_before_a_write(x, a, b, c, d, bias):
    """The second layer reads another input than the first, and the third one shares its launch."""
    first = F.linear(x, a)
    x.mul_(2)
    return first, F.linear(x, b), F.linear(x, c)


def a_view_is_written(x, a, b, c, d, bias):
    first = F.linear(x, a)
    x[0].mul_(2)
    return first, F.linear(x, b)


def a_weight_is_written(x, a, b, c, d, bias):
    first = F.linear(x, a)
    b[1:].mul_(2)
    return first, F.linear(x, b), F.linear(x, c)


def a_result_is_written(x, a, b, c, d, bias):
    first, second = F.linear(x, a), F.linear(x, b)
    first.mul_(2)
    return first, second, F.linear(input=x, weight=c)


def a_bias_is_written(x, a, b, c, d, bias):
    first = F.linear(x, a)
    bias.add_(1)
    return first, F.linear(x, b, bias)


def in_a_chain(x, a, b, c, d, bias):
    """Each layer reads the result of the one before."""
    return F.linear(F.linear(F.linear(x, a), d), b, bias)


def across_a_chain(x, a, b, c, d, bias):
    """The groups read results of one another."""
    first, second = F.linear(x, a), F.linear(x, b)
    third = F.linear(first, d)
    return F.linear(third, c), F.linear(first, d), second


POSITIVE = [
    (in_a_chain, [["a"], ["d"], ["b"]]),
    (across_a_chain, [["a", "b"], ["d", "d"], ["c"]]),
    (projections, [["a", "b", "c"]]),
    (mlp, [["a"], ["d"]]),
    (with_bias, [["b", "c"]]),
    (five_layers, [["a", "b", "c"], ["a", "b"]]),
    (read_before_a_write, [["a"], ["b", "c"]]),
    (a_bias_is_written, [["a"], ["b"]]),
    (a_view_is_written, [["a"], ["b"]]),
    (a_weight_is_written, [["a"], ["b", "c"]]),
    (a_result_is_written, [["a", "b", "c"]]),
]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("fn, expected", POSITIVE, ids=lambda x: getattr(x, "__name__", ""))
def test_layers_of_one_input_share_an_op(
    fn: Callable[..., Any], expected: list[list[str]], parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skinny_linears, "choose_parts", lambda *_: parts)
    groups = search(fn, inputs())[1]
    assert names(groups) == expected
    assert {x.parts for x in groups} == {parts}
    check_same(fn, inputs())


ROWS = [(WIDTH,), (1, WIDTH), (1, 1, WIDTH), (2, WIDTH), (64, WIDTH), (8, 8, WIDTH), (1, 8, WIDTH), (2, 1, 1, WIDTH)]


@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_up_to_64_rows(shape: tuple[int, ...]) -> None:
    named = inputs() | {"x": torch.randn(shape).to(bf16)}
    assert names(search(projections, named)[1]) == [["a", "b", "c"]]
    check_same(projections, named)


@pytest.mark.parametrize("shape", [(65, WIDTH), (5, 13, WIDTH), (0, WIDTH)], ids=str)
def test_other_numbers_of_rows_are_left(shape: tuple[int, ...]) -> None:
    assert search(projections, inputs() | {"x": torch.randn(shape).to(bf16)})[1] == []


def test_one_row_has_one_part() -> None:
    """16 outputs of 304 features have three parts with several rows."""
    for rows, parts in ((1, 1), (2, 3)):
        named = {"x": torch.randn(rows, 1, 304).to(bf16), "b": weight(16, 304)}
        assert [x.parts for x in search(one_layer, named)[1]] == [parts]
        check_same(one_layer, named)


def test_float16() -> None:
    assert len(search(projections, inputs(dtype=torch.float16))[1]) == 1
    check_same(projections, inputs(dtype=torch.float16))


def a_computed_weight(x, a, b, c, d, bias):
    return F.linear(x, a * 2)


def a_slice_of_a_weight(x, a, b, c, d, bias):
    return F.linear(x[..., :16], a[:, :16])


def a_computed_bias(x, a, b, c, d, bias):
    return F.linear(x, b, bias + 1)


def a_weight_as_a_vector(x, a, b, c, d, bias):
    return F.linear(x, bias.new_zeros(WIDTH)) + F.linear(x, x[0, 0])


def a_matmul(x, a, b, c, d, bias):
    return x @ a.T


def with_out(x, a, b, c, d, bias):
    result = x.new_empty(B, 1, INNER)
    F.linear(x, a, out=result)
    return result + 1


def moved_in_place(x, a, b, c, d, bias):
    y = x + 1
    y.transpose_(0, 1)
    return F.linear(y, a)


def under_autocast(x, a, b, c, d, bias):
    with torch.autocast("cpu", torch.float16):
        return F.linear(x, a)


NEGATIVE = [
    with_out,
    a_computed_weight,
    a_slice_of_a_weight,
    a_computed_bias,
    a_weight_as_a_vector,
    a_matmul,
    moved_in_place,
]


@pytest.mark.parametrize("fn", [*NEGATIVE, under_autocast], ids=lambda fn: fn.__name__)
def test_left_as_it_is(fn: Callable[..., Any]) -> None:
    assert search(fn, inputs())[1] == []


def test_other_dtypes_and_layouts_are_left() -> None:
    assert search(projections, inputs(dtype=torch.float32))[1] == []
    transposed = inputs() | {"a": weight(WIDTH, INNER).T}
    assert names(search(projections, transposed)[1]) == [["b", "c"]]


def test_gradients_are_left() -> None:
    named = inputs()
    named["a"].requires_grad_()
    assert names(search(projections, named, grad=True)[1]) == [["b", "c"]]
    assert names(search(projections, named)[1]) == [["a", "b", "c"]]


def test_a_bias_of_another_shape_is_left() -> None:
    for shape in ((1,), (1, 16), (B, 1)):
        named = inputs() | {"bias": torch.ones(shape, dtype=bf16)}
        assert names(search(with_bias, named)[1]) == [["c"]]


def test_layers_keep_their_grad_mode() -> None:
    """The op of both would stand where gradients are on."""

    def two_modes(x, a, c):
        first = F.linear(x, a)
        with torch.no_grad():
            return first, F.linear(x, c)

    named = {name: x for name, x in inputs().items() if name in ("x", "a", "c")}
    assert names(search(two_modes, named, grad=True)[1]) == [["a", "c"]]
    named["c"].requires_grad_()
    assert names(search(two_modes, named, grad=True)[1]) == [["a"], ["c"]]


def test_a_subclass_is_left() -> None:
    """A weight that a library stores in another way, as torchao does."""
    named = inputs()
    named["a"] = TwoTensor(named["a"], named["a"])
    assert names(search(projections, named)[1]) == [["b", "c"]]


def test_a_width_that_cannot_be_loaded_ahead_is_left() -> None:
    named = {name: x[..., :30].contiguous() for name, x in inputs().items() if name not in ("d", "bias")}
    assert search(lambda x, a, b, c: projections(x, a, b, c, None, None), named)[1] == []


def test_a_bias_is_added_in_float32() -> None:
    """Within half a unit in the last place, and more for the sums."""
    named = inputs()
    gm, (group,) = search(with_bias, named)
    apply_linear_group(group)
    got = run(gm, named)[0].double()
    x, weight, bias = (named[name].double() for name in ("x", "b", "bias"))
    want = x @ weight.T + bias
    within = want.abs() * torch.finfo(bf16).eps / 2 + (x.abs() @ weight.abs().T + bias.abs()) * 2**-20
    assert ((got - want).abs() <= within).all()


def test_small_weights_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny_linears, "LEAST_BYTES", 2 * WIDTH * (INNER + 16 + 20) + 1)
    assert search(projections, inputs())[1] == []
    monkeypatch.setattr(skinny_linears, "LEAST_BYTES", 2 * WIDTH * (INNER + 16 + 20))
    assert len(search(projections, inputs())[1]) == 1


def test_the_least_size_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """1024 outputs of 2048 features: the output of attention in Qwen3-0.6B."""
    monkeypatch.setattr(skinny_linears, "LEAST_BYTES", LEAST_BYTES)
    for features, groups in ((2048, 1), (2040, 0)):
        named = {"x": torch.zeros(2, features, dtype=bf16), "a": torch.zeros(1024, features, dtype=bf16)}
        assert len(search(F.linear, named)[1]) == groups


def test_the_least_size_of_one_row_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output of attention in Qwen2.5-0.5B."""
    monkeypatch.setattr(skinny_linears, "LEAST_BYTES_OF_ONE_ROW", LEAST_BYTES_OF_ONE_ROW)
    for features, groups in ((896, 1), (872, 0)):
        named = {"x": torch.zeros(1, features, dtype=bf16), "a": torch.zeros(896, features, dtype=bf16)}
        assert len(search(F.linear, named)[1]) == groups


def test_other_devices_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny_linears, "pays_on", PAYS_ON)
    assert search(projections, inputs())[1] == []  # on a CPU
    for hopper in (False, True):
        monkeypatch.setattr(on_cuda, "has_wgmma", lambda device, hopper=hopper: hopper)
        assert PAYS_ON(torch.device("cuda")) == hopper


@pytest.mark.parametrize("lead", [(3, 1), (1, 5), (2, 3), (64,)], ids=str)
def test_a_dynamic_number_of_rows(lead: tuple[int, ...]) -> None:
    """The op calls cuBLAS for many rows. Layers with biases are left: float32 sums would be larger than the results."""
    named = inputs() | {"x": torch.randn(*lead, WIDTH).to(bf16)}
    torch._dynamo.mark_dynamic(named["x"], lead.index(max(lead)))
    assert names(search(projections, named)[1]) == [["a", "b", "c"]]
    check_same(projections, named)
    assert names(search(with_bias, named)[1]) == []


def test_parts_of_a_dynamic_number_of_rows_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny_linears, "choose_parts", lambda outs, features, rows: 2 if features == INNER else 1)
    named = inputs()
    torch._dynamo.mark_dynamic(named["x"], 0)
    assert names(search(mlp, named)[1]) == [["a"]]
    check_same(mlp, named)


def test_one_graph_for_few_and_many_rows() -> None:
    """With a dynamic batch size, the projections of a step share a launch for any number of sequences."""
    notes = []

    def backend(gm: GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        notes.append(rewrite(gm, linears=True).note)
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for batch in (3, 70, 2):
        named = step_inputs(batch)
        for name in ("x", "key", "value", "mask"):
            torch._dynamo.mark_dynamic(named[name], 0)
        got, want = compiled(*named.values()), step(*step_inputs(batch).values())
        torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6)
    assert notes == ["3 linear layers in 2 launches"]


def test_a_dynamic_number_that_was_large_is_left() -> None:
    """A graph that was captured for 65 rows may run for many, and each call of the op takes time on the host."""
    named = inputs(rows=65)
    torch._dynamo.mark_dynamic(named["x"], 0)
    assert search(projections, named)[1] == []


def step(x, key, value, mask, a, b, d, length):
    """A decode step: a static cache, its mask, and projections."""
    q, new = F.linear(x, a), F.linear(x, b)
    key.index_copy_(2, length, new.view(-1, HEADS, 1, DIM))
    out = F.scaled_dot_product_attention(q.view(-1, HEADS, 1, DIM), key, value, mask)
    return F.linear(out.transpose(1, 2).flatten(2), d)


def step_inputs(batch: int = B) -> dict[str, Tensor]:
    torch.manual_seed(0)
    key, value = torch.randn(2, batch, HEADS, SLOTS, DIM).to(bf16)
    mask = (torch.arange(SLOTS) < 40).expand(batch, 1, 1, SLOTS)
    named = {"x": torch.randn(batch, 1, WIDTH).to(bf16), "key": key, "value": value, "mask": mask}
    named |= {name: weight(HEADS * DIM) for name in ("a", "b", "d")}
    return named | {"length": torch.tensor([39])}


class TestStep(expecttest.TestCase):
    def test_a_decode_step(self) -> None:
        gm = capture(step, *step_inputs().values())
        report = rewrite(gm, linears=True)
        assert report.note == "3 linear layers in 2 launches"
        self.assertExpectedInline(
            listing(gm),
            """\
skinny_linear_default = skinny_linear.default(l_x_, [l_a_, l_b_], 1, torch.bfloat16)
getitem_1 = getitem(skinny_linear_default, 0)
squeeze = squeeze(getitem_1, 0)
getitem_2 = getitem(skinny_linear_default, 1)
squeeze_1 = squeeze(getitem_2, 0)
view = view(squeeze_1, -1, 2, 1, 16)
index_copy_ = index_copy_(l_key_, 2, l_length_, view)
view_1 = view(squeeze, -1, 2, 1, 16)
block_mask_default = block_mask.default(l_mask_)
decode_attention_default = decode_attention.default(view_1, l_key_, l_value_, l_mask_, None, None, block_mask_default)
getitem = getitem(decode_attention_default, 0)
transpose = transpose(getitem, 1, 2)
flatten = flatten(transpose, 2)
skinny_linear_default_1 = skinny_linear.default(flatten, [l_d_], 1, torch.bfloat16)
getitem_3 = getitem(skinny_linear_default_1, 0)
squeeze_2 = squeeze(getitem_3, 0)
return (squeeze_2)""",
        )


@pytest.mark.parametrize("bias", [False, True])
def test_a_model(bias: bool) -> None:
    """Seven layers of a decoder layer take four launches, and the head one; the graph still gives the logits."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        attention_bias=bias,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval().to(bf16)
    cache = StaticCache(config, max_cache_len=128)
    notes, logits = [], {}

    def backend(gm: GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        notes.append(rewrite(gm, linears=True).note)
        gm.graph.lint()
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        model(torch.arange(3 * 20).view(3, 20), **cache_kwargs(cache), use_cache=True)
        for name, step in (("rewritten", torch.compile(model, backend=backend, fullgraph=True)), ("eager", model)):
            used = copy.deepcopy(cache)
            logits[name] = step(torch.tensor([[5], [6], [7]]), **cache_kwargs(used), use_cache=True).logits
    assert notes == ["15 linear layers in 9 launches"]
    torch.testing.assert_close(logits["rewritten"], logits["eager"], rtol=0.05, atol=0.02)


def test_without_the_option() -> None:
    gm = capture(step, *step_inputs().values())
    assert rewrite(gm).note == ""
    assert OP not in [node.target for node in gm.graph.nodes]


def test_a_graph_without_an_op_of_tatten_is_left() -> None:
    gm = capture(projections, *inputs().values())
    assert rewrite(gm, linears=True).note == ""
    assert OP not in [node.target for node in gm.graph.nodes]


@pytest.mark.parametrize("fails", [("l_a_",), ("l_a_", "l_d_")], ids=str)
def test_an_error_leaves_the_layers(fails: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(group: LinearGroup) -> None:
        if group.layers[0].weight.name in fails:
            raise LookupError("not foreseen")
        apply_linear_group(group)

    monkeypatch.setattr("tatten.passes.internal.RAISES", False)
    monkeypatch.setattr(importlib.import_module("tatten.passes.rewrite"), "apply_linear_group", fail)
    gm = capture(step, *step_inputs().values())
    report = rewrite(gm, linears=True)
    errors = [x.decline.reason for x in report.findings if isinstance(x, Declined)]
    assert errors == [Reason.INTERNAL] * len(fails)
    assert [node.target for node in gm.graph.nodes].count(OP) == 2 - len(fails)
    assert sum(isinstance(x, Rewritten) for x in report.findings) == 1
    assert report.note == ("1 linear layer in 1 launch" if len(fails) == 1 else "")
