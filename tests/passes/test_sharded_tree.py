"""Shared prefixes over a mesh: a `from_local` of a local `cat`, and a `cat` of DTensors, are read once for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import TestCase
from graphs import capture, listing
from ranks import run_ranks
from sharded_tree import (
    HQ,
    S0,
    S1,
    S2,
    S3,
    B,
    D,
    Outcome,
    R,
    Tree,
    attend,
    of_dtensors,
    of_locals,
    outcome,
    place,
    spread,
)
from slow import slow_after
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx import Graph, GraphModule, Node

import tatten
from tatten.passes import Declined, Rewritten, cost
from tatten.passes.reasons import Reason
from tatten.passes.rewrite import rewrite

pytestmark = pytest.mark.drawn(2, "DTensors")

# With keys that PyTorch has gathered, Dynamo asks PyTorch's rules for SDPA on a CPU, of which torch 2.11 has none.
traced = pytest.mark.skipif(torch.__version__ < "2.12", reason="PyTorch has no rule for SDPA over DTensors on a CPU")
FORMS = ["locals", pytest.param("dtensors", marks=(traced, pytest.mark.slow))]
STATE = B * HQ * (D + 1) * 4  # bytes of one rank
BIFURCATED = ["bifurcated_attention"]


def a_mesh(*shape: int) -> DeviceMesh:
    tatten.enable_dtensor_sdpa()
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def gathers(*ranks: int) -> list[tuple[str, int]]:
    """Return the collectives of merges over groups of so many ranks, one after the other, with their bytes."""
    return [("all_gather_into_tensor", n * STATE) for n in ranks]


# Segments as (rows, tokens), and the mask: with all remainders of tokens by 2 and by 4 ranks.
TREES: dict[str, tuple[tuple[tuple[int, int], ...], str]] = {
    "33": (((1, 33), (B, 6)), "bool"),
    "34": (((1, 34), (B, 5)), "additive"),
    "35": (((1, 35), (B, 7)), "none"),
    "36": (((1, 36), (B, 8)), "shared"),
    "three levels": (((1, 17), (2, 6), (B, 5)), "bool"),
    "groups": (((2, 9), (B, 4)), "2-D"),
    "a prefix of one rank": (((1, 1), (B, 3)), "bool"),
}


def locals_of(shape: tuple[int, ...], placements: list[Any], trees: list[str]) -> list[Outcome]:
    mesh = a_mesh(*shape)
    found = []
    for name in trees:
        levels, mask = TREES[name]
        tree = Tree.of(*levels, mask=mask)
        want = tree.whole()
        if S1 in placements:
            want = want.chunk(2, dim=1)[mesh.get_local_rank(placements.index(S1))]
        found.append(outcome(of_locals(mesh, placements), tree.own(mesh, placements), want))
    return found


@pytest.mark.parametrize(
    "shape, placements, merges",
    slow_after(
        1,
        [
            ((2,), [S2], gathers(2)),
            ((4,), [S2], gathers(4)),
            ((2, 2), [S1, S2], [("all_gather_into_tensor", STATE)]),
            ((2, 2), [S2, S1], [("all_gather_into_tensor", STATE)]),
            ((2, 2), [S2, S2], gathers(2, 2)),
            ((2, 2), [R, S2], gathers(2)),
        ],
    ),
)
def test_local_tensors(shape: tuple[int, ...], placements: list[Any], merges: list[Any]) -> None:
    ranks = 2 if shape == (2,) else 4
    for found in run_ranks(ranks, locals_of, shape, placements, list(TREES)):
        for x in found:
            assert x.error < 1e-6
            assert x.ops == BIFURCATED
            assert x.collectives == merges


def dtensors_of(shape: tuple[int, ...], query: list[Any], segments: list[list[Any]], trees: list[str]) -> list[Outcome]:
    mesh = a_mesh(*shape)
    found = []
    for name in trees:
        levels, mask = TREES[name]
        tree = Tree.of(*levels, mask=mask)
        placed = [segments[0], *([segments[1]] * (len(levels) - 1))]
        found.append(outcome(of_dtensors, place(tree, mesh, query, placed), tree.whole()))
    return found


@traced
@pytest.mark.parametrize(
    "shape, segments, merges",
    slow_after(
        1,
        [
            ((2,), [[S2], [R]], gathers(2)),
            ((2,), [[S2], [S2]], gathers(2)),
            ((4,), [[S2], [R]], gathers(4)),
            ((4,), [[S2], [S2]], gathers(4)),
            ((2, 2), [[S2, S2], [S2, R]], gathers(2, 2)),
            ((2, 2), [[S2, S2], [R, R]], gathers(2, 2)),
            ((2, 2), [[R, S2], [R, R]], gathers(2)),
        ],
    ),
)
def test_dtensors(shape: tuple[int, ...], segments: list[list[Any]], merges: list[Any]) -> None:
    ranks = 2 if shape == (2,) else 4
    for found in run_ranks(ranks, dtensors_of, shape, [R] * len(shape), segments, list(TREES)):
        for x in found:
            assert x.error < 1e-6
            assert x.ops == BIFURCATED
            assert x.collectives == merges


def sent(of: str, length: int) -> list[tuple[str, int]]:
    mesh = a_mesh(2)
    tree = Tree.of((1, length), (B, 8))
    if of == "locals":
        return outcome(of_locals(mesh, [S2]), tree.own(mesh, [S2]), tree.whole()).collectives
    return outcome(of_dtensors, place(tree, mesh, [R], [[S2], [R]]), tree.whole()).collectives


@pytest.mark.parametrize("of", FORMS)
def test_bytes_do_not_depend_on_the_prefix(of: str) -> None:
    assert run_ranks(2, sent, of, 1024) == run_ranks(2, sent, of, 65536) == [gathers(2)] * 2


def selected(form: str) -> tuple[Outcome, bool]:
    """Sequences that read a prefix of three rows, and their suffixes, by indexes; and whether the prefix is a copy."""
    mesh = a_mesh(2)
    tree = Tree.of((B, 13), (B, 6), mask="bool")
    rows = [torch.tensor([0, 0, 2, 1]), torch.tensor([3, 1, 0, 3])]
    chosen = [(key[own], value[own]) for (key, value), own in zip(tree.segments, rows, strict=True)]

    def fn(query: Any, pairs: Any, mask: Any, rows: Any) -> Any:
        pairs = [tuple(x.index_select(0, own) for x in pair) for pair, own in zip(pairs, rows, strict=True)]
        return attention(query, pairs, mask)

    if form == "locals":
        attention, args = of_locals(mesh, [S2]), tree.own(mesh, [S2])
    else:
        attention, args = of_dtensors, place(tree, mesh, [R], [[S2], [S2]])
        rows = [distribute_tensor(x, mesh, [R]) for x in rows]
    cost.RATES["cpu"] = cost.Rates(bytes_per_us=1.0, segment_us=0.0)
    gm = capture(fn, *args, rows)
    rewrite(gm)
    copied = [node for node in gm.graph.nodes if "index_select" in str(node.target)]
    return outcome(fn, (*args, rows), Tree(tree.query, chosen, tree.mask).whole()), bool(copied)


@pytest.mark.parametrize("form", FORMS)
def test_selected_rows(form: str) -> None:
    for found, copied in run_ranks(2, selected, form):
        assert found.error < 1e-6
        assert found.ops == BIFURCATED
        assert found.collectives == gathers(2)
        assert copied == (form == "dtensors")  # each rank copies its own part


def growing(form: str) -> tuple[int, float]:
    """Count the graphs that several lengths take, and measure the largest error."""
    mesh = a_mesh(2)
    fn = of_locals(mesh, [S2]) if form == "locals" else of_dtensors
    torch._dynamo.reset()
    cost.RATES["cpu"] = cost.Rates(bytes_per_us=1.0, segment_us=0.0)
    step = torch.compile(fn, backend="tatten", fullgraph=True, dynamic=True, options={"inner": "aot_eager"})
    errors = []
    with tatten.recording() as report:
        for length in (25, 39, 51):  # DTensor guards whether 2 divides it
            tree = Tree.of((1, length), (B, length - 7), mask="bool")
            args = tree.own(mesh, [S2]) if form == "locals" else place(tree, mesh, [R], [[S2], [R]])
            have = step(*args)
            have = have.full_tensor() if isinstance(have, DTensor) else have
            errors.append((have.double() - tree.whole()).abs().max().item())
    findings = [x for graph in report.graphs for x in graph.findings]
    assert all(isinstance(x, Rewritten) and "bifurcated" in x.op for x in findings), findings
    return len(report.graphs), max(errors)


@pytest.mark.parametrize("form", FORMS)
def test_lengths_are_dynamic(form: str) -> None:
    for graphs, error in run_ranks(2, growing, form):
        assert graphs == 1
        assert error < 1e-6


def rewritten(form: str) -> str:
    mesh = a_mesh(2)
    cost.RATES["cpu"] = cost.Rates(bytes_per_us=1.0, segment_us=0.0)
    tree = Tree.of((1, 9), (B, 4), mask="bool")
    query, pairs, mask = place(tree, mesh, [R], [[S2], [R]])
    if form == "dtensors":
        gm = capture(of_dtensors, query, pairs, mask)
    else:
        _, pairs, mask = tree.own(mesh, [S2])
        columns = DTensor.from_local(mask, mesh, [S3])
        gm = capture(of_locals(mesh, [S2]), query, pairs, columns)
    rewrite(gm)
    text = listing(gm).replace("from_local_2", "from_local")  # torch 2.11 gives fewer names away
    return text.replace(f"'{mesh.get_group().group_name}'", "group")


class TestGraphs(TestCase):
    """Rewritten graphs of rank 1 of 2."""

    def test_local_tensors(self) -> None:
        self.assertExpectedInline(
            run_ranks(2, rewritten, "locals")[1],
            """\
