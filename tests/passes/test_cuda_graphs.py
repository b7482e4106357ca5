"""Rewritten graphs on CUDA, without a GPU: the tensors of the graph are fake."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from tatten.passes.rewrite import Rewritten, rewrite

B, HQ, HKV, S, D = 4, 8, 2, 1000, 128


class FakeGraph:
    """A Dynamo graph written by hand."""

    def __init__(self) -> None:
        self.graph, self.mode = Graph(), FakeTensorMode()

    def tensor(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        with self.mode:
            node.meta["example_value"] = torch.empty(shape, dtype=dtype, device="cuda")
        return node

    def sdpa(self, query: Node, key: Node, value: Node, **kwargs: object) -> Node:
        node = self.graph.call_function(F.scaled_dot_product_attention, (query, key, value), kwargs)
        node.meta["example_value"] = query.meta["example_value"]
        return node

    def cat(self, parts: list[Node]) -> Node:
        node = self.graph.call_function(torch.cat, (parts,), {"dim": 2})
        with self.mode:
            node.meta["example_value"] = torch.cat([x.meta["example_value"] for x in parts], dim=2)
        return node

    def expand(self, x: Node, batch: int) -> Node:
        node = self.graph.call_method("expand", (x, batch, -1, -1, -1))
        with self.mode:
            node.meta["example_value"] = x.meta["example_value"].expand(batch, -1, -1, -1)
        return node

    def rewrite(self, *outputs: Node) -> tuple[GraphModule, list[Rewritten]]:
        self.graph.output(outputs)
        gm = GraphModule(torch.nn.Module(), self.graph)
        return gm, list(rewrite(gm).findings)  # type: ignore[arg-type]


def calls(gm: GraphModule, op: torch._ops.OpOverload) -> list[Node]:
    return list(gm.graph.find_nodes(op="call_function", target=op))


def test_the_blocks_of_a_mask_are_found_once_for_all_layers() -> None:
    g = FakeGraph()
    mask = g.tensor(B, 1, 1, S, dtype=torch.bool)
    layers = [
        g.sdpa(g.tensor(B, HQ, 1, D), g.tensor(B, HKV, S, D), g.tensor(B, HKV, S, D), attn_mask=mask, enable_gqa=True)
        for _ in range(3)
    ]
    gm, findings = g.rewrite(*layers)
    (blocks,) = calls(gm, torch.ops.tatten.block_mask.default)
    assert blocks.args == (mask,)
    attention = calls(gm, torch.ops.tatten.decode_attention.default)
    assert [node.args[6] for node in attention] == [blocks] * 3
    assert [finding.provider for finding in findings] == ["triton"] * 3


def test_a_prefix_and_its_mask() -> None:
    """A mask for each sequence on a prefix that all share: its blocks are in rows of the prefix."""
    g = FakeGraph()
    prefix, suffix = g.tensor(1, HKV, 8192, D), g.tensor(B, HKV, S, D)
    key = g.cat([g.expand(prefix, B), suffix])
    mask = g.tensor(B, 1, 1, 8192 + S, dtype=torch.bool)
    gm, (finding,) = g.rewrite(g.sdpa(g.tensor(B, HQ, 1, D), key, key, attn_mask=mask, enable_gqa=True))
    assert finding.provider == "triton"
    assert [node.args[1:] for node in calls(gm, torch.ops.tatten.block_mask.default)] == [(1,), ()]


@pytest.mark.parametrize(("kv_len", "provider"), [(4096, "triton"), (131072, "cudnn")])
def test_the_report_says_who_computes(kv_len: int, provider: str) -> None:
    g = FakeGraph()
    key, value = (g.tensor(1, 8, kv_len, D) for _ in range(2))
    repeated = []
    for x in (key, value):
        node = g.graph.call_method("repeat_interleave", (x, 4), {"dim": 1})
        with g.mode:
            node.meta["example_value"] = x.meta["example_value"].repeat_interleave(4, dim=1)
        repeated.append(node)
    _, (finding,) = g.rewrite(g.sdpa(g.tensor(1, 32, 1, D), *repeated))
    assert finding.op == "tatten.decode_attention.default"
    assert finding.provider == provider
