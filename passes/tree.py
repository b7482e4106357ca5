"""The tree pass: SDPA over DTensors whose sequence is sharded becomes local attention and a merge over ranks.

The pass wraps the others. They match the local parts of query, keys and values as plain tensors, or segments that are
DTensors of several placements; the parts that a match needs are then inserted into the graph, an op attends to them,
and its state is merged over the mesh dims that shard the sequence.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.fx import Node

from tatten.ops.distributed.collectives import group_size_and_rank
from tatten.ops.distributed.tree_merge import fastest
from tatten.ops.layout import BATCH, HEAD_DIM, HEADS, LENGTH
from tatten.ops.states import accumulator_dtype
from tatten.passes.bifurcated import BifurcatedMatch
from tatten.passes.calls import op_name
from tatten.passes.drafts import Drafting, Drafts, dtensor_of
from tatten.passes.latents import LatentMatch, match_latents
from tatten.passes.local import FromLocal, chunk, local_input, local_mask, stripe
from tatten.passes.masks import Masks
from tatten.passes.match import AnyMatch, Match
from tatten.passes.plain import PlainCall
from tatten.passes.reasons import Decline, Reason
from tatten.passes.replace import Inserter, item, with_strides_of
from tatten.passes.sdpa import SDPA_TARGETS, SdpaCall
from tatten.passes.segments import Cut, cuts_behind, find_segments, segments_behind
from tatten.passes.stored import Stored, peel_heads
from tatten.passes.symbolic import FakeTensor, held, known_equal, tensor_of

if TYPE_CHECKING:
    from tatten.ops.distributed.placement import Segment, Sharding


def find_sharded(call: SdpaCall, masks: Masks) -> MergedCall | Decline | None:
    """Return the call with its sharding, or None for plain tensors and for DTensors that are left to PyTorch.

    A Decline says why segments of several placements are left to PyTorch.
    """
    query, key, value, mask = (tensor_of(x) for x in (call.query, call.key, call.value, call.attn_mask))
    if query is None or key is None or value is None or (mask is None) != (call.attn_mask is None):
        return None
    given = [x for x in (query, key, value) if not isinstance(x, FakeTensor)]  # hasattr is slow on a fake tensor
    if not any(hasattr(x, "placements") for x in given):
        return None
    from tatten.ops.distributed.placement import find_segment_sharding, find_sharding  # DTensor takes seconds to import

    sharding = find_sharding(query, key, value, mask)
    if sharding is not None:
        return ShardedCall(call, masks, sharding)
    keys, values = find_segments(call.key), find_segments(call.value)
    if len(keys) == 1 or len(keys) != len(values):
        return None
    result = tensor_of(call.result)
    assert result is not None
    found = find_segment_sharding(query, result, _placed(keys), _placed(values), mask)
    if isinstance(found, str):
        return Decline(Reason.PLACEMENT, found)
    return SegmentedCall(call, masks, found, keys, values)


def _placed(segments: tuple[Stored, ...]) -> list[Segment]:
    return [(tensor, x.dims) for x in segments if (tensor := tensor_of(x.base)) is not None]


@dataclass(frozen=True)
class MergedCall(PlainCall):
    """An SDPA call on DTensors that becomes local attention, merged over ranks."""

    masks: Masks
    sharding: Sharding

    @property
    def note(self) -> str:
        names = self.sharding.mesh.mesh_dim_names
        dims = ", ".join(repr(names[dim]) if names else str(dim) for dim in self.sharding.merge_dims)
        return f"local, then merged over mesh dim{'s' * (len(self.sharding.merge_dims) > 1)} {dims}"

    def check(self) -> Decline | None:
        """Return the reason why attention that isn't SDPA can't be merged, or None: `find_sharded` checked the rest."""
        from tatten.ops.distributed.placement import belongs_to_heads

        call, result, sinks = self.call, tensor_of(self.call.result), tensor_of(self.call.sinks)
        placed = getattr(result, "placements", None)
        if call.node.target not in SDPA_TARGETS and placed != self.sharding.out:
            return Decline(Reason.PLACEMENT, f"the result is placed as {placed}, query as {self.sharding.out}")
        if call.window is not None:
            return Decline(Reason.WINDOW, f"a window of {call.window} over keys of which each rank has some")
        if sinks is not None and not belongs_to_heads(sinks, self.sharding):
            placed = getattr(sinks, "placements", None)
            return Decline(Reason.PLACEMENT, f"sinks are placed as {placed}, query as {self.sharding.out}")
        return None

    def local(self) -> SdpaCall:
        """Return the call with drafts for the local parts of query, mask and sinks."""
        call, drafts = self.call, self.masks.drafts
        mask = None if call.attn_mask is None else self.masks.first_view(call.attn_mask)
        return dataclasses.replace(
            call,
            query=drafts.local_part(call.query),
            attn_mask=None if mask is None else local_mask(drafts, mask, self.sharding),
            sinks=self._local_sinks(),
        )

    def _local_sinks(self) -> Node | None:
        """Draft the local part of the sinks on the first of the ranks that are merged: each counts once."""
        sinks, mesh = self.call.sinks, self.sharding.mesh
        if sinks is None or any(mesh.get_local_rank(dim) != 0 for dim in self.sharding.merge_dims):
            return None
        return sinks if isinstance(tensor_of(sinks), FakeTensor) else self.masks.drafts.local_part(sinks)

    def output(self, state: Node, out: Node | None = None) -> Node:
        """Insert a merge over each mesh dim, the last (inner) one first, and return the output, placed as SDPA's was.

        Users that only take the local part of SDPA's DTensor get it directly; if all do, no DTensor is made.
        """
        call, graph, invariant = self.call, state.graph, bool(state.kwargs.get("batch_invariant"))
        like = held(tensor_of(call.result))
        lse = like.new_empty(like.shape[:-1], dtype=accumulator_dtype(like.dtype))
        with graph.inserting_before(call.node):
            out = item(state, 0) if out is None else out
            for group in self.sharding.groups:
                ranks, rank = group_size_and_rank(group)
                strategy = fastest(like, lse, group, ranks, batch_invariant=invariant)
                args = out, item(state, 1), group, ranks, rank, strategy
                merge = torch.ops.tatten.tree_merge.default
                state = graph.call_function(merge, args, {"batch_invariant": True} if invariant else None)
                out = item(state, 0)
            out.meta.update({**call.shown.meta, "example_value": like})
            out = with_strides_of(Inserter(call.shown), out, like)
            dtensor = next(node for node, draft in call.replaced.items() if draft is call.result)
            for user in list(dtensor.users):
                if op_name(user) == "to_local" and user.args == (dtensor,) and not user.kwargs:
                    user.replace_all_uses_with(out)
                    graph.erase_node(user)
            if dtensor.users:
                out = graph.call_function(FromLocal(self.sharding), (out,))
                out.meta.update(dtensor.meta)
        return out


@dataclass(frozen=True)
class ShardedCall(MergedCall):
    """An SDPA call whose keys are sharded over the sequence; the matchers see local parts."""

    def seen(self) -> SdpaCall:
        key, value = map(self.masks.drafts.local_part, (self.call.key, self.call.value))
        return dataclasses.replace(self.local(), key=key, value=value)

    def segments(self, whole: Node, rows: bool = True) -> tuple[Stored, ...]:
        """Return the segments of the local part of `whole`: as the graph made it, if it did, else one."""
        stored, local = self._stored(whole, rows)
        return (stored,) if local is None else segments_behind(stored, local, rows)

    def cuts(self, whole: Node) -> tuple[Cut, ...]:
        """Return the segments of the local part of `whole` as the graph made it; none if it didn't."""
        stored, local = self._stored(whole, rows=False)
        return () if local is None else cuts_behind(stored, local)

    def _stored(self, whole: Node, rows: bool) -> tuple[Stored, Node | None]:
        """The local part of what `whole` is stored as, and the node that the graph made it of, if it did."""
        best, *others = find_segments(whole, rows)
        drafts = self.masks.drafts
        stored = Stored(drafts.local_part(whole)) if others else _local(best, whole, drafts)
        dtensor = None if stored.shared else dtensor_of(stored.base)
        return stored, None if dtensor is None else local_input(dtensor)

    def in_one(self, whole: Node, segments: tuple[Stored, ...]) -> Stored:
        return _local(peel_heads(whole), whole, self.masks.drafts)

    def latents(self, batch_invariant: bool) -> LatentMatch | Decline | None:
        """Match local keys and values that DTensors are made of, and are expanded from latents."""
        key, value = local_input(self.call.key), local_input(self.call.value)
        if key is None or value is None:
            return match_latents(self.call, batch_invariant)
        call = dataclasses.replace(self.local(), key=key, value=value)
        return match_latents(call, batch_invariant, (self.call.key, self.call.value))

    def weighs(self, match: Match) -> bool:
        """Whether a rewrite has to pay: one of tensors behind the local part does, which another can read as it is.

        One of the local part itself does not: PyTorch would gather the keys of all ranks.
        """
        return all(dtensor_of(x.base) is None for x in match.keys)