to_local = to_local(l_mask_)
to_local_1 = to_local(l_query_)
split = split(to_local, [4, 2], -1)
getitem = getitem(split, 0)
getitem_1 = getitem(split, 1)
block_mask_default = block_mask.default(getitem, 1)
block_mask_default_1 = block_mask.default(getitem_1)
bifurcated_attention_default = bifurcated_attention.default(to_local_1, [l_pairs_0_0_, l_pairs_1_0_], [l_pairs_0_1_, l_pairs_1_1_], [getitem, getitem_1], [block_mask_default, block_mask_default_1], None)
getitem_2 = getitem(bifurcated_attention_default, 0)
getitem_3 = getitem(bifurcated_attention_default, 1)
tree_merge_default = tree_merge.default(getitem_2, getitem_3, group, 2, 1, 'all_gather')
getitem_4 = getitem(tree_merge_default, 0)
from_local = from_local(getitem_4)
return (from_local)""",
        )

    @traced
    def test_dtensors(self) -> None:
        self.assertExpectedInline(
            run_ranks(2, rewritten, "dtensors")[1],
            """\
to_local = to_local(l_mask_)
to_local_1 = to_local(l_query_)
to_local_2 = to_local(l_pairs_0_0_)
to_local_3 = to_local(l_pairs_1_0_)
getitem = getitem(to_local_3, (slice(None, None, None), slice(None, None, None), slice(1, None, 2)))
to_local_4 = to_local(l_pairs_0_1_)
to_local_5 = to_local(l_pairs_1_1_)
getitem_1 = getitem(to_local_5, (slice(None, None, None), slice(None, None, None), slice(1, None, 2)))
split = split(to_local, [9, 4], -1)
getitem_2 = getitem(split, 0)
getitem_3 = getitem(split, 1)
narrow = narrow(getitem_2, 3, 5, 4)
getitem_4 = getitem(getitem_3, (slice(None, None, None), slice(None, None, None), slice(None, None, None), slice(1, None, 2)))
block_mask_default = block_mask.default(narrow, 1)
block_mask_default_1 = block_mask.default(getitem_4)
bifurcated_attention_default = bifurcated_attention.default(to_local_1, [to_local_2, getitem], [to_local_4, getitem_1], [narrow, getitem_4], [block_mask_default, block_mask_default_1], None)
getitem_5 = getitem(bifurcated_attention_default, 0)
getitem_6 = getitem(bifurcated_attention_default, 1)
tree_merge_default = tree_merge.default(getitem_5, getitem_6, group, 2, 1, 'all_gather')
getitem_7 = getitem(tree_merge_default, 0)
from_local = from_local(getitem_7)
return (from_local)""",
        )


def layers(form: str) -> tuple[int, int, float]:
    """Count the nodes that split a mask that two layers share, and those that look at its columns."""
    mesh = a_mesh(2)
    cost.RATES["cpu"] = cost.Rates(bytes_per_us=1.0, segment_us=0.0)
    tree = Tree.of((1, 9), (B, 4), mask="bool")
    one = of_locals(mesh, [S2]) if form == "locals" else of_dtensors
    args = tree.own(mesh, [S2]) if form == "locals" else place(tree, mesh, [R], [[S2], [R]])

    def fn(query: Any, pairs: Any, mask: Any) -> Any:
        return one(one(query, pairs, mask), pairs, mask)

    gm = capture(fn, *args)
    rewrite(gm)
    found = [
        len(gm.graph.find_nodes(op="call_function", target=target))
        for target in (torch.split, torch.ops.tatten.block_mask.default)
    ]
    again = Tree(tree.whole().float(), tree.segments, tree.mask)
    return found[0], found[1], outcome(fn, args, again.whole()).error


@pytest.mark.parametrize("form", FORMS)
def test_layers_share_the_columns_of_a_mask(form: str) -> None:
    for splits, block_masks, error in run_ranks(2, layers, form):
        assert splits == 1
        assert block_masks == 2
        assert error < 1e-6


def small() -> list[Any]:
    """Findings for local segments, once at a price that they pay, and once at one that they don't."""
    mesh = a_mesh(2)
    tree = Tree.of((1, 9), (B, 4))
    found = []
    for segment_us in (0.0, 1e6):
        cost.RATES["cpu"] = cost.Rates(bytes_per_us=1.0, segment_us=segment_us)
        gm = capture(of_locals(mesh, [S2]), *tree.own(mesh, [S2]))
        found += rewrite(gm).findings
    return [(x.op, x.note, x.cost is None) for x in found if isinstance(x, Rewritten)]


