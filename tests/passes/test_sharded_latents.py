"""Latents sharded over a mesh: each rank attends to its own as they are, and what is merged has the values' width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from graphs import capture, listing
from ranks import run_ranks
from sharded_tree import S1, S2, Outcome, R, outcome
from slow import slow_after
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import tatten
from tatten.passes import cost
from tatten.passes.reasons import Reason
from tatten.passes.rewrite import rewrite

pytestmark = pytest.mark.drawn(2, "DTensors")

B, H, S, RANK, NOPE, ROPE, V = 3, 4, 22, 24, 12, 8, 20  # of other widths PyTorch traces no SDPA on a mesh of two dims
COLUMNS = Shard(3)
LATENT = "latent_attention"


def tensors(q_len: int = 1, rows: int = B) -> list[Tensor]:
    """Query, weight, latents, their rope and a mask, the same on all ranks."""
    rng = torch.Generator().manual_seed(3)
    shapes = (B, H, q_len, NOPE + ROPE), (H * (NOPE + V), RANK), (rows, 1, S, RANK), (rows, 1, S, ROPE)
    mask = torch.rand(B, 1, q_len, S, generator=rng) < 0.6
    mask[..., -1] = True
    mask[0, ..., ::2] = False  # the first of two ranks has nothing for this sequence
    return [*(torch.randn(x, generator=rng, dtype=torch.float64) for x in shapes), mask]


def expand(w: Tensor, c: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as transformers makes them."""
    own, values = F.linear(c, w).view(c.shape[0], c.shape[2], -1, NOPE + V).transpose(1, 2).split((NOPE, V), dim=-1)
    keys = own.new_empty(*own.shape[:-1], NOPE + ROPE)
    keys[..., :NOPE].copy_(own)
    keys[..., NOPE:].copy_(rope.expand(-1, own.shape[1], -1, -1))
    return keys, values


def whole(q: Tensor, w: Tensor, c: Tensor, rope: Tensor, mask: Tensor) -> Tensor:
    spread = [x.expand(B, -1, -1, -1) for x in (c, rope)]
    return F.scaled_dot_product_attention(q, *expand(w, *spread), mask, scale=0.3)


def a_mesh(*shape: int) -> DeviceMesh:
    tatten.enable_dtensor_sdpa()
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def own(mesh: DeviceMesh, placements: list[Any], args: list[Tensor]) -> list[Tensor]:
    """This rank's part: every n-th latent, and its heads."""
    q, w, c, rope, mask = args
    ranks, rank = 1, 0
    for dim, placement in enumerate(placements):
        size, at = mesh.size(dim), mesh.get_local_rank(dim)
        if placement == S2:
            ranks, rank = ranks * size, rank * size + at
        elif placement == S1:
            q, w = q.chunk(size, 1)[at], w.chunk(size, 0)[at]
    c, rope, mask = (x[..., rank::ranks, :].contiguous() if x is not mask else x[..., rank::ranks] for x in args[2:])
    return [q.contiguous(), w.contiguous(), c, rope, mask.contiguous()]


def merged(mesh: DeviceMesh, placements: list[Any], queries: Tensor, keys: Any, values: Any, mask: Tensor) -> Any:
    """Attention as `ShardedKVCache` has it, to DTensors of what each rank has expanded."""
    of_queries = [placement if placement == S1 else R for placement in placements]
    columns = [COLUMNS if placement == S2 else R for placement in placements]
    wrap = DTensor.from_local
    key, value = (x if isinstance(x, DTensor) else wrap(x, mesh, placements, run_check=False) for x in (keys, values))
    query, mask = wrap(queries, mesh, of_queries, run_check=False), wrap(mask, mesh, columns, run_check=False)
    return F.scaled_dot_product_attention(query, key, value, mask, scale=0.3).to_local()


def of_locals(mesh: DeviceMesh, placements: list[Any]) -> Callable[..., Tensor]:
    def fn(q: Tensor, w: Tensor, c: Tensor, rope: Tensor, mask: Tensor) -> Tensor:
        return merged(mesh, placements, q, *expand(w, c, rope), mask)

    return fn


