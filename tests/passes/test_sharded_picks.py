"""Keys that a top-k selects among those of all ranks: each rank attends to the picks that it holds, and states merge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pick_forms
import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from graphs import capture, listing
from pick_forms import BLOCK, KV, LEFT, TAKEN, B, H, L, S, and_not, inputs
from ranks import run_ranks
from sharded_tree import S2, Outcome, R, outcome
from slow import slow_after
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.fx import GraphModule

import tatten
from tatten.ops.picks import without_duplicates
from tatten.passes import cost
from tatten.passes.rewrite import rewrite

pytestmark = pytest.mark.drawn(2, "DTensors")

REMARK = "not read by indices [picks]: "
COLUMNS = Shard(3)
Form = Callable[[Tensor, Tensor], Tensor]


def a_mesh() -> DeviceMesh:
    tatten.enable_dtensor_sdpa()
    cost.RATES["cpu"] = cost.Rates(bytes_per_us=1.0, segment_us=0.0)  # a process of its own, without the fixture
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("kv",))


def repeated(x: Tensor) -> Tensor:
    return x.repeat_interleave(H // KV, dim=1)


def whole(form: Form, query: Tensor, key: Tensor, value: Tensor, scores: Tensor, base: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, repeated(key), repeated(value), form(scores, base))


def striped(mesh: DeviceMesh, form: Form) -> Callable[..., Tensor]:
    """Rank r of n has the keys r, r + n ..., as in tatten's caches, and their columns of the mask."""
    ranks, rank = mesh.size(), mesh.get_local_rank()

    def fn(query: Tensor, key: Tensor, value: Tensor, scores: Tensor, base: Tensor) -> Tensor:
        keys, values = (DTensor.from_local(repeated(x), mesh, [S2], run_check=False) for x in (key, value))
        mask = DTensor.from_local(form(scores, base)[..., rank::ranks], mesh, [COLUMNS], run_check=False)
        queries = DTensor.from_local(query, mesh, [R], run_check=False)
        return F.scaled_dot_product_attention(queries, keys, values, mask).to_local()

    return fn


def of_stripes(mesh: DeviceMesh) -> tuple[Tensor, ...]:
    query, key, value, scores, base = inputs()
    return query, *(x[:, :, mesh.get_local_rank() :: mesh.size()].contiguous() for x in (key, value)), scores, base


def chunked(mesh: DeviceMesh, form: Form) -> Callable[..., Tensor]:
    """Each rank has neighbouring keys, and the whole mask, which tatten cuts."""

    def fn(query: Tensor, key: Tensor, value: Tensor, scores: Tensor, base: Tensor) -> Tensor:
        keys, values = (DTensor.from_local(repeated(x), mesh, [S2], run_check=False) for x in (key, value))
        queries, mask = (DTensor.from_local(x, mesh, [R], run_check=False) for x in (query, form(scores, base)))
        return F.scaled_dot_product_attention(queries, keys, values, mask).to_local()

    return fn


def of_chunks(mesh: DeviceMesh) -> tuple[Tensor, ...]:
    query, key, value, scores, base = inputs()
    own = (x.chunk(mesh.size(), dim=2)[mesh.get_local_rank()].contiguous() for x in (key, value))
    return query, *own, scores, base


LAYOUTS = {"striped": (striped, of_stripes), "chunked": (chunked, of_chunks)}