def test_local_segments_are_weighed_against_the_local_copy() -> None:
    paid, unpaid = run_ranks(2, small)[0]
    assert paid == ("tatten.bifurcated_attention.default", "local, then merged over mesh dim 'inner'", False)
    assert unpaid[0] == "tatten.decode_attention.default"
    assert "not bifurcated [small]: " in unpaid[1]


def written() -> dict[str, list[tuple[str, str]]]:
    """Findings where something on the way from the stored tensors to attention is written; each result is checked."""
    mesh = a_mesh(2)
    tree = Tree.of((1, 9), (B, 4))
    found = {}

    def of_written(what: str) -> Callable[..., Any]:
        def fn(query: Tensor, pairs: list[tuple[Tensor, Tensor]], mask: None) -> Any:
            joined = [torch.cat([spread(x) for x in xs], dim=2) for xs in zip(*pairs, strict=True)]
            if what == "prefix":
                pairs[0][0].zero_()
            if what == "joined":
                joined[0].mul_(2)
            key, value = (DTensor.from_local(x, mesh, [S2], run_check=False) for x in joined)
            if what == "dtensor":
                key.to_local().mul_(2)
            out: Any = attend(DTensor.from_local(query, mesh, [R], run_check=False), key, value)
            return out.to_local()

        return fn

    for what in ("prefix", "joined", "dtensor"):
        scaled = Tree(tree.query * (1 if what == "prefix" else 2), tree.segments, None)
        result = outcome(of_written(what), tree.own(mesh, [S2]), scaled.whole())
        assert result.error < 1e-6, (what, result.error)
        found[what] = result.findings
    return found