def forked(mesh: DeviceMesh, placements: list[Any]) -> Callable[..., Tensor]:
    """The first 16 latents are those of a prompt that sequences share."""

    def fn(q: Tensor, w: Tensor, c: Tensor, rope: Tensor, mask: Tensor, c_new: Tensor, rope_new: Tensor) -> Tensor:
        latents, ropes = (torch.cat((x.expand(B, -1, -1, -1), y), dim=2) for x, y in ((c, c_new), (rope, rope_new)))
        return merged(mesh, placements, q, *expand(w, latents, ropes), mask)

    return fn


def outcomes(shape: tuple[int, ...], placements: list[Any]) -> list[Outcome]:
    mesh, found = a_mesh(*shape), []
    for q_len in (1, 4):
        args = tensors(q_len)
        want = whole(*args)
        if S1 in placements:
            want = want.chunk(2, dim=1)[mesh.get_local_rank(placements.index(S1))]
        found.append(outcome(of_locals(mesh, placements), tuple(own(mesh, placements, args)), want))
    return found


@pytest.mark.parametrize(
    "shape, placements, ranks",
    slow_after(1, [((2,), [S2], [2]), ((4,), [S2], [4]), ((2, 2), [S2, S2], [2, 2]), ((2, 2), [S1, S2], [2])]),
)
def test_weights_are_applied_before_the_merge(shape: tuple[int, ...], placements: list[Any], ranks: list[int]) -> None:
    """Each rank sends as many columns as values have, which are fewer than latents have, and its lse."""
    heads = H // 2 if S1 in placements else H
    for found in run_ranks(2 if shape == (2,) else 4, outcomes, shape, placements):
        for x, q_len in zip(found, (1, 4), strict=True):
            assert x.ops == [LATENT]
            assert x.error < 1e-12
            assert x.collectives == [("all_gather_into_tensor", n * B * heads * q_len * (V + 1) * 8) for n in ranks]


def of_a_fork() -> list[tuple[list[str], float, list[Any]]]:
    mesh, placements = a_mesh(2), [S2]
    args = tensors()
    q, w, c, rope, mask = own(mesh, placements, args)
    given = q, w, c[:1, :, :8].clone(), rope[:1, :, :8].clone(), mask, c[:, :, 8:].clone(), rope[:, :, 8:].clone()
    shared = [*args[:2], *(torch.cat((x[:1, :, :16].expand(B, -1, -1, -1), x[:, :, 16:]), 2) for x in args[2:4]), mask]
    found = outcome(forked(mesh, placements), given, whole(*shared[:4], args[4]))
    gm = capture(forked(mesh, placements), *given)
    rewrite(gm)
    calls = [x for x in gm.graph.nodes if x.target is torch.ops.tatten.latent_attention.default]
    return found.ops, found.error, [list(x.args[2].meta["example_value"].shape) for x in calls]


def test_a_shared_prompt_is_read_once() -> None:
    for ops, error, read in run_ranks(2, of_a_fork):
        assert ops == [LATENT]
        assert error < 1e-12
        assert read == [[1, 1, 8, RANK], [B, 1, 3, RANK]]


def asked_of_a_fork() -> list[tuple[str, object]]:
    mesh = a_mesh(2)
    q, w, c, rope, mask = own(mesh, [S2], tensors())
    given = q, w, c[:1, :, :8].clone(), rope[:1, :, :8].clone(), mask, c[:, :, 8:].clone(), rope[:, :, 8:].clone()
    gm = capture(forked(mesh, [S2]), *given)
    rewrite(gm, batch_invariant=True)
    ours = [x for x in gm.graph.nodes if "_attention" in str(x.target) or "merge" in str(x.target)]
    return [(x.target.__name__, x.kwargs.get("batch_invariant")) for x in ours]


def test_a_batch_need_not_matter() -> None:
    """Neither to attention, which then reads latents as they are concatenated, nor to the merge."""
    asked = [("latent_attention.default", True), ("tree_merge.default", True)]
    assert run_ranks(2, asked_of_a_fork) == [asked] * 2


def graph() -> str:
    cost.RATES["cpu"] = cost.Rates(bytes_per_us=1.0, segment_us=0.0)  # a process of its own, without the fixture
    mesh = a_mesh(2)
    gm = capture(of_locals(mesh, [S2]), *own(mesh, [S2], tensors()))
    rewrite(gm)
    return listing(gm).replace(f"'{mesh.get_group().group_name}'", "group")


