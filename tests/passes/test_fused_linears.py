"""The norm, the gate and the residual around linear layers of one row, in decode steps on a GPU of Hopper."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from graphs import capture, listing, name_of
from one_row_layers import (
    EPS,
    INNER,
    WIDTH,
    apply,
    arguments_of,
    as_one_op,
    bf16,
    check_same,
    inputs,
    kinds,
    launched,
    layer,
    names_of,
    norm,
    rounded_once,
    search,
    take_any_size,
)
from torch import Tensor, nn
from torch.fx import GraphModule

from tatten.ops.fused_linear import MOST_FEATURES, MOST_GATED_FEATURES
from tatten.passes import fused_linears, internal, rewrite
from tatten.passes.fused_linears import FusedGroup, find_fused_groups
from tatten.passes.mutation import movers
from tatten.passes.reasons import Reason
from tatten.passes.skinny_linears import find_skinny_linears

OP = torch.ops.tatten.fused_linear.default


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    take_any_size(monkeypatch)


@pytest.mark.parametrize("form", [norm, rounded_once, as_one_op], ids=lambda fn: fn.__name__)
def test_a_decoder_layer(form: Callable[..., Any]) -> None:
    def decoder_layer(x, g, h, a, b, c, d, gate, up, down):
        return layer(x, g, h, a, b, c, d, gate, up, down, form)

    assert kinds(search(decoder_layer)[1]) == ["norm+3", "residual+1", "norm+gate+2", "residual+1"]
    check_same(decoder_layer)


@pytest.mark.parametrize("dtype", [bf16, torch.float16], ids=str)
def test_against_float64(dtype: torch.dtype) -> None:
    """The layer is about as near to float64 as the program, or nearer."""
    args = inputs(dtype)
    gm, groups = search(layer, *args)
    apply(gm, groups)
    order = [names_of(layer).index(name_of(x)) for x in gm.graph.find_nodes(op="placeholder")]
    exact = layer(*(x.double() for x in args), norm=lambda x, g: F.rms_norm(x, (WIDTH,), g, EPS))
    off = [
        max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(result, exact, strict=True))
        for result in (gm(*(args[i] for i in order)), layer(*args))
    ]
    assert off[0] < 2 * torch.finfo(dtype).eps
    assert off[0] < 1.25 * off[1]


class TestListing(expecttest.TestCase):
    def test_a_decoder_layer(self) -> None:
        gm, groups = search(layer)
        apply(gm, groups)
        self.assertExpectedInline(
            listing(gm),
            """\