def test_writes_on_the_way_are_seen() -> None:
    for what, findings in run_ranks(2, written)[0].items():
        ((op, note),) = findings
        assert op == "decode_attention"
        assert f"not bifurcated [{Reason.WRITTEN.value}]" in note, what


def joined(query: Tensor, pairs: Any, mask: Tensor | None, result: Tensor | None = None) -> tuple[GraphModule, Any]:
    """The graph of `of_dtensors`, and its arguments.

    Made by hand: Dynamo asks PyTorch's rules what SDPA makes of such keys, which takes them minutes on some meshes.
    """
    graph, args = Graph(), []

    def value(node: Node, x: Any) -> Node:
        node.meta["example_value"] = x
        return node

    def placeholder(x: Tensor) -> Node:
        args.append(x)
        return value(graph.placeholder(f"x{len(args)}"), x)

    q = placeholder(query)
    whole = []
    for tensors in zip(*pairs, strict=True):
        parts = []
        for x in tensors:
            node = placeholder(x)
            if x.shape[0] != B:
                node = value(graph.call_method("expand", (node, B, -1, -1, -1)[:5]), x.expand(B, -1, -1, -1))
            parts.append(node)
        cat = torch.cat([node.meta["example_value"] for node in parts], dim=2)
        whole.append(value(graph.call_function(torch.cat, (parts, 2)), cat))
    kwargs = {"enable_gqa": True, "attn_mask": None if mask is None else placeholder(mask)}
    call = graph.call_function(torch.nn.functional.scaled_dot_product_attention, (q, *whole), kwargs)
    graph.output(value(call, query if result is None else result))
    return GraphModule(torch.nn.Module(), graph), args


