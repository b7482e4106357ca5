"""Attention over a tree of segments that is sharded over a mesh, in both forms that a program can have, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.fx import GraphModule

from tatten.passes import Declined, Rewritten, cost
from tatten.passes.rewrite import rewrite

B, HQ, HKV, D = 4, 8, 2, 16
R, S0, S1, S2, S3 = Replicate(), Shard(0), Shard(1), Shard(2), Shard(3)

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Tree:
    """The same tensors on all ranks: a query, and keys and values of segments with `rows` of `length` tokens."""

    query: Tensor
    segments: list[Pair]
    mask: Tensor | None

    @staticmethod
    def of(*levels: tuple[int, int], mask: str = "none", q_len: int = 1) -> Tree:
        rng = torch.Generator().manual_seed(7)
        query = torch.randn(B, HQ, q_len, D, generator=rng)
        segments = [
            (torch.randn(rows, HKV, n, D, generator=rng), torch.randn(rows, HKV, n, D, generator=rng))
            for rows, n in levels
        ]
        total = sum(n for _, n in levels)
        seen = torch.rand(B, 1, q_len, total, generator=rng) < 0.7
        bias = torch.randn(B, 1, q_len, total, generator=rng).masked_fill(~seen, float("-inf"))
        masks = {"none": None, "bool": seen, "additive": bias, "shared": seen[:1], "2-D": seen[0, 0]}
        return Tree(query, segments, masks[mask])

    def whole(self) -> Tensor:
        """Attention in one process, in float64."""
        key, value = (torch.cat([spread(x) for x in xs], dim=2).double() for xs in zip(*self.segments, strict=True))
        mask = self.mask.double() if self.mask is not None and self.mask.is_floating_point() else self.mask
        return attend(self.query.double(), key, value, mask)

    def own(self, mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[Tensor, list[Pair], Tensor | None]:
        """Return this rank's part if position p is on rank p % n of those that share the sequence."""
        ranks, rank = 1, 0
        for dim, placement in enumerate(placements):
            if placement == S2:
                ranks, rank = ranks * mesh.size(dim), rank * mesh.size(dim) + mesh.get_local_rank(dim)
        heads = [dim for dim, placement in enumerate(placements) if placement == S1]

        def of_rank(x: Tensor) -> Tensor:
            return x.chunk(mesh.size(heads[0]), 1)[mesh.get_local_rank(heads[0])] if heads else x

        start, pairs = 0, []
        for key, value in self.segments:
            first = (rank - start) % ranks
            pairs.append(tuple(of_rank(x)[:, :, first::ranks].contiguous() for x in (key, value)))
            start += key.shape[2]
        mask = None if self.mask is None else self.mask[..., rank::ranks]
        return of_rank(self.query), pairs, mask


def spread(x: Tensor) -> Tensor:
    """Rows for all sequences; of a segment for each sequence, itself."""
    n = B // x.shape[0]
    return x if n == 1 else x.unsqueeze(1).expand(-1, n, -1, -1, -1).flatten(0, 1)


def attend(query: Any, key: Any, value: Any, mask: Any = None) -> Any:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def of_locals(mesh: DeviceMesh, placements: Sequence[Placement]) -> Callable[..., Tensor]:
    """Attention to `from_local` of a `cat` of plain tensors, as caches hand it over.

    Query and mask may be DTensors, and the result is then one.
    """
    queries = [placement if placement == S1 else R for placement in placements]

    def fn(query: Tensor, pairs: list[Pair], mask: Tensor | None) -> Tensor:
        key, value = (
            DTensor.from_local(torch.cat([spread(x) for x in xs], dim=2), mesh, placements, run_check=False)
            for xs in zip(*pairs, strict=True)
        )
        if isinstance(query, DTensor):
            return attend(query, key, value, mask)
        local = DTensor.from_local(query, mesh, queries, run_check=False)
        if mask is not None:
            columns = [Shard(mask.dim() - 1) if placement == S2 else R for placement in placements]
            mask = DTensor.from_local(mask, mesh, columns, run_check=False)
        return attend(local, key, value, mask).to_local()

    return fn


def of_dtensors(query: Tensor, pairs: list[Pair], mask: Tensor | None) -> Any:
    """Attention to a `cat` of DTensors, as a user writes it."""
    key, value = (torch.cat([spread(x) for x in xs], dim=2) for xs in zip(*pairs, strict=True))
    return attend(query, key, value, mask)


def place(
    tree: Tree,
    mesh: DeviceMesh,
    query: Sequence[Placement],
    segments: Sequence[Sequence[Placement]],
    mask: Sequence[Placement] | None = None,
) -> tuple[Tensor, list[Pair], Tensor | None]:
    """The tensors of a tree as DTensors."""

    def put(x: Tensor, placements: Sequence[Placement]) -> Tensor:
        return distribute_tensor(x.contiguous(), mesh, placements)

    pairs = [(put(k, how), put(v, how)) for (k, v), how in zip(tree.segments, segments, strict=True)]
    columns = None if tree.mask is None else put(tree.mask, mask or [R] * mesh.ndim)
    return put(tree.query, query), pairs, columns


@dataclass(frozen=True)
class Outcome:
    """The findings for the calls of a function, and the collectives of its compiled graph."""

    error: float
    findings: list[tuple[str, str]]  # op and note, or reason and detail
    collectives: list[tuple[str, int]]  # name, and bytes of the result

    @property
    def ops(self) -> list[str]:
        return [name for name, _ in self.findings]


def outcome(fn: Callable[..., Any], args: tuple[Any, ...], want: Tensor, dynamic: bool | None = False) -> Outcome:
    """Compile, run and compare; `want` is the whole result, or this rank's if that is a plain tensor."""
    from torch._dynamo.backends.common import aot_autograd

    cost.RATES["cpu"] = cost.Rates(bytes_per_us=1.0, segment_us=0.0)  # a process of its own, without the fixture
    findings: list[tuple[str, str]] = []
    collectives: list[tuple[str, int]] = []

    def collect(gm: GraphModule, _: Any) -> Any:
        for node in gm.graph.nodes:
            if "c10d" in str(node.target) and "wait" not in str(node.target):
                value = node.meta["val"]
                collectives.append((str(node.target).split(".")[1], value.numel() * value.element_size()))
        return gm.forward

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Any:
        for x in rewrite(gm).findings:
            if isinstance(x, Rewritten):
                findings.append((x.op.split(".")[1], x.note))
            else:
                assert isinstance(x, Declined)
                findings.append((x.decline.reason.value, x.decline.detail))
        gm.graph.lint()
        return aot_autograd(fw_compiler=collect)(gm, example_inputs)

    torch._dynamo.reset()
    have = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    have = have.full_tensor() if isinstance(have, DTensor) else have
    return Outcome((have.double() - want).abs().max().item(), findings, collectives)
