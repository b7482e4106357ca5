"""Graphs in which an indexer's scores became an op, and the numbers that they compute."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

OP = torch.ops.tatten.index_scores.default


def ops(gm: GraphModule) -> list[Node]:
    return [x for x in gm.graph.nodes if x.target is OP]


def tensor_of(node: Node) -> torch.Tensor:
    """The tensor of a node, or of the one whose view it is."""
    while "example_value" not in node.meta:
        node = node.args[0]
    return node.meta["example_value"]


def assert_scores(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal within the rounding of sums in float32; masked scores are the lowest number or -inf."""
    masked = want == -torch.inf
    assert (got[masked] <= torch.finfo(torch.float32).min).all()
    torch.testing.assert_close(got[~masked].double(), want[~masked], rtol=1e-5, atol=2e-5)