def by_hand(query: list[Any], segments: list[list[Any]], mask: list[Any], shape: tuple[int, ...]) -> list[Any]:
    mesh = a_mesh(*shape)
    found = []
    for levels, kind in (((1, 9), (B, 5)), "bool"), (((1, 10), (B, 3)), "shared"), (((1, 3), (B, 1)), "none"):
        tree = Tree.of(*levels, mask=kind)
        how = [R if x == S0 and kind == "shared" else x for x in mask]
        gm, args = joined(*place(tree, mesh, query, segments, how))
        (finding,) = rewrite(gm).findings
        assert isinstance(finding, Rewritten), finding
        with CommDebugMode() as sent:
            have: Any = gm(*args)
        assert have.placements == tuple(query)
        error = (have.full_tensor().double() - tree.whole()).abs().max().item()
        found.append((error, finding.op, finding.note, sent.get_total_counts()))
    return found


@pytest.mark.parametrize(
    "query, segments, mask",
    slow_after(
        1,
        [
            ([S1, R], [[S1, S2], [S1, R]], [R, R]),
            ([R, S1], [[S2, S1], [S2, S1]], [R, R]),
            ([S0, R], [[R, S2], [S0, R]], [S0, R]),
            ([S0, R], [[R, S2], [S0, S2]], [R, R]),
        ],
    ),
)
def test_heads_or_the_batch_on_another_mesh_dim(query: list[Any], segments: list[list[Any]], mask: list[Any]) -> None:
    for found in run_ranks(4, by_hand, query, segments, mask, (2, 2)):
        for error, op, note, collectives in found:
            assert error < 1e-6
            assert op == "tatten.bifurcated_attention.default"
            assert note == f"local, then merged over mesh dim '{'outer' if query[0] == R else 'inner'}'"
            assert collectives == 1