zeros = zeros((1, 1), dtype=torch.int64)
flatten = flatten(l_x_, 0, -2)
x = embedding(zeros, flatten)
fused_linear_default = fused_linear.default(x, [l_a_, l_b_, l_c_], prefetch=True, norm_weight=l_g_, eps=1e-05)
getitem_1 = getitem(fused_linear_default, 0)
getitem_2 = getitem(fused_linear_default, 1)
getitem_3 = getitem(fused_linear_default, 2)
sin = sin(getitem_1)
fused_linear_default_1 = fused_linear.default(sin, [l_d_], prefetch=True, residual=x)
getitem_4 = getitem(fused_linear_default_1, 0)
fused_linear_default_2 = fused_linear.default(getitem_4, [l_gate_, l_up_], prefetch=True, norm_weight=l_h_, eps=1e-05, gate='silu')
getitem_5 = getitem(fused_linear_default_2, 0)
fused_linear_default_3 = fused_linear.default(getitem_5, [l_down_], prefetch=True, residual=getitem_4)
getitem_6 = getitem(fused_linear_default_3, 0)
return (getitem_6, getitem_2, getitem_3)""",  # noqa: E501 (lines of a graph)
        )


def gelu_gate(x, g, gate, up, down):
    n = norm(launched(x), g)
    return F.linear(F.linear(n, up) * F.gelu(F.linear(n, gate), approximate="tanh"), down)


def exact_gelu(x, g, gate, up):
    n = norm(launched(x), g)
    return F.gelu(F.linear(n, gate)) * F.linear(n, up)


def residual_first(x, a):
    x = launched(x)
    return torch.add(F.linear(x.cos(), a), x)


def through_dropout(x, a):
    x = launched(x)
    return x + F.dropout(F.dropout(F.linear(x.cos(), a), 0.0), 0.5, training=False)


def residual_of_a_gate(x, g, a, b):
    x = launched(x)
    n = norm(x, g)
    return F.silu(F.linear(n, a)) * F.linear(n, b) + x


def swapped_factors(x, g, a):
    x = launched(x)
    y = x.float()
    n = (torch.rsqrt(torch.mean(torch.pow(y, 2), -1, True) + EPS) * y).to(bf16) * g
    return x + F.linear(n, a)


POSITIVE = [
    (gelu_gate, ["norm+gate+2"]),
    (exact_gelu, ["norm+gate+2"]),
    (residual_first, ["residual+1"]),
    (through_dropout, ["residual+1"]),
    (residual_of_a_gate, ["norm+gate+residual+2"]),
    (swapped_factors, ["norm+residual+1"]),
]


@pytest.mark.parametrize("fn, want", POSITIVE, ids=lambda x: getattr(x, "__name__", ""))
def test_forms(fn: Callable[..., Any], want: list[str]) -> None:
    args = arguments_of(fn)
    assert kinds(search(fn, *args)[1]) == want
    check_same(fn, *args)


def a_norm_alone(x, g, a, b):
    """Measured to gain nothing."""
    n = norm(launched(x), g)
    return F.linear(n, a), F.linear(n, b)


def a_gate_alone(x, gate, up):
    x = launched(x)
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def the_row_is_an_input(x, a, b):
    """The previous launch is unknown, and may write the weight."""
    return x + F.linear(x, a)


def the_row_is_a_view_of_an_input(x, a, b):
    return x[0] + F.linear(x[0], a)


def a_norm_reads_an_input(x, g, a):
    return x + F.linear(norm(x, g), a)


def the_row_is_a_clone(x, a):
    """Inductor computes it by no kernel."""
    x = x.clone()
    return x + F.linear(x, a)


def the_row_is_cast_and_back(x, a):
    x = x.float().to(x.dtype)
    return x + F.linear(x, a)


def the_row_is_one_of_one(x, a):
    x = torch.cat([x])
    return x + F.linear(x, a)


def the_row_is_not_dropped(x, a):
    x = F.dropout(x, 0.5, training=False)
    return x + F.linear(x, a)


def the_row_has_the_shape_of_a_launched_one(x, a):
    row = x.clone().view_as(launched(x))
    return row + F.linear(row, a)


def the_norm_is_written(x, g, a):
    x = launched(x)
    y = x + F.linear(norm(x, g), a)
    g.add_(1)
    return y


def in_inference_mode(x, a):
    """The sum would be computed where the layer is."""
    x = launched(x)
    with torch.inference_mode():
        y = F.linear(x.cos(), a)
    return x + y


def the_weight_is_written_before(x, a):
    a.mul_(2)
    x = launched(x)
    return x + F.linear(x.cos(), a)


def the_weight_is_written_after(x, a):
    """The graph may run again, and its last launch be the previous one of its first."""
    x = launched(x)
    y = x + F.linear(x.cos(), a)
    a.add_(1)
    return y


def a_view_of_the_weight_is_written(x, a):
    a[1:].mul_(2)
    x = launched(x)
    return x + F.linear(x.cos(), a)


NEGATIVE = [
    a_norm_alone,
    a_gate_alone,
    the_row_is_an_input,
    the_row_is_a_view_of_an_input,
    a_norm_reads_an_input,
    the_row_is_a_clone,
    the_row_is_cast_and_back,
    the_row_is_one_of_one,
    the_row_is_not_dropped,
    the_row_has_the_shape_of_a_launched_one,
    the_norm_is_written,
    in_inference_mode,
    the_weight_is_written_before,
    the_weight_is_written_after,
    a_view_of_the_weight_is_written,
]


@pytest.mark.parametrize("fn", NEGATIVE, ids=lambda fn: fn.__name__)
def test_left_as_it_is(fn: Callable[..., Any]) -> None:
    assert search(fn, *arguments_of(fn))[1] == []


def scaled(x, y, weight):
    return x + F.linear(y, weight) * 0.5


def alpha(x, y, weight):
    return torch.add(x, F.linear(y, weight), alpha=2)


def broadcast(x, y, weight):
    return x[..., :1] + F.linear(y, weight)


def in_place(x, y, weight):
    out = F.linear(y, weight)
    out += x
    return out


def read_twice(x, y, weight):
    out = F.linear(y, weight)
    return x + out, out


def with_itself(x, y, weight):
    out = F.linear(y, weight)
    return out + out


def later(x, y, weight):
    """The other operand does not exist yet where the layer stands."""
    out = F.linear(y, weight)
    return out + x.cos()


def written(x, y, weight):
    out = F.linear(y, weight)
    x.mul_(2)
    return x + out


def dropped(x, y, weight):
    return x + F.dropout(F.linear(y, weight), 0.5)


def in_float32(x, y, weight):
    return x.float() + F.linear(y, weight)


def of_a_number(x, y, weight):
    return 1.0 + F.linear(y, weight)


def several_rows(x, y, weight):
    y = y.expand(1, 2, WIDTH).cos()
    return y.sin() + F.linear(y, weight)


RESIDUALS = [scaled, alpha, broadcast, in_place, read_twice, with_itself, later, written, dropped, in_float32]
RESIDUALS += [of_a_number, several_rows]


@pytest.mark.parametrize("sums", RESIDUALS, ids=lambda fn: fn.__name__)
def test_other_sums_are_left(sums: Callable[..., Any]) -> None:
    """Beside a sum that is taken."""

    def two(x, a, b):
        x = launched(x)
        first = x + F.linear(x.cos(), a)
        return first, sums(x, first.tan(), b)

    groups = search(two, *arguments_of(two))[1]
    assert kinds(groups) == ["residual+1"]
    assert groups[0].layers[0].weight.name.strip("_").endswith("a")


def normed_row_is_returned(x, n, h, a):
    return F.linear(n, a), n


def inverse_is_written(x, n, h, a):
    n.mul_(2)
    return (F.linear(n, a),)


def x_is_written(x, n, h, a):
    x.mul_(2)
    return (F.linear(n, a),)


def weight_is_written(x, n, h, a):
    h.mul_(2)
    return (F.linear(n, a),)


@pytest.mark.parametrize(
    "reads", [normed_row_is_returned, inverse_is_written, x_is_written, weight_is_written], ids=lambda fn: fn.__name__
)
def test_a_norm_with_other_readers_is_left(reads: Callable[..., Any]) -> None:
    def two(x, g, h, a, b):
        x = launched(x)
        x = x + F.linear(norm(x, g), b)
        return reads(x, norm(x, h), h, a)

    assert kinds(search(two, *arguments_of(two))[1]) == ["norm+residual+1"]


def test_several_groups_of_one_norm_are_left() -> None:
    """The norm would be computed anyway, for the fourth layer."""

    def four(x, g, h, a, b, c, d):
        x = launched(x) + F.linear(norm(launched(x), g), a)
        n = norm(x, h)
        return tuple(F.linear(n, w) for w in (a, b, c, d))

    assert kinds(search(four, *arguments_of(four))[1])[1:] == []


@pytest.mark.parametrize(
    "act",
    [
        F.relu,
        lambda x: F.silu(x, inplace=True),
        lambda x: F.silu(x) * 2,
        lambda x: x * torch.sigmoid(x),
        lambda x: F.silu(x[..., :INNER]),
    ],
    ids=["relu", "in place", "scaled", "written out", "a slice"],
)
def test_other_gates_are_left(act: Callable[[Tensor], Tensor]) -> None:
    def mlp(x, g, gate, up, down):
        x = launched(x)
        n = norm(x, g)
        return x + F.linear(act(F.linear(n, gate)) * F.linear(n, up), down)

    args = arguments_of(mlp)
    assert kinds(search(mlp, *args)[1]) == ["norm+2", "residual+1"]
    check_same(mlp, *args)


def test_gates_of_other_shapes_and_readers_are_left() -> None:
    def both_activated(x, g, gate, up, down):
        x = launched(x)
        n = norm(x, g)
        return x + F.linear(F.silu(F.linear(n, gate)) * F.silu(F.linear(n, up)), down)

    def up_is_returned(x, g, gate, up, down):
        x = launched(x)
        n = norm(x, g)
        other = F.linear(n, up)
        return x + F.linear(F.silu(F.linear(n, gate)) * other, down), other

    def activation_is_returned(x, g, gate, up, down):
        x = launched(x)
        n = norm(x, g)
        active = F.silu(F.linear(n, gate))
        return x + F.linear(active * F.linear(n, up), down), active

    def gate_is_returned(x, g, gate, up, down):
        x = launched(x)
        n = norm(x, g)
        first = F.linear(n, gate)
        return x + F.linear(F.silu(first) * F.linear(n, up), down), first

    def broadcast(x, g, a, gate, up):
        x = launched(x)
        x = x + F.linear(norm(x, g), a)
        n = norm(x, g)
        return F.silu(F.linear(n, gate)) * F.linear(n, up)

    for fn in (both_activated, gate_is_returned, up_is_returned, activation_is_returned):
        assert kinds(search(fn, *arguments_of(fn))[1]) == ["norm+2", "residual+1"]
    x, g, a, gate, up = arguments_of(broadcast)
    assert kinds(search(broadcast, x, g, a, gate, up)[1]) == ["norm+residual+1", "norm+gate+2"]
    one = nn.Parameter(gate[:1].clone(), requires_grad=False)
    assert kinds(search(broadcast, x, g, a, one, up)[1]) == ["norm+residual+1", "norm+2"]


def test_weights_that_are_no_parameters_are_left() -> None:
    """Inductor may copy them right before the launch if their addresses are misaligned."""
    args = list(inputs())
    args[7] = args[7].data.clone()  # the gate
    assert kinds(search(layer, *args)[1]) == ["norm+3", "residual+1", "residual+1"]
    args[1] = args[1].data.clone()  # a norm
    assert kinds(search(layer, *args)[1]) == ["residual+1", "residual+1"]


def test_a_gate_with_a_residual_needs_a_norm() -> None:
    def gated(x, a, b, c):
        x = launched(x)
        x = x + F.linear(x.cos(), c)
        return F.silu(F.linear(x, a)) * F.linear(x, b) + x

    assert kinds(search(gated, *arguments_of(gated))[1]) == ["residual+1"]


def test_a_residual_of_one_of_two_layers_is_left() -> None:
    def two(x, g, a, b, c):
        x = launched(x)
        x = x + F.linear(x.cos(), c)
        n = norm(x, g)
        return x + F.linear(n, a), F.linear(n, b)

    assert kinds(search(two, *arguments_of(two))[1]) == ["residual+1", "norm+2"]


def test_writes_are_unknown_in_modules() -> None:
    gm, groups = search(layer)
    assert groups
    moving = movers(gm.graph)
    plain = find_skinny_linears(gm.graph, moving)
    gm.add_module("unknown", nn.Identity())
    row = gm.graph.find_nodes(op="placeholder")[0]
    with gm.graph.inserting_after(row):
        gm.graph.call_module("unknown", (row,))
    assert find_fused_groups(gm.graph, plain, moving) == []


def test_several_rows_are_left() -> None:
    def with_residual(x, a):
        x = launched(x)
        return x + F.linear(x.cos(), a)

    x, a = arguments_of(with_residual)
    assert [len(search(with_residual, x.expand(n, 1, WIDTH).contiguous(), a)[1]) for n in (1, 2)] == [1, 0]


def test_wide_rows_are_left() -> None:
    """Programs hold all features of their rows, and with a gate those of two weights."""

    def mlp(x, g, gate, up, down):
        x = launched(x)
        n = norm(x, g)
        return launched(x)[..., :8] + F.linear(F.silu(F.linear(n, gate)) * F.linear(n, up), down)

    taken = []
    for width in (MOST_GATED_FEATURES, MOST_GATED_FEATURES + 8, MOST_FEATURES, MOST_FEATURES + 8):
        shapes = (width,), (8, width), (8, width), (8, 8)
        weights = [nn.Parameter(torch.zeros(shape, dtype=bf16), requires_grad=False) for shape in shapes]
        taken.append(kinds(search(mlp, torch.zeros(1, 1, width, dtype=bf16), *weights)[1]))
    gated, normed, plain = (["norm+gate+2", "residual+1"], ["norm+2", "residual+1"], ["residual+1"])
    assert taken == [gated, normed, normed, plain]


def test_biases_are_left() -> None:
    def biased(x, g, h, a):
        x = launched(x)
        return x + F.linear(norm(x, g), a, h)

    assert search(biased, *arguments_of(biased))[1] == []


def test_a_dynamic_number_of_rows_is_left() -> None:
    args = list(inputs())
    args[0] = args[0].expand(3, 1, WIDTH).contiguous()
    torch._dynamo.mark_dynamic(args[0], 0)
    assert search(layer, *args)[1] == []


def test_gradients_are_left() -> None:
    args = inputs()
    for x in args[1:]:
        x.requires_grad_()
    assert len(search(layer, *args)[1]) == 4
    assert search(layer, *args, grad=True)[1] == []


def test_a_norm_keeps_its_grad_mode() -> None:
    """The op of all would stand where gradients are on."""

    def two_modes(x, g, a):
        with torch.no_grad():
            x = launched(x)
            n = norm(x, g)
        return x + F.linear(n, a)

    args = arguments_of(two_modes)
    assert kinds(search(two_modes, *args, grad=True)[1]) == ["norm+residual+1"]
    args[1].requires_grad_()
    assert kinds(search(two_modes, *args, grad=True)[1]) == ["residual+1"]


@pytest.mark.parametrize("gated", [False, True])
def test_a_sum_keeps_its_gradient(gated: bool) -> None:
    """The op would stand where gradients are off."""

    def other_mode(x, g, a, b):
        x = launched(x)
        with torch.no_grad():
            y = norm(x, g)
            y = F.silu(F.linear(y, a)) * F.linear(y, b) if gated else F.linear(y, a)
        return x + y

    args = arguments_of(other_mode)
    assert kinds(search(other_mode, *args, grad=True)[1]) == ["norm+gate+residual+2" if gated else "norm+residual+1"]
    args[0].requires_grad_()
    args[2].requires_grad_()
    assert not any(x.residual for x in search(other_mode, *args, grad=True)[1])


@pytest.mark.parametrize("write", [lambda x: x.mul_(2), torch.vmap(lambda x: x.mul_(2))], ids=["plain", "vmap"])
def test_a_write_between_a_layer_and_its_sum(write: Callable[[Tensor], Tensor]) -> None:
    def written(x, a):
        x = launched(x)
        y = F.linear(x.cos(), a)
        write(x)
        return x + y

    assert search(written, *arguments_of(written))[1] == []


class Attention(nn.Module):
    """A decode step of one sequence with a static cache."""

    def forward(self, x, g, a, b, key, value, mask, length):
        x = launched(x)
        n = norm(x, g)
        q, new = F.linear(n, a), F.linear(n, b)
        key.index_copy_(2, length, new.view(1, 2, 1, 16))
        out = F.scaled_dot_product_attention(q.view(1, 2, 1, 16), key, value, mask)
        return x + F.linear(out.transpose(1, 2).flatten(2), b)


def test_by_the_rewrite() -> None:
    """The note counts launches, and the graph computes the same."""
    x, g, _, a, b, *_ = inputs()
    key, value = torch.randn(2, 1, 2, 64, 16).to(bf16)
    mask = (torch.arange(64) < 40).expand(1, 1, 1, 64)
    args = (x, g, a, b, key, value, mask, torch.tensor([39]))
    step, reports = Attention(), []

    def backend(gm: GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        reports.append((rewrite(gm, linears=True), [x.target for x in gm.graph.nodes]))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(step, backend=backend, fullgraph=True)(*args)
        torch.testing.assert_close(got, step(*args), rtol=2**-6, atol=2**-6)
    ((report, targets),) = reports
    assert report.note == "3 linear layers in 2 launches"
    assert targets.count(OP) == 2


def test_an_error_leaves_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fused: FusedGroup) -> None:
        raise RuntimeError("test")

    monkeypatch.setattr(internal, "RAISES", False)
    monkeypatch.setattr(importlib.import_module("tatten.passes.rewrite"), "apply_fused_group", fail)
    gm = capture(lambda *args: (torch.ops.tatten.top_picks(args[0].float(), 1), *layer(*args)), *inputs())
    report = rewrite(gm, linears=True)
    assert OP not in [x.target for x in gm.graph.nodes]
    assert [x.decline.reason for x in report.findings] == [Reason.INTERNAL] * 4


def test_the_search_is_skipped_without_gates_and_residuals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_linears, "written_in", pytest.fail)
    assert search(a_norm_alone, *arguments_of(a_norm_alone))[1] == []