@pytest.mark.skipif(torch.__version__ < "2.12", reason="Dynamo keeps the placements in a closure")
class TestGraph(TestCase):
    def test_the_output_of_each_rank_is_merged(self) -> None:
        self.assertExpectedInline(
            run_ranks(2, graph)[1],
            """\
query = from_local(l_q_, l_mesh_, [Replicate()], run_check=False)
mask = from_local(l_mask_, l_mesh_, [Shard(dim=3)], run_check=False)
to_local_1 = to_local(mask)
to_local_2 = to_local(query)
narrow = narrow(to_local_2, 3, 0, 12)
transpose_1 = transpose(narrow, 0, 1)
flatten = flatten(transpose_1, 1, 2)
unflatten = unflatten(l_w_, 0, (4, 32))
narrow_1 = narrow(unflatten, 1, 0, 12)
bmm = bmm(flatten, narrow_1)
unflatten_1 = unflatten(bmm, 1, (-1, 1))
transpose_2 = transpose(unflatten_1, 0, 1)
narrow_2 = narrow(to_local_2, 3, 12, 8)
block_mask_default = block_mask.default(to_local_1)
latent_attention_default = latent_attention.default(transpose_2, narrow_2, l_c_, l_rope_, to_local_1, scale=0.3, block_mask=block_mask_default, out_dtype=torch.float64)
getitem_4 = getitem(latent_attention_default, 0)
unflatten_2 = unflatten(l_w_, 0, (4, 32))
narrow_3 = narrow(unflatten_2, 1, 12, 20)
transpose_3 = transpose(narrow_3, 1, 2)
transpose_4 = transpose(getitem_4, 0, 1)
flatten_1 = flatten(transpose_4, 1, 2)
bmm_1 = bmm(flatten_1, transpose_3)
unflatten_3 = unflatten(bmm_1, 1, (-1, 1))
transpose_5 = transpose(unflatten_3, 0, 1)
contiguous = contiguous(transpose_5)
getitem_5 = getitem(latent_attention_default, 1)
tree_merge_default = tree_merge.default(contiguous, getitem_5, group, 2, 1, 'all_gather')
getitem_6 = getitem(tree_merge_default, 0)
return (getitem_6)""",
        )


def returned(mesh: DeviceMesh) -> Callable[..., Any]:
    def fn(q: Tensor, w: Tensor, c: Tensor, rope: Tensor, mask: Tensor) -> Any:
        keys, values = expand(w, c, rope)
        keys = DTensor.from_local(keys, mesh, [S2], run_check=False)
        return merged(mesh, [S2], q, keys, values, mask) + keys.to_local().sum()

    return fn


def written(mesh: DeviceMesh) -> Callable[..., Any]:
    def fn(q: Tensor, w: Tensor, c: Tensor, rope: Tensor, mask: Tensor) -> Any:
        keys, values = expand(w, c, rope)
        values = DTensor.from_local(values.contiguous(), mesh, [S2], run_check=False)
        values.mul_(2)
        return merged(mesh, [S2], q, keys, values, mask)

    return fn


def cached_between(mesh: DeviceMesh) -> Callable[..., Any]:
    def fn(q: Tensor, w: Tensor, c: Tensor, rope: Tensor, mask: Tensor) -> Any:
        keys, values = expand(w, c, rope)
        c.mul_(2)
        return merged(mesh, [S2], q, keys, values, mask)

    return fn


def columnwise(mesh: DeviceMesh) -> Callable[..., Any]:
    """The weight as `ColwiseParallel` has it over another mesh dim, here of one rank."""
    grid = a_mesh(1, 2)
    heads, how = grid["outer"], [S1, S2]

    def fn(q: Tensor, w: Tensor, c: Tensor, rope: Tensor, mask: Tensor) -> Any:
        weight = DTensor.from_local(w, heads, [Shard(0)], run_check=False)
        projected = F.linear(DTensor.from_local(c, heads, [R], run_check=False), weight).to_local()
        own, values = projected.view(B, -1, H, NOPE + V).transpose(1, 2).split((NOPE, V), dim=-1)
        keys = torch.cat((own, rope.expand(-1, H, -1, -1)), dim=-1)
        return merged(grid, how, q, keys, values, mask)

    return fn