def reasons() -> dict[str, tuple[str, str]]:
    mesh = a_mesh(2)
    tree = Tree.of((1, 8), (B, 4), mask="bool")
    query, pairs, mask = place(tree, mesh, [R], [[S2], [R]])
    (key, _), suffix = pairs
    places: dict[str, Any] = {
        "segment": ([R], [[S2], [S0]], [R]),
        "heads": ([R], [[S1], [R]], [R]),
        "query": ([S2], [[S2], [S2]], [R]),
        "none sharded": ([R], [[R], [R]], [R]),
        "mask": ([R], [[S2], [S2]], [S3]),
    }
    calls = {name: (place(tree, mesh, *how), None) for name, how in places.items()}
    replicated = place(tree, mesh, [R], [[R], [R]])[1][0][1]
    calls["value"] = ((query, [(key, replicated), suffix], mask), None)
    calls["result"] = ((query, pairs, mask), place(tree, mesh, [S1], [[S2], [R]])[0])
    calls["mask is plain"] = ((query, pairs, FakeTensorMode().from_tensor(tree.mask)), None)
    found = {}
    for name, (args, result) in calls.items():
        gm, _ = joined(*args, result)
        before = listing(gm)
        (finding,) = rewrite(gm).findings
        assert isinstance(finding, Declined)
        assert listing(gm) == before
        found[name] = finding.decline.reason.value, finding.decline.detail
    return found


def test_declines() -> None:
    found = run_ranks(2, reasons)[0]
    assert {reason for reason, _ in found.values()} == {Reason.PLACEMENT.value}
    for name, detail in {
        "segment": "segment 1 of key is placed as (Shard(dim=0),), query as (Replicate(),)",
        "heads": "segment 0 of key is placed as (Shard(dim=1),), query as (Replicate(),)",
        "query": "segment 0 of key is placed as (Shard(dim=2),), query as (Shard(dim=2),)",
        "none sharded": "no segment is sharded over the sequence",
        "mask": "attn_mask is placed as (Shard(dim=3),), which cannot be cut to (Replicate(),)",
        "value": "segments of key and of value are placed in different ways on mesh dim 0",
        "result": "the result is placed as (Shard(dim=1),), query as (Replicate(),)",
    }.items():
        assert found[name][1] == detail
    assert found["mask is plain"][1].startswith("attn_mask is not a DTensor on ")


def written_dtensor() -> tuple[str, str]:
    mesh = a_mesh(2)
    query, pairs, _ = place(Tree.of((1, 8), (B, 4)), mesh, [R], [[S2], [R]])

    def fn(query: Any, pairs: Any) -> Any:
        key, value = (torch.cat([spread(x) for x in xs], dim=2) for xs in zip(*pairs, strict=True))
        pairs[0][0].to_local().zero_()
        return attend(query, key, value)

    (finding,) = rewrite(capture(fn, query, pairs)).findings
    assert isinstance(finding, Declined)
    return finding.decline.reason.value, finding.decline.detail


@traced
def test_a_write_to_a_sharded_segment_is_seen() -> None:
    reason, detail = run_ranks(2, written_dtensor)[0]
    assert reason == Reason.WRITTEN.value
    assert detail.startswith("key is written by ")


def other_ranks_matter() -> list[str]:
    """Return the ops if segments are looked for behind a `from_local` that writes what another rank has."""
    mesh = a_mesh(2)
    cost.RATES["cpu"] = cost.Rates(bytes_per_us=1.0, segment_us=0.0)
    tree = Tree.of((1, 9), (B, 4))
    gm = capture(of_locals(mesh, [S2]), *tree.own(mesh, [S2]))
    for node in gm.graph.nodes:
        if "from_local" in str(node.target) and node.kwargs:
            node.kwargs = {"run_check": True}
    return [x.op for x in rewrite(gm).findings if isinstance(x, Rewritten)]


@pytest.mark.skipif(torch.__version__ < "2.12", reason="Dynamo keeps it in a closure")
def test_a_checked_from_local_is_not_looked_behind() -> None:
    assert run_ranks(2, other_ranks_matter)[0] == ["tatten.decode_attention.default"]
