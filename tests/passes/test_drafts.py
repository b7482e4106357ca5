"""Drafts: nodes that matchers read as if they were in the graph, which is not changed before one is inserted."""

from __future__ import annotations

import operator

import torch
from graphs import capture, listing
from torch.fx import GraphModule, Node

from tatten.passes import rewrite
from tatten.passes.drafts import Drafting, Drafts, is_draft
from tatten.passes.symbolic import tensor_of


def graph_of_a_write() -> tuple[GraphModule, list[Node], Node, Node]:
    """A graph that uses two inputs before and after a write to the second; the inputs, and both uses."""

    def fn(x, y):
        first = torch.sin(x) + y
        y.add_(1)
        return first, torch.cos(x) + y

    gm = capture(fn, torch.randn(2, 3), torch.randn(2, 3))
    first, second = gm.graph.find_nodes(op="call_function", target=operator.add)
    return gm, list(gm.graph.find_nodes(op="placeholder")), first, second


def users_of(gm: GraphModule) -> list[list[str]]:
    return [[user.name for user in node.users] for node in gm.graph.nodes]


def test_a_draft_has_a_value_and_changes_nothing() -> None:
    gm, (x, _), place, _ = graph_of_a_write()
    before = listing(gm), users_of(gm)
    draft = Drafting(Drafts(), place)
    made = draft("flatten", draft("unsqueeze", x, 0), 0, 1)
    assert is_draft(made)
    assert not is_draft(x)
    tensor = tensor_of(made)
    assert tensor is not None
    assert tuple(tensor.shape) == (2, 3)
    assert (listing(gm), users_of(gm)) == before


def test_equal_drafts_are_one_node() -> None:
    _, (x, y), place, _ = graph_of_a_write()
    draft = Drafting(Drafts(), place)
    made = draft("unsqueeze", x, 0)
    assert draft("unsqueeze", x, 0) is made
    assert draft("unsqueeze", x, 1) is not made
    assert draft("unsqueeze", y, 0) is not made
    assert draft(torch.add, made, 1, alpha=2) is not draft(torch.add, made, 1)


def test_a_draft_and_a_node_of_one_name_differ() -> None:
    gm, (x, _), place, _ = graph_of_a_write()
    draft = Drafting(Drafts(), place)
    made = draft("sin", x)
    there = next(node for node in gm.graph.nodes if node.name == made.name)
    assert draft("neg", made) is not draft("neg", there)


def test_a_node_is_inserted_once() -> None:
    gm, (x, _), first, second = graph_of_a_write()
    drafts = Drafts()
    made = drafts.make(first, "unsqueeze", x, 0)
    node = drafts.insert(made, first)
    assert node.graph is gm.graph
    assert node.next is first
    assert drafts.insert(made, second) is node
    assert drafts.insert(x, second) is x


def test_a_node_that_read_what_was_written_since_is_inserted_again() -> None:
    _, (x, y), first, second = graph_of_a_write()
    drafts = Drafts()
    of_x, of_y = drafts.make(first, "neg", x), drafts.make(first, "neg", y)
    both = drafts.make(first, torch.mul, of_x, of_y)
    before, after = (drafts.insert(both, place) for place in (first, second))
    assert before is not after
    assert before.args[0] is after.args[0]  # nothing writes to x
    assert before.args[1] is not after.args[1]


def test_what_stands_for_a_result_is_replaced() -> None:
    _, (x, _), first, second = graph_of_a_write()
    drafts = Drafts()
    value = tensor_of(x)
    assert value is not None
    result = drafts.result(value)
    made = drafts.make(first, "unsqueeze", result, 0)
    other = drafts.substitute(made, result, drafts.make(first, "neg", result))
    drafts.bind(result, first)
    node = drafts.insert(other, second)
    (negated,) = node.all_input_nodes
    assert negated.target == "neg"
    assert negated.args == (first,)


def test_a_declined_call_leaves_all_users_as_they_were() -> None:
    def fn(q, k, v, m):
        return (q @ k.mT * 0.25 + m).softmax(-1) @ v

    q, k = torch.randn(2, 4, 1, 16), torch.randn(2, 4, 8, 16)
    gm = capture(fn, q, k, k.clone(), torch.zeros(2, 1, 1, 8))
    before = listing(gm), users_of(gm)
    (finding,) = rewrite(gm, fuses=True).findings
    assert finding.decline.reason.value == "no_gain"
    assert (listing(gm), users_of(gm)) == before
