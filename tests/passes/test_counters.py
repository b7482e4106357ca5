"""Counters that a decode step adds to: which additions are made at once, and that the step does the same."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from graphs import capture, listing
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import tatten
from tatten.passes import Declined, Rewritten, counters, internal, rewrite
from tatten.passes.counters import apply_counters, find_counters
from tatten.passes.mutation import movers
from tatten.passes.reasons import Reason


@pytest.fixture(autouse=True)
def _on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "ON_DEVICES", {"cpu"})


def inputs() -> list[Tensor]:
    return [torch.randn(4, 8), torch.tensor(5), torch.tensor(7), torch.tensor([9])]


def joined(fn: Callable[..., Any], *args: Any) -> int:
    """Return the number of additions that are made at once, after checking results and counters."""
    gm = capture(fn, *[x.clone() if isinstance(x, Tensor) else x for x in args])
    matches = find_counters(gm.graph, movers(gm.graph))
    for match in matches:
        apply_counters(match)
    gm.graph.lint()
    gm.recompile()
    torch._dynamo.reset()
    got_args, want_args = ([x.clone() if isinstance(x, Tensor) else x for x in args] for _ in range(2))
    got = torch.compile(fn, backend=lambda graph, _: gm.forward, fullgraph=True)(*got_args)
    want = fn(*want_args)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    torch.testing.assert_close(got_args, want_args, rtol=0, atol=0)
    return sum(len(match.additions) for match in matches)


def layers(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Each layer reads its length before it counts."""
    for n in (a, b, c):
        x = x.sin() + n
        n.add_(1)
    return x.cos()


def test_layers() -> None:
    assert joined(layers, *inputs()) == 3


def test_shapes_and_integers() -> None:
    x, *_ = inputs()
    counts = torch.tensor(1), torch.tensor([2], dtype=torch.int32), torch.tensor([[3]])
    assert joined(layers, x, *counts) == 3


def read_later(x, a, b):
    a.add_(1)
    return x + a


def read_through_a_view(x, a, b):
    view = a.view(1)
    a.add_(1)
    return x + view


def written_later(x, a, b):
    a.add_(1)
    a.mul_(2)
    return x + 1


def added_to_twice(x, a, b):
    b.add_(1)
    return x + 1


def of_another_number(x, a, b):
    a.add_(2)
    return x + 1


def with_a_result(x, a, b):
    return x + a.add_(1)


def with_alpha(x, a, b):
    a.add_(1, alpha=3)
    return x + 1


def of_a_tensor(x, a, b):
    a.add_(b)
    return x + 1


def of_an_intermediate(x, a, b):
    y = a * 2
    y.add_(1)
    return x + y


def of_true(x, a, b):
    a.add_(True)
    return x + 1


