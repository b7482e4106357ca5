"""`options={"batch_invariant": True}` for DTensors whose sequence is sharded: the same bits in every batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import capture
from random_batches import Sequences, part_of
from ranks import run_ranks
from sharded_tree import S1, S2, S3, B, R, Tree, of_dtensors, of_locals, place
from slow import slow_but
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import tatten
from tatten.passes.findings import Declined
from tatten.passes.rewrite import rewrite

pytestmark = pytest.mark.drawn(2, "DTensors")


def attend(mesh: DeviceMesh) -> Callable[..., Tensor]:
    """Attention to `from_local` of plain tensors, as caches have it: heads over the first of two mesh dims."""
    heads = [S1] * (mesh.ndim - 1)

    def fn(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor) -> Tensor:
        given = (query, R), (key, S2), (value, S2), (attn_mask, S3)
        tensors = (DTensor.from_local(x, mesh, [*heads, sequence], run_check=False) for x, sequence in given)
        return F.scaled_dot_product_attention(*tensors, enable_gqa=True).to_local()

    return fn


def own(call: dict[str, Any], mesh: DeviceMesh) -> dict[str, Tensor]:
    """This rank's part: its heads, and every n-th key."""
    last = mesh.ndim - 1
    part = part_of(call, mesh.get_local_rank(last), mesh.size(last))
    if last == 0:
        return part
    return {name: x.chunk(mesh.size(0), 1)[mesh.get_local_rank(0)].contiguous() for name, x in part.items()}


def compiled(shape: tuple[int, ...], inner: str, batches: int) -> tuple[int, list[str]]:
    """In how many batches a sequence has other bits than alone, and which calls were left to PyTorch."""
    tatten.enable_dtensor_sdpa()
    mesh = init_device_mesh("cpu", shape)
    step = torch.compile(attend(mesh), backend="tatten", options={"batch_invariant": True, "inner": inner})
    want, found = None, 0
    with tatten.recording() as report:
        for alone, together, at in Sequences(mask="holes", q_len=2, longest=400, head_dim=23).batches(batches):
            want = step(**own(alone, mesh)) if want is None else want
            found += not torch.equal(step(**own(together, mesh))[at], want[0])
    assert report.rewritten
    return found, [str(x) for x in report.declined]


@pytest.mark.parametrize(
    "mesh, inner",
    slow_but([("2", "eager")], [("2", "eager"), ("2", "inductor"), ("2 x 2", "eager"), ("4", "eager")]),
)
def test_a_sequence_has_the_same_bits_in_every_batch(mesh: str, inner: str) -> None:
    shape, batches = tuple(map(int, mesh.split(" x "))), 20 if inner == "eager" else 5
    ranks = math.prod(shape)
    assert run_ranks(ranks, compiled, shape, inner, batches) == [(0, [])] * ranks


def attend_shared(mesh: DeviceMesh) -> Callable[..., Tensor]:
    """The same to a prefix and own keys, which each rank has some of."""

    def fn(query: Tensor, keys: list[Tensor], values: list[Tensor], masks: list[Tensor]) -> Tensor:
        key, value = (torch.cat((x[0].expand(query.shape[0], -1, -1, -1), x[1]), dim=2) for x in (keys, values))
        given = (query, R), (key, S2), (value, S2), (torch.cat(masks, dim=3), S3)
        tensors = (DTensor.from_local(x, mesh, [placed], run_check=False) for x, placed in given)
        return F.scaled_dot_product_attention(*tensors, enable_gqa=True).to_local()

    return fn


def compiled_with_prefix(ranks: int, batches: int) -> int:
    """In how many batches a sequence has other bits than alone."""
    tatten.enable_dtensor_sdpa()
    mesh = init_device_mesh("cpu", (ranks,))
    step = torch.compile(attend_shared(mesh), backend="tatten", options={"batch_invariant": True, "inner": "eager"})
    own_keys = Sequences(mask="holes", q_len=2, longest=80)

    def of_rank(call: dict[str, Any], prefix: list[Tensor]) -> list[Any]:
        parts = []
        for own in (prefix, [call[name] for name in ("key", "value", "attn_mask")]):
            given = dict(zip(("key", "value", "attn_mask"), own, strict=True))
            parts.append(part_of(given, mesh.get_local_rank(), ranks))
        return [call["query"], *([x[name] for x in parts] for name in ("key", "value", "attn_mask"))]

    want, found = None, 0
    for alone, together, at in own_keys.batches(batches):
        if want is None:
            prefix = [torch.randn(1, 2, 300, 16) for _ in "kv"]
            mask = torch.rand(1, 4, 2, 300) < 0.7
            want = step(*of_rank(alone, [*prefix, mask]))
        masks = torch.rand(together["query"].shape[0], 4, 2, 300) < 0.5
        masks[at] = mask[0]
        found += not torch.equal(step(*of_rank(together, [*prefix, masks]))[at], want[0])
    return found


def test_so_has_one_that_shares_a_prefix() -> None:
    assert run_ranks(2, compiled_with_prefix, 2, 10) == [0, 0]


def rewritten(form: str) -> tuple[list[str], list[tuple[str, object]]]:
    """Why calls are left, and which ops take their place, with what they are asked for."""
    tatten.enable_dtensor_sdpa()
    mesh, tree = init_device_mesh("cpu", (2,)), Tree.of((1, 40), (B, 8), mask="bool")
    if form == "locals":
        gm = capture(of_locals(mesh, [S2]), *tree.own(mesh, [S2]))
    else:
        gm = capture(of_dtensors, *place(tree, mesh, [R], [[S2], [R]]))
    declined = [x.decline for x in rewrite(gm, batch_invariant=True).findings if isinstance(x, Declined)]
    ops = torch.ops.tatten
    targets = ops.decode_attention.default, ops.bifurcated_attention.default, ops.tree_merge.default
    nodes = [node for op in targets for node in gm.graph.find_nodes(op="call_function", target=op)]
    reasons = [f"{x.reason.value}: {x.detail}" for x in declined]
    return reasons, [(x.target.name(), x.kwargs.get("batch_invariant")) for x in nodes]


BOTH = [("tatten::bifurcated_attention", True), ("tatten::tree_merge", True)]


def test_a_prefix_is_read_once() -> None:
    assert run_ranks(2, rewritten, "locals") == [([], BOTH)] * 2


@pytest.mark.skipif(torch.__version__ < "2.12", reason="PyTorch has no rule for SDPA over DTensors on a CPU")
def test_so_is_one_of_dtensors_of_several_placements() -> None:
    assert run_ranks(2, rewritten, "DTensors") == [([], BOTH)] * 2