def rewritten(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[GraphModule]:
    gm = capture(fn, *args)
    rewrite(gm)
    return gm


def the_op(gm: GraphModule) -> Any:
    (op,) = [x for x in gm.graph.nodes if "tatten" in str(x.target) and "_attention" in str(x.target)]
    return op


def read(layout: str, names: list[str]) -> list[tuple[Outcome, dict[str, Any], bool, bool]]:
    mesh, found = a_mesh(), []
    program, given = LAYOUTS[layout]
    for name in names:
        form = {**TAKEN, **LEFT}[name]
        gm = rewritten(program(mesh, form), given(mesh))
        named = {x: str(y) for x, y in the_op(gm).kwargs.items()}
        removed = any(x.target is without_duplicates for x in gm.graph.nodes)
        scattered = any("scatter" in str(x.target) for x in gm.graph.nodes)
        result = outcome(program(mesh, form), given(mesh), whole(form, *inputs()))
        found.append((result, named, removed, scattered))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", slow_after(1, [2, 4]))
def test_each_rank_reads_the_picks_that_it_holds(n: int, layout: str) -> None:
    for found in run_ranks(n, read, layout, list(TAKEN)):
        for (x, named, removed, scattered), name in zip(found, TAKEN, strict=True):
            assert x.error < 1e-12, name
            assert x.ops == ["decode_attention"]
            assert "indices" in named, (name, x.findings)
            assert f"of {S} keys by " in x.findings[0][1]
            assert len(x.collectives) == 1
            assert removed == (name in pick_forms.WITH_DUPLICATES), name
            assert scattered == (name in ("biases_of_their_own", "behind_a_window")), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_masks_are_read_as_they_are(layout: str) -> None:
    names = [x for x in LEFT if x != "picks_for_each_query_head"]  # each head of the local keys is one
    for found in run_ranks(2, read, layout, names):
        for (x, named, _, _), name in zip(found, names, strict=True):
            assert x.error < 1e-12, name
            assert "indices" not in named, name
            assert REMARK in x.findings[0][1], name


def in_blocks_of_their_own(scores: Tensor, base: Tensor) -> Tensor:
    kept = torch.zeros(B, 1, L, S // BLOCK, dtype=torch.bool)
    blocks = scores[:, None].unflatten(-1, (S // BLOCK, BLOCK)).amax(-1)
    kept = kept.scatter(-1, blocks.topk(pick_forms.K, -1)[1], True)
    return kept.repeat_interleave(BLOCK, dim=-1) & base[:, None]


def of_blocks(layout: str) -> tuple[float, Any]:
    mesh = a_mesh()
    program, given = LAYOUTS[layout]
    gm = rewritten(program(mesh, in_blocks_of_their_own), given(mesh))
    found = outcome(program(mesh, in_blocks_of_their_own), given(mesh), whole(in_blocks_of_their_own, *inputs()))
    return found.error, the_op(gm).kwargs.get("index_block", 1)


@pytest.mark.parametrize("n, layout, block", [(2, "striped", 2), (3, "striped", 1), (2, "chunked", 4)])
def test_blocks_of_keys(n: int, layout: str, block: int) -> None:
    """A rank has every n-th key of a block, and reads these key by key if n doesn't divide the block."""
    assert run_ranks(n, of_blocks, layout) == [(pytest.approx(0, abs=1e-12), block)] * n


def forked(mesh: DeviceMesh, form: Form) -> Callable[..., Tensor]:
    """Keys of a prefix and of suffixes, as a cache that was forked has them on each rank."""
    ranks, rank = mesh.size(), mesh.get_local_rank()

    def fn(query: Tensor, pairs: Any, scores: Tensor, base: Tensor) -> Tensor:
        keys, values = (
            DTensor.from_local(repeated(torch.cat((p.expand(B, -1, -1, -1), x), dim=2)), mesh, [S2], run_check=False)
            for p, x in pairs
        )
        mask = DTensor.from_local(form(scores, base)[..., rank::ranks], mesh, [COLUMNS], run_check=False)
        queries = DTensor.from_local(query, mesh, [R], run_check=False)
        return F.scaled_dot_product_attention(queries, keys, values, mask).to_local()

    return fn


def concatenated(form: Form) -> Callable[..., Any]:
    """A `cat` of DTensors, of which each rank holds a part of the prefix, and the suffixes whole."""

    def fn(query: Any, pairs: Any, scores: Tensor, base: Tensor) -> Any:
        key, value = (torch.cat((p.expand(B, -1, -1, -1), x), dim=2) for p, x in pairs)
        mask = DTensor.from_local(form(scores, base), query.device_mesh, [R], run_check=False)
        return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)

    return fn


PREFIX = 101


def twice(scores: Tensor, base: Tensor) -> Tensor:
    picks = pick_forms.top(scores, base)
    return torch.zeros_like(base).scatter(-1, torch.cat((picks, picks), -1), True)[:, None]


# PyTorch has no rule for SDPA of two queries over DTensors on a CPU.
PREFIXED = {"in_three_dims": pick_forms.in_three_dims, "twice": twice}


def of_a_prefix(kind: str, name: str) -> tuple[Outcome, int]:
    mesh, form = a_mesh(), PREFIXED[name]
    query, key, value, scores, base = inputs()
    query, scores, base = query[:, :, :1].clone(), scores[:, :1].clone(), base[:, :1].clone()
    ranks, rank = mesh.size(), mesh.get_local_rank()
    pairs = [(x[:1, :, :PREFIX].clone(), x[:, :, PREFIX:].clone()) for x in (key, value)]
    want = whole(form, query, *(torch.cat((p.expand(B, -1, -1, -1), x), dim=2) for p, x in pairs), scores, base)
    if kind == "forked":
        pairs = [(p[:, :, rank::ranks].clone(), x[:, :, (rank - PREFIX) % ranks :: ranks].clone()) for p, x in pairs]
        fn = forked(mesh, form)
    else:
        query = distribute_tensor(query, mesh, [R])
        pairs = [(distribute_tensor(p, mesh, [S2]), distribute_tensor(x, mesh, [R])) for p, x in pairs]
        fn = concatenated(form)
    gm = rewritten(fn, (query, pairs, scores, base))
    return outcome(fn, (query, pairs, scores, base), want), len(the_op(gm).kwargs.get("indices", ()))


KINDS = ["forked", pytest.param("concatenated", marks=pytest.mark.skipif(torch.__version__ < "2.12", reason="no rule"))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PREFIXED)
def test_a_shared_prefix_over_ranks(kind: str, name: str) -> None:
    for found, segments in run_ranks(2, of_a_prefix, kind, name):
        assert found.error < 1e-12
        assert found.ops == ["bifurcated_attention"], found.findings
        assert segments == 2, found.findings
        assert f"of {S} keys by top-k" in found.findings[0][1]


def of_dtensors() -> list[tuple[str, str]]:
    """The scores of all keys are DTensors, and so are picks and mask."""
    mesh = a_mesh()

    def fn(query: Any, key: Any, value: Any, scores: Any, base: Any) -> Any:
        picks = scores.topk(7, -1).indices
        mask = (base & torch.zeros_like(base).scatter(-1, picks, True)).unsqueeze(1)
        return F.scaled_dot_product_attention(query, repeated(key), repeated(value), mask)

    query, key, value, scores, base = inputs()
    args = [distribute_tensor(x, mesh, [how]) for x, how in zip(inputs(), [R, S2, S2, R, R], strict=True)]
    mask = (base & torch.zeros_like(base).scatter(-1, scores.topk(7, -1).indices, True)).unsqueeze(1)
    found = outcome(fn, tuple(args), F.scaled_dot_product_attention(query, repeated(key), repeated(value), mask))
    assert found.error < 1e-12
    return found.findings


@pytest.mark.skipif(torch.__version__ < "2.12", reason="PyTorch has no rule for SDPA over DTensors on a CPU")
def test_picks_that_are_dtensors_are_not_read() -> None:
    for [(op, note)] in run_ranks(2, of_dtensors):
        assert op == "decode_attention"
        assert REMARK in note


def written_after_it_was_wrapped() -> float:
    mesh = a_mesh()
    ranks, rank = mesh.size(), mesh.get_local_rank()

    def fn(query: Tensor, key: Tensor, value: Tensor, scores: Tensor, base: Tensor) -> Tensor:
        keys, values = (DTensor.from_local(repeated(x), mesh, [S2], run_check=False) for x in (key, value))
        own = and_not(scores, base)[..., rank::ranks]
        mask = DTensor.from_local(own, mesh, [COLUMNS], run_check=False)
        own[..., :3] = True
        queries = DTensor.from_local(query, mesh, [R], run_check=False)
        return F.scaled_dot_product_attention(queries, keys, values, mask).to_local()

    def mask(scores: Tensor, base: Tensor) -> Tensor:
        kept = and_not(scores, base)
        kept[..., : 3 * ranks] = True
        return kept

    found = outcome(fn, of_stripes(mesh), whole(mask, *inputs()))
    assert REMARK in found.findings[0][1]
    return found.error


def test_a_mask_that_is_written_after_it_was_wrapped() -> None:
    assert max(run_ranks(2, written_after_it_was_wrapped)) < 1e-12


def graph(layout: str) -> str:
    mesh = a_mesh()
    program, given = LAYOUTS[layout]
    gm = rewritten(program(mesh, and_not), given(mesh))
    return listing(gm).replace(f"'{mesh.get_group().group_name}'", "group")


@pytest.mark.skipif(torch.__version__ < "2.12", reason="Dynamo keeps the placements in a closure")
class TestGraphs(TestCase):
    def test_every_other_key(self) -> None:
        self.assertExpectedInline(
            run_ranks(2, graph, "striped")[1],
            """\
repeat_interleave = repeat_interleave(l_key_, 2, dim=1)
keys = from_local(repeat_interleave, l_mesh_, [Shard(dim=2)], run_check=False)
repeat_interleave_1 = repeat_interleave(l_value_, 2, dim=1)
values = from_local(repeat_interleave_1, l_mesh_, [Shard(dim=2)], run_check=False)
getitem = getitem(l_base_, (slice(None, None, None), None))
invert = invert(l_base_)
masked_fill = masked_fill(l_scores_, invert, -inf)
topk = topk(masked_fill, 7, -1)
getitem_2 = getitem(topk, 1)
to = to(getitem_2, torch.int32)
queries = from_local(l_query_, l_mesh_, [Replicate()], run_check=False)
getitem_4 = getitem(getitem, (Ellipsis, slice(1, None, 2)))
to_local_1 = to_local(queries)
to_local_2 = to_local(keys)
to_local_3 = to_local(values)
unsqueeze_1 = unsqueeze(to, 1)
counted_from = counted_from(unsqueeze_1, 1, 2)
decode_attention_default = decode_attention.default(to_local_1, to_local_2, to_local_3, getitem_4, None, None, None, indices=counted_from)
getitem_5 = getitem(decode_attention_default, 0)
getitem_6 = getitem(decode_attention_default, 1)
tree_merge_default = tree_merge.default(getitem_5, getitem_6, group, 2, 1, 'all_gather')
getitem_7 = getitem(tree_merge_default, 0)
permute = permute(getitem_7, [0, 2, 1, 3])
contiguous = contiguous(permute)
permute_1 = permute(contiguous, [0, 2, 1, 3])
return (permute_1)""",
        )

    def test_the_second_half(self) -> None:
        self.assertExpectedInline(
            run_ranks(2, graph, "chunked")[1],
            """\
repeat_interleave = repeat_interleave(l_key_, 2, dim=1)
keys = from_local(repeat_interleave, l_mesh_, [Shard(dim=2)], run_check=False)
repeat_interleave_1 = repeat_interleave(l_value_, 2, dim=1)
values = from_local(repeat_interleave_1, l_mesh_, [Shard(dim=2)], run_check=False)
getitem = getitem(l_base_, (slice(None, None, None), None))
invert = invert(l_base_)
masked_fill = masked_fill(l_scores_, invert, -inf)
topk = topk(masked_fill, 7, -1)
getitem_2 = getitem(topk, 1)
to = to(getitem_2, torch.int32)
queries = from_local(l_query_, l_mesh_, [Replicate()], run_check=False)
narrow = narrow(getitem, 3, 64, 64)
to_local_1 = to_local(queries)
to_local_2 = to_local(keys)
to_local_3 = to_local(values)
unsqueeze_1 = unsqueeze(to, 1)
counted_from = counted_from(unsqueeze_1, 64, 1)
decode_attention_default = decode_attention.default(to_local_1, to_local_2, to_local_3, narrow, None, None, None, indices=counted_from)
getitem_3 = getitem(decode_attention_default, 0)
getitem_4 = getitem(decode_attention_default, 1)
tree_merge_default = tree_merge.default(getitem_3, getitem_4, group, 2, 1, 'all_gather')
getitem_5 = getitem(tree_merge_default, 0)
permute = permute(getitem_5, [0, 2, 1, 3])
contiguous = contiguous(permute)
permute_1 = permute(contiguous, [0, 2, 1, 3])
return (permute_1)""",
        )