@pytest.mark.parametrize(
    "first",
    [
        *(read_later, read_through_a_view, written_later, added_to_twice, of_another_number, with_a_result, with_alpha),
        *(of_a_tensor, of_an_intermediate, of_true),
    ],
    ids=lambda fn: fn.__name__,
)
def test_one_addition_stays_and_two_are_joined(first: Callable[..., Tensor]) -> None:
    def fn(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        x = first(x, a, b)
        b.add_(1)
        c.add_(1)
        return x

    assert joined(fn, *inputs()) == 2


@pytest.mark.parametrize(
    "count",
    [torch.tensor(5.0), torch.tensor([5, 6]), torch.tensor(5, dtype=torch.uint8)],
    ids=["float", "two", "uint8"],
)
def test_other_inputs_are_no_counters(count: Tensor) -> None:
    assert joined(layers, torch.randn(4, 2), *inputs()[1:3], count) == 2


def test_a_counter_within_another_tensor() -> None:
    """The last addition and a read between the two use the same memory."""

    def fn(x: Tensor, all_counts: Tensor, a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        x = x + all_counts.sum()
        b.add_(1)
        return x

    counts = torch.tensor([3, 4])
    gm = capture(fn, torch.randn(4), counts, counts[0], torch.tensor(5))
    assert find_counters(gm.graph, movers(gm.graph)) == []


@pytest.mark.parametrize("n", [0, 1])
def test_fewer_than_two_counters(n: int) -> None:
    def fn(x: Tensor, *counts: Tensor) -> Tensor:
        for count in counts[:n]:
            count.add_(1)
        return x + 1

    assert joined(fn, *inputs()) == 0


def test_modules_may_use_anything() -> None:
    gm = capture(layers, *inputs())
    gm.add_module("other", nn.Identity())
    second = [node for node in gm.graph.nodes if node.target == "add_"][1]
    with gm.graph.inserting_after(second):
        gm.graph.call_module("other")
    assert find_counters(gm.graph, []) == []


def test_graphs_whose_tensors_move_stay() -> None:
    gm = capture(layers, *inputs())
    assert find_counters(gm.graph, [next(iter(gm.graph.nodes))]) == []


def in_a_vmap(x, a, b, c):
    y = torch.vmap(lambda v: (c.add_(1), v * 2)[1])(c)
    a.add_(1)
    return x + y


def in_a_vjp(x, a, b, c):
    y, backward = torch.func.vjp(lambda x: x.sin() * a, x)
    a.add_(1)
    (g,) = backward(y)
    b.add_(1)
    return g


@pytest.mark.parametrize("fn", [in_a_vmap, in_a_vjp], ids=lambda fn: fn.__name__)
def test_transforms_keep_tensors_that_no_node_shows(fn: Callable[..., Any]) -> None:
    assert joined(fn, *inputs()) == 0


def test_tensors_of_other_classes_are_no_counters() -> None:
    x, a, b, _ = inputs()
    assert joined(layers, x, a, b, TwoTensor(torch.tensor(3), torch.tensor(3))) == 2


def test_without_foreach(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delattr(torch, "_foreach_add_")
    caplog.set_level(logging.WARNING, "tatten")
    assert joined(layers, *inputs()) == 0
    assert "torch._foreach_add_ is not as in the versions" in caplog.text


def test_additions_stay_on_their_side_of_inference_mode() -> None:
    """Outside of inference mode, an addition to an inference tensor would raise an error."""

    def fn(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        with torch.inference_mode():
            a.add_(1)
        b.add_(1)
        return x + 1

    assert find_counters(capture(fn, *inputs()[:3]).graph, []) == []


def test_other_devices_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "ON_DEVICES", {"cuda"})
    assert joined(layers, *inputs()) == 0


def decode_step(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    for n in (a, b):
        q = F.scaled_dot_product_attention(q * n, k, v, attn_mask=mask, enable_gqa=True)
        n.add_(1)
    return q


def operands() -> list[Tensor]:
    kv = [torch.randn(1, 2, 40, 16) for _ in range(2)]
    return [torch.randn(1, 4, 1, 16), *kv, torch.rand(1, 1, 1, 40) > 0.3, torch.tensor(2), torch.tensor(3)]


@pytest.mark.parametrize("asked", [True, False])
def test_in_decode_steps(asked: bool) -> None:
    gm = capture(decode_step, *operands())
    report = rewrite(gm, counters=asked)
    assert report.note == ("2 counters in one launch" if asked else "")
    assert listing(gm).count("_foreach_add_(") == asked


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *counts: Tensor) -> Tensor:
    for n in counts:
        n.add_(1)
    return torch.ops.tatten.decode_attention.default(q, k, v, mask)[0]


def test_the_graph_of_a_program_that_calls_the_ops_itself() -> None:
    args = [*operands(), torch.tensor(4)]
    gm = capture(attend, *[x.clone() for x in args])
    assert rewrite(gm, counters=True).note == "3 counters in one launch"
    assert "_foreach_add_" in gm.code


def test_graphs_whose_tensors_move_stay_in_a_rewrite() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *counts: Tensor) -> Tensor:
        copy = q.clone()
        copy.transpose_(0, 1)
        return attend(q, k, v, mask, *counts) + copy.sum()

    assert rewrite(capture(fn, *operands()), counters=True).note == ""


def test_an_error_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report names it, and the rest of the graph is rewritten."""

    def search(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(importlib.import_module("tatten.passes.rewrite"), "find_counters", search)
    monkeypatch.setattr(internal, "RAISES", False)
    report = rewrite(capture(decode_step, *operands()), counters=True)
    (error,) = (x for x in report.findings if isinstance(x, Declined))
    assert error.decline.reason is Reason.INTERNAL
    assert sum(isinstance(x, Rewritten) for x in report.findings) == 2


def test_not_in_other_graphs() -> None:
    gm = capture(layers, *inputs())
    assert rewrite(gm, counters=True).note == ""
    assert "foreach" not in listing(gm)


def test_end_to_end() -> None:
    got, want = operands(), operands()
    for x, y in zip(got, want, strict=True):
        y.copy_(x)
    torch._dynamo.reset()
    with torch.no_grad():
        step = torch.compile(decode_step, backend="tatten", options={"decode": True}, fullgraph=True)
        with tatten.recording() as report:
            for _ in range(3):
                torch.testing.assert_close(step(*got), decode_step(*want))
    assert "2 counters in one launch" in str(report)
    assert [x.item() for x in got[-2:]] == [5, 6]
    torch.testing.assert_close(got, want)


class TestListing(expecttest.TestCase):
    def test_layers(self) -> None:
        gm = capture(layers, *inputs())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(counters, "ON_DEVICES", {"cpu"})
            (match,) = find_counters(gm.graph, [])
        apply_counters(match)
        self.assertExpectedInline(
            listing(gm),
            """\
sin = sin(l_x_)
x = add(sin, l_a_)
sin_1 = sin(x)
x_1 = add(sin_1, l_b_)
sin_2 = sin(x_1)
x_2 = add(sin_2, l_c_)
_foreach_add_ = _foreach_add_([l_a_, l_b_, l_c_], 1)
cos = cos(x_2)
return (cos)""",
        )


if __name__ == "__main__":
    expecttest.main()
