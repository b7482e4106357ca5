"""Soft caps and sinks over a mesh: a soft cap is local, and a sink counts once, on the first of the merged ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from sharded_tree import S0, S1, S2, S3, R, Tree, of_dtensors, of_locals, place
from slow import slow_but
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.fx import Graph
from variant_calls import Found, compiled

import tatten
from tatten.ops.reference import decode_attention_reference
from tatten.passes import cost
from tatten.passes.masks import Masks
from tatten.passes.reasons import Decline
from tatten.passes.sdpa import SdpaCall
from tatten.passes.tree import find_local

pytestmark = pytest.mark.drawn(2, "DTensors")

B, HQ, HKV, D, S = 2, 4, 2, 16, 22


def a_mesh(*shape: int) -> DeviceMesh:
    cost.RATES["cpu"] = cost.Rates(bytes_per_us=1.0, segment_us=0.0)  # a process of its own
    tatten.enable_dtensor_sdpa()
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def one_layer(q: Any, k: Any, v: Any, mask: Any, sinks: Any) -> tuple[Any, Any]:
    """Also returns the sinks, so that the graph has them."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True), sinks * 1


def difference(have: Any, *inputs: Any, **variant: Any) -> float:
    want, _ = decode_attention_reference(*inputs, **variant)
    have = have.full_tensor() if isinstance(have, DTensor) else have
    return (have.double() - want).abs().max().item()


def merged(shape: tuple[int, ...], q_len: int, how: dict[str, list[Any]], variant: dict[str, Any]) -> Any:
    """The error of one layer with keys and values placed as "kv" says, and what was found."""
    mesh, rng = a_mesh(*shape), torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(x, generator=rng) for x in ((B, HQ, q_len, D), (B, HKV, S, D), (B, HKV, S, D)))
    mask = torch.rand(B, 1, q_len, S, generator=rng) < 0.7
    mask[0] = False  # a sequence has nothing but its sinks
    sinks = torch.tensor([1.0, -2.0, 4.0, float("-inf")])
    placed = [distribute_tensor(x, mesh, how[n]) for x, n in ((q, "q"), (k, "kv"), (v, "kv"), (mask, "mask"))]
    (have, _), found = compiled(one_layer, *placed, distribute_tensor(sinks, mesh, how["sinks"]), **variant)
    if found[0][0] != "decode_attention":
        return None, found
    return difference(have, q, k, v, mask, sinks=sinks, **variant), found


@pytest.mark.parametrize("variant", [{}, {"softcap": 1.5}], ids=str)
@pytest.mark.parametrize(
    "shape, q_len, how",
    slow_but(
        [((2,), 1, {"q": [R], "kv": [S2], "mask": [S3], "sinks": [R]})],
        [
            ((2,), 1, {"q": [R], "kv": [S2], "mask": [S3], "sinks": [R]}),
            ((2,), 4, {"q": [R], "kv": [S2], "mask": [R], "sinks": [R]}),
            ((2, 2), 1, {"q": [R, R], "kv": [S2, S2], "mask": [R, R], "sinks": [R, R]}),
            ((2, 2), 4, {"q": [R, R], "kv": [R, S2], "mask": [R, S3], "sinks": [R, R]}),
            ((2, 2), 1, {"q": [S1, R], "kv": [S1, S2], "mask": [R, S3], "sinks": [S0, R]}),
            ((2, 2), 1, {"q": [R, S1], "kv": [S2, S1], "mask": [S3, R], "sinks": [R, S0]}),
        ],
    ),
)
def test_sinks_count_once(shape: tuple[int, ...], q_len: int, how: Any, variant: dict[str, Any]) -> None:
    for error, found in run_ranks(2 * len(shape), merged, shape, q_len, how, variant):
        assert [name for name, _ in found] == ["decode_attention"]
        assert error < 1e-5


@pytest.mark.parametrize(
    "shape, how",
    slow_but(
        [((2,), {"q": [R], "kv": [S2], "mask": [S3], "sinks": [S0]})],
        [
            ((2,), {"q": [R], "kv": [S2], "mask": [S3], "sinks": [S0]}),
            ((2, 2), {"q": [S1, R], "kv": [S1, S2], "mask": [R, S3], "sinks": [R, R]}),
        ],
    ),
)
def test_declines(shape: tuple[int, ...], how: Any) -> None:
    for _, found in run_ranks(2 * len(shape), merged, shape, 1, how, {}):
        assert [name for name, _ in found] == ["placement"]


def of_another_op(placements: list[Any]) -> str | None:
    """The reason to leave a call whose result is not SDPA's own, and is placed so."""
    mesh, graph = a_mesh(2), Graph()
    q, k = torch.zeros(B, HQ, 1, D), torch.zeros(B, HQ, S, D)
    for name, x, how in (("q", q, [R]), ("k", k, [S2]), ("v", k, [S2])):
        graph.placeholder(name).meta["example_value"] = distribute_tensor(x, mesh, how)
    node = graph.call_function(torch.matmul, tuple(graph.nodes)[:2])
    node.meta["example_value"] = DTensor.from_local(q, mesh, placements, run_check=False)
    found = find_local(SdpaCall(node, *tuple(graph.nodes)[:3]), Masks())
    return found.reason.value if isinstance(found, Decline) else None


@pytest.mark.parametrize(
    "placement, reason", slow_but([(Partial(), "placement")], [(Partial(), "placement"), (R, None)])
)
def test_a_product_is_merged_if_it_is_placed_as_the_query(placement: Any, reason: str | None) -> None:
    """A user that takes the local part of a pending sum takes a part of the sum."""
    assert run_ranks(2, of_another_op, [placement]) == [reason] * 2


def segments(form: str, softcap: float) -> tuple[float, Found]:
    mesh = a_mesh(2)
    tree = Tree.of((1, 13), (4, 6), mask="bool", q_len=2 if form == "locals" else 1)
    sinks = torch.tensor([1.0, -2.0, 4.0, 0.0, 2.0, -1.0, 0.5, float("-inf")])

    def fn(query: Any, pairs: Any, mask: Any, sinks: Any) -> tuple[Any, Tensor]:
        attend = of_locals(mesh, [S2]) if form == "locals" else of_dtensors
        return attend(query, pairs, mask), sinks * 1

    args = tree.own(mesh, [S2]) if form == "locals" else place(tree, mesh, [R], [[S2], [R]])
    (have, _), found = compiled(
        fn, *args, sinks if form == "locals" else distribute_tensor(sinks, mesh, [R]), softcap=softcap
    )
    key, value = (
        torch.cat([x.repeat_interleave(4 // len(x), 0) for x in xs], 2) for xs in zip(*tree.segments, strict=True)
    )
    return difference(have, tree.query, key, value, tree.mask, sinks=sinks, softcap=softcap), found


@pytest.mark.parametrize("form", ["locals", pytest.param("dtensors", marks=pytest.mark.slow)])
def test_segments(form: str) -> None:
    for error, found in run_ranks(2, segments, form, 1.5):
        assert [name for name, _ in found] == ["bifurcated_attention"]
        assert error < 1e-5