def of_dtensors(mesh: DeviceMesh) -> Callable[..., Any]:
    """Latents and weight are DTensors, and keys and values as PyTorch expands those."""

    def fn(q: Tensor, w: Tensor, c: Tensor, rope: Tensor, mask: Tensor) -> Any:
        latents, ropes = (DTensor.from_local(x, mesh, [S2], run_check=False) for x in (c, rope))
        projected = F.linear(latents, DTensor.from_local(w, mesh, [R], run_check=False))
        own, values = projected.view(B, S, H, NOPE + V).transpose(1, 2).split((NOPE, V), dim=-1)
        keys = torch.cat((own, ropes.expand(-1, H, -1, -1)), dim=-1)
        return merged(mesh, [S2], q, keys, values, mask)

    return fn


DECLINED = {returned: Reason.PROJECTION_USED, written: Reason.WRITTEN, cached_between: Reason.WRITTEN}
DECLINED |= {columnwise: Reason.PROJECTION, of_dtensors: Reason.PLACEMENT}


def declined(make: Callable[..., Any]) -> list[tuple[str, str]]:
    mesh, want = a_mesh(2), whole(*tensors())
    args = own(mesh, [S2], tensors())
    if make not in (columnwise, of_dtensors):
        want = make(mesh)(*[x.clone() for x in args])
    found = outcome(make(mesh), tuple(args), want)
    assert found.error < 1e-12
    return found.findings


@pytest.mark.parametrize("make", slow_after(3, reversed(DECLINED)), ids=lambda make: make.__name__)
def test_what_is_expanded_all_the_same_is_attended_to_locally_and_noted(make: Callable[..., Any]) -> None:
    if make is of_dtensors and torch.__version__ < "2.12":
        pytest.skip("PyTorch has no rule for a product that flattens a sharded dim")
    for [(op, note)] in run_ranks(2, declined, make):
        assert op == "decode_attention"
        assert "local, then merged" in note
        assert f"not absorbed [{DECLINED[make].value}]" in note


def selecting(mesh: DeviceMesh, shared: bool) -> Callable[..., Tensor]:
    """Queries pick some of all latents, of which each rank has every n-th."""
    ranks, rank = mesh.size(), mesh.get_local_rank()

    def fn(q: Tensor, w: Tensor, c: Tensor, rope: Tensor, scores: Tensor, base: Tensor, *new: Tensor) -> Tensor:
        picks = scores.masked_fill(~base, -torch.inf).topk(5, -1).indices
        mask = base & torch.zeros_like(base).scatter(-1, picks, True)
        program = forked(mesh, [S2]) if shared else of_locals(mesh, [S2])
        return program(q, w, c, rope, mask[..., rank::ranks], *new)

    return fn


def of_picks(shared: bool) -> tuple[Outcome, list[bool], bool]:
    mesh = a_mesh(2)
    args = tensors()
    q, w, c, rope, base = args
    scores = torch.randn(base.shape, generator=torch.Generator().manual_seed(4))
    if shared:
        c, rope = (torch.cat((x[:1, :, :16].expand(B, -1, -1, -1), x[:, :, 16:]), dim=2) for x in (c, rope))
    picks = scores.masked_fill(~base, -torch.inf).topk(5, -1).indices
    want = whole(q, w, c, rope, base & torch.zeros_like(base).scatter(-1, picks, True))
    _, _, own_c, own_rope, _ = own(mesh, [S2], [q, w, c, rope, base])
    given = (q, w, own_c, own_rope, scores, base)
    if shared:
        given = (
            *(q, w, own_c[:1, :, :8].clone(), own_rope[:1, :, :8].clone(), scores, base),
            *(own_c[:, :, 8:].clone(), own_rope[:, :, 8:].clone()),
        )
    cost.RATES["cpu"] = cost.Rates(bytes_per_us=1.0, segment_us=0.0)
    gm = capture(selecting(mesh, shared), *given)
    rewrite(gm)
    ops = [x for x in gm.graph.nodes if x.target is torch.ops.tatten.latent_attention.default]
    scattered = any(x.target == "scatter" for x in gm.graph.nodes)
    return outcome(selecting(mesh, shared), given, want), ["indices" in x.kwargs for x in ops], scattered


@pytest.mark.parametrize("shared", [False, True])
def test_each_rank_attends_to_the_latents_that_were_picked(shared: bool) -> None:
    for found, named, scattered in run_ranks(2, of_picks, shared):
        assert found.ops == [LATENT]
        assert found.error < 1e-12
        assert named == [True] * (1 + shared), found.findings
        assert not scattered
        assert len(found.collectives) == 1
        assert f"5 of {S} keys by top-k" in found.findings[0][1]
