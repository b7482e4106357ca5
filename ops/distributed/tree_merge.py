"""Merging the attention states of several ranks, each over its own part of the keys (Tree Attention, arXiv 2408.04093).

What travels is one state per query and head, so the bytes do not depend on the length of the context.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tatten.ops.distributed.collectives import all_gather, all_reduce, all_to_all, group_size_and_rank, reduce_scatter
from tatten.ops.distributed.push import push_unsupported_reason
from tatten.ops.states import NEG_INF, merge
from tatten.ops.validation import check_states, check_tensors

STRATEGIES = ("auto", "all_reduce", "all_gather", "push")

# Up to this many bytes of a rank's state one kernel that pushes takes less than the others. On 2 H200s it took 8.2 us
# against 34.7 of all_gather for 1.1 MB, and 31.8 against 43.0 for 4.3 MB: the lines through these meet at 6.6 MB.
# With more ranks, of which nothing was measured, all_gather has the more to send.
PUSH_BYTES = 6_000_000

# Up to this many gathered bytes one collective of everything takes less than three of reduced data: a prototype on 8
# H200s took 47 against 67 us for 2.1 MB, 95 against 85 us for 8.4 MB. More is gathered where it is no more to send than
# what is reduced, as with 2 ranks (measured: 43 against 119 us for 8.5 MB) and up to 4 in bfloat16 (not measured).
GATHER_BYTES = 6_000_000

State = tuple[Tensor, Tensor]


def tree_merge(
    out: Tensor,
    lse: Tensor,
    mesh_or_group: DeviceMesh | ProcessGroup | str,
    *,
    strategy: str = "auto",
    scatter_heads: bool = False,
) -> State:
    """Merge the attention states that the ranks of a group hold, each over its own keys: `merge_states` across ranks.

    A collective: all ranks call it with the same shapes, in the same order. A rank without keys takes part, with lse
    -inf. A state whose lse is -inf, +inf or NaN is empty, whatever its `out` holds.

    Args:
        out: `[batch, heads, q_length, head_dim]`; without `scatter_heads` any `[..., head_dim]`.
        lse: `out.shape[:-1]`, natural logarithm, float32 (float64 for float64 `out`).
        mesh_or_group: a process group or its name; or a DeviceMesh, over whose dims states are merged one after the
            other, the last (inner) first, so that of `("node", "gpu")` merged states cross between nodes.
        strategy: "all_reduce": Algorithm 3 of the paper, three collectives (max, sum, sum). "all_gather": one
            collective of `out` in its dtype and the lse, then one merge in the order of ranks. "push": one kernel over
            symmetric memory, on CUDA within a node. "auto": by size and by what there is. What is named never falls
            back, but where there is nothing to send: in a group of one, and for states without rows.
        scatter_heads: rank r of n gets heads `r * heads / n ... (r + 1) * heads / n - 1` only, and less is sent.

    Returns:
        `(out, lse)` of the same dtypes, and of the same shapes but for scattered heads. With "all_gather" and "push"
        equal to the bit on all ranks.

    Raises:
        TypeError, ValueError: shapes, dtypes, devices, the strategy or the group do not fit.
        NotImplementedError: gradients are wanted, or "push" can't do this; the message says why.
    """
    check_tensors(out=out, lse=lse)
    for name, x in (("out", out), ("lse", lse)):
        if hasattr(x, "to_local"):
            raise TypeError(f"`{name}` must be a plain tensor, got a {type(x).__name__}: pass its `.to_local()`")
    groups = _group_names(mesh_or_group)
    if scatter_heads and len(groups) > 1:
        raise ValueError(f"`mesh_or_group` must have one dim to scatter heads over, got a mesh with {len(groups)}")
    # One node in a graph. In eager mode its collectives are called as such, where modes that count them can see them.
    merge_one = torch.ops.tatten.tree_merge.default if torch.compiler.is_compiling() else tree_merge_op
    for group in groups:
        out, lse = merge_one(out, lse, group, *group_size_and_rank(group), strategy, scatter_heads)
    return out, lse


def _group_names(mesh_or_group: DeviceMesh | ProcessGroup | str) -> list[str]:
    """The groups to merge over in turn."""
    if isinstance(mesh_or_group, str):
        return [mesh_or_group]
    if isinstance(mesh_or_group, ProcessGroup):
        return [mesh_or_group.group_name]
    if isinstance(mesh_or_group, DeviceMesh):
        if mesh_or_group.get_coordinate() is None:
            raise ValueError(f"`mesh_or_group` must have this rank, got {mesh_or_group}")
        return [mesh_or_group.get_group(dim).group_name for dim in reversed(range(mesh_or_group.ndim))]
    wanted = "a DeviceMesh, a ProcessGroup or the name of one"
    raise TypeError(f"`mesh_or_group` must be {wanted}, got {type(mesh_or_group).__name__}")


def tree_merge_op(
    out: Tensor, lse: Tensor, group: str, n: int, rank: int, strategy: str, scatter_heads: bool = False
) -> State:
    """`tatten::tree_merge`: `tree_merge` over one group. It decomposes, so that Inductor sees collectives and merge."""
    check_states("tree_merge", out, lse)
    if strategy not in STRATEGIES:
        raise ValueError(f"`strategy` must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    if scatter_heads and (out.dim() != 4 or out.shape[1] % n):
        wanted = f"[batch, heads, q_length, head_dim] with heads divisible by {n} ranks"
        raise ValueError(f"`out` must be {wanted} to be scattered, got shape {tuple(out.shape)}")
    if n == 1 or lse.numel() == 0:
        out, lse = (x.chunk(n, dim=1)[0] if scatter_heads else x for x in (out, lse))
        return merge(out.unsqueeze(0), lse.unsqueeze(0))
    if strategy == "auto":
        strategy = fastest(out, lse, group, n, scatter_heads)
    if strategy == "push":
        reason = push_unsupported_reason(out, lse, group)
        if reason is not None:
            raise NotImplementedError(f"`strategy` 'push' can't merge this: {reason}")
        merged: State = torch.ops.tatten.push_merge.default(out, lse, group, scatter_heads)
        return merged
    if strategy == "all_gather":
        return _all_gather(out, lse, group, n, scatter_heads)
    return _all_reduce(out, lse, group, n, rank, scatter_heads)


def fastest(out: Tensor, lse: Tensor, group: str, n: int, scatter_heads: bool = False) -> str:
    """The strategy that was measured to be the fastest for this payload, of those that this group can do."""
    payload = out.numel() * out.element_size() + lse.numel() * lse.element_size()
    if payload <= PUSH_BYTES and push_unsupported_reason(out, lse, group) is None:
        return "push"
    if scatter_heads:  # each rank gets its part of the payload only, in one collective
        return "all_gather"
    reduced = 2 * lse.element_size() * (out.numel() + 2 * lse.numel())  # goes around twice
    return "all_gather" if n * payload <= GATHER_BYTES or n * payload <= reduced else "all_reduce"


def _all_reduce(out: Tensor, lse: Tensor, group: str, n: int, rank: int, scatter_heads: bool) -> State:
    """Algorithm 3 of the paper: the largest lse, then numerators and denominators relative to it."""
    lse = torch.where(lse < math.inf, lse, NEG_INF)  # NaN compares false
    largest = all_reduce(lse, "max", group)
    weights = torch.exp(lse - torch.where(largest == NEG_INF, 0.0, largest)).unsqueeze(-1)
    # An empty state's out may be NaN, and NaN * 0 is NaN: select before multiplying.
    values = torch.where(weights > 0, weights * out.to(weights.dtype), 0.0)
    if scatter_heads:
        largest = largest.chunk(n, dim=1)[rank]
        total, values = (_unpile(reduce_scatter(_pile(x, n), n, group), x, n) for x in (weights, values))
    else:
        total, values = (all_reduce(x.contiguous(), "sum", group) for x in (weights, values))
    merged = values / torch.where(total == 0, 1.0, total)
    return merged.to(out.dtype), largest + torch.log(total.squeeze(-1))


def _all_gather(out: Tensor, lse: Tensor, group: str, n: int, scatter_heads: bool) -> State:
    """One collective of packed states, `all_to_all` if each rank needs its heads only, and one merge."""
    if scatter_heads:
        outs, lses = (x.unflatten(1, (n, -1)).movedim(1, 0) for x in (out, lse))
        return merge(*_unpack(all_to_all(_pack(outs, lses), n, group), outs, lses))
    outs, lses = out.unsqueeze(0), lse.unsqueeze(0)
    return merge(*_unpack(all_gather(_pack(outs, lses), n, group), outs, lses))


def _pile(x: Tensor, n: int) -> Tensor:
    """Heads in n blocks, the block first: `[n * batch, heads / n, ...]`."""
    blocks: Tensor = x.unflatten(1, (n, -1))
    return blocks.movedim(1, 0).flatten(0, 1).contiguous()


def _unpile(part: Tensor, x: Tensor, n: int) -> Tensor:
    return part.view(x.shape[0], x.shape[1] // n, *x.shape[2:])


def _pack(outs: Tensor, lses: Tensor) -> Tensor:
    """States `[m, ..., head_dim]` and `[m, ...]` as m rows of bytes: the lse first, so that both are aligned."""
    rows = [x.contiguous().view(x.shape[0], math.prod(x.shape[1:])).view(torch.uint8) for x in (lses, outs)]
    return torch.nn.functional.pad(torch.cat(rows, dim=1), (0, -_row_bytes(outs, lses) % 8))


def _unpack(rows: Tensor, outs: Tensor, lses: Tensor) -> State:
    """The states in rows of `_pack`; `outs` and `lses` are what was packed, for shapes and dtypes."""
    lse_bytes = _row_bytes(lses)
    lse = rows[:, :lse_bytes].view(lses.dtype).view(-1, *lses.shape[1:])
    out = rows[:, lse_bytes : lse_bytes + _row_bytes(outs)].view(outs.dtype).view(-1, *outs.shape[1:])
    return out, lse


def _row_bytes(*tensors: Tensor) -> int:
    return sum(math.prod(x.shape[1:]) * x.element_size() for x in tensors)
