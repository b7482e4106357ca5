"""Nodes that write: FX and Inductor each miss some."""

from __future__ import annotations

import operator

import pytest
import torch
from graphs import capture

from tatten.passes.mutation import written_arguments, written_between
from tatten.passes.symbolic import tensor_of


def setitem(x, y):
    x[0] = y[0]


def through_view(x, y):
    x.view(-1)[2:].mul_(2)


def iadd(x, y):
    x += y


def out_argument(x, y):
    torch.add(y, y, out=x)


def function(x, y):
    torch.relu_(x)


def inplace_flag(x, y):
    torch.nn.functional.relu(x, inplace=True)


def inplace_by_position(x, y):
    torch.nn.functional.relu(x, True)


def dunder(x, y):
    x.__imul__(3)


def overload(x, y):
    torch.ops.aten.index_copy_.default(x, 0, torch.tensor([0]), y[:1])


@pytest.mark.parametrize(
    "write",
    [
        *(setitem, through_view, iadd, out_argument, function, inplace_flag, inplace_by_position, dunder, overload),
        *(lambda x, y: x.add_(1), lambda x, y: x.copy_(y), lambda x, y: x.index_copy_(0, torch.tensor([0]), y[:1])),
    ],
)
def test_writes_are_seen(write) -> None:
    def fn(x, y):
        a = x.clone()
        write(x, y)
        return a + x.sin()

    graph = capture(fn, torch.ones(3, 3), torch.ones(3, 3)).graph
    first = next(n for n in graph.nodes if n.op == "placeholder")
    (clone,) = (n for n in graph.nodes if n.target == "clone")
    (sin,) = (n for n in graph.nodes if n.target == "sin" or n.target is torch.sin)
    assert written_between([tensor_of(first)], clone, sin) is not None
    assert written_between([tensor_of(clone)], clone, sin) is None


def test_reads_are_not_writes() -> None:
    def fn(x):
        y = x.view(-1).reshape(3, 3).__getitem__(0) + operator.mul(x, 2)[1]
        return torch.nn.functional.relu(y, inplace=False).softmax(-1).to(torch.float64)

    for node in capture(fn, torch.ones(3, 3)).graph.nodes:
        assert list(written_arguments(node)) == []


def test_a_module_may_write_to_what_it_is_called_with() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    assert list(written_arguments(x)) == []
    assert list(written_arguments(graph.call_module("layer", (x,)))) == [x]