@dataclass(frozen=True)
class SegmentedCall(MergedCall):
    """An SDPA call whose keys are concatenated of DTensors, of which some are sharded over the sequence.

    PyTorch gathers those to concatenate them. Here each rank attends to its part of each segment instead. A segment
    that is replicated over a mesh dim where others are sharded is divided among its ranks: each key counts once.
    """

    keys: tuple[Stored, ...]
    values: tuple[Stored, ...]
    in_one_piece: ClassVar[bool] = False

    def segments(self, whole: Node, rows: bool = True) -> tuple[Stored, ...]:
        return self.keys if whole is self.call.key else self.values

    def weighs(self, match: Match) -> bool:
        return False

    def insert(self, match: AnyMatch) -> AnyMatch:
        """Insert the local parts of the query, the segments, and the columns of the mask for them."""
        assert isinstance(match, BifurcatedMatch)
        masks = self.masks
        call = masks.cast(masks.drafts.operands(self.local()))
        columns = masks.columns(call, self.keys)
        with self.call.node.graph.inserting_before(self.call.node):
            columns = [self._own_columns(call, x, stored) for x, stored in zip(columns, self.keys, strict=True)]
            keys, values = (tuple(map(self._own, stored)) for stored in (self.keys, self.values))
        return dataclasses.replace(match, call=call, keys=keys, values=values, columns=tuple(columns))

    def _own(self, stored: Stored) -> Stored:
        """Insert this rank's part of a segment."""
        drafts, place = self.masks.drafts, self.call.node
        local = dataclasses.replace(stored, base=drafts.insert(drafts.local_part(stored.base), place))
        draft = stripe(Drafting(drafts, place), local.as_attention_takes_it(), LENGTH, *self._divided(stored))
        base = drafts.insert(draft, place)
        return dataclasses.replace(stored, base=base, dims=(BATCH, HEADS, LENGTH, HEAD_DIM), overlaid=False)

    def _own_columns(self, call: SdpaCall, columns: Node | None, stored: Stored) -> Node | None:
        """Insert the columns of the mask for this rank's part of a segment; layers that share a mask share them."""
        mask, base = tensor_of(call.attn_mask), tensor_of(stored.base)
        if columns is None or mask is None or known_equal(mask.shape[-1], 1):
            return columns
        columns.meta.setdefault("example_value", mask.new_empty((*mask.shape[:-1], stored.size(LENGTH))))
        placements, mesh = base.placements, self.sharding.mesh  # type: ignore[union-attr]
        node, draft = columns, Drafting(self.masks.drafts, self.call.node)
        for dim in sorted(self.sharding.merge_dims):
            if placements[dim].is_shard():
                node = chunk(draft, node, mask.dim() - 1, mesh.size(dim), mesh.get_local_rank(dim))
        node = stripe(draft, node, mask.dim() - 1, *self._divided(stored))
        return self.masks.drafts.insert(node, self.call.node)

    def _divided(self, stored: Stored) -> tuple[int, int]:
        """Among how many ranks a segment is divided, though each of them holds it; and which of them this one is."""
        tensor: Any = tensor_of(stored.base)
        mesh, ranks, rank = self.sharding.mesh, 1, 0
        for dim in sorted(self.sharding.merge_dims):
            if tensor.placements[dim].is_replicate():
                ranks, rank = ranks * mesh.size(dim), rank * mesh.size(dim) + mesh.get_local_rank(dim)
        return ranks, rank


def _local(stored: Stored, whole: Node, drafts: Drafts) -> Stored:
    """The local part of what is stored, if it is sharded as `whole` is, else that of `whole`."""
    from tatten.ops.distributed.placement import same_sharding

    tensor, base = tensor_of(whole), tensor_of(stored.base)
    assert tensor is not None
    assert base is not None
    if same_sharding(tensor, base, stored.dims):
        return dataclasses.replace(stored, base=drafts.local_part(stored.base))
    return Stored(drafts.local_part(whole))
