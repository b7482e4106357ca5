"""Merge the attention states of several ranks, each over its own part of the keys (Tree Attention, arXiv 2408.04093).

Ranks send one state per query and head, so the bytes do not depend on the length of the context.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tatten.ops.distributed.collectives import all_gather, all_reduce, all_to_all, group_size_and_rank, reduce_scatter
from tatten.ops.distributed.push import push_unsupported_reason
from tatten.ops.state_validation import check_states
from tatten.ops.states import NEG_INF, State, merge
from tatten.ops.validation import check_tensors

STRATEGIES = ("auto", "all_reduce", "all_gather", "push")

# The push kernel is the fastest up to this many bytes of a rank's state. On 2 H200s it took 8.2 us where all_gather
# took 34.7 for 1.1 MB, and 31.8 us against 43.0 for 4.3 MB; extrapolated, they break even at 6.6 MB. More ranks were
# not measured; with them all_gather has even more to send.
PUSH_BYTES = 6_000_000

# One all_gather is faster than three all_reduces up to this many gathered bytes: a prototype on 8 H200s took 47 us
# against 67 for 2.1 MB, and 95 us against 85 for 8.4 MB. Larger states are gathered only if that sends no more bytes
# than reducing them, as with 2 ranks (measured: 43 us against 119 for 8.5 MB) and up to 4 in bfloat16 (not measured).
GATHER_BYTES = 6_000_000


def tree_merge(
    out: Tensor,
    lse: Tensor,
    mesh_or_group: DeviceMesh | ProcessGroup | str,
    *,
    strategy: str = "auto",
    scatter_heads: bool = False,
    batch_invariant: bool = False,
) -> State:
    """Merge the attention states of the ranks of a group, each over its own keys: `merge_states` across ranks.

    It is a collective: all ranks call it with the same shapes, in the same order. A rank without keys takes part, with
    lse -inf. A state whose lse is -inf, +inf or NaN is empty, whatever its `out` holds.

    Args:
        out: `[batch, heads, q_length, head_dim]`; without `scatter_heads` any `[..., head_dim]`.
        lse: `out.shape[:-1]`, natural logarithm, float32 (float64 for float64 `out`).
        mesh_or_group: a process group or its name; or a DeviceMesh, whose dims are merged over one after the other,
            from the last (innermost) to the first: over `("node", "gpu")`, nodes exchange states that their GPUs have
            merged.
        strategy: "all_reduce" is Algorithm 3 of the paper, three collectives (max, sum, sum). "all_gather" is one
            collective of `out` in its dtype and the lse, then one merge in the order of ranks. "push" is one kernel
            over symmetric memory, on CUDA within a node. "auto" chooses by the size and by the strategies that the
            group supports. A named strategy never falls back to another. It is skipped only if nothing has to be sent:
            in a group of one, and for states without rows.
        scatter_heads: return only heads `r * heads / n ... (r + 1) * heads / n - 1` on rank r of n, and send less.
        batch_invariant: make each sequence's result, an index of the first dim, bitwise independent of the other
            sequences and of their number. "auto" is then "push" if the group supports it, else "all_gather";
            "all_reduce" is an error. It is for states that `decode_attention(batch_invariant=True)` returned.

    Returns:
        `(out, lse)` with the dtypes and, unless heads are scattered, the shapes of the arguments. They are bitwise
        equal on all ranks with "all_gather" and "push".

    Raises:
        TypeError, ValueError: shapes, dtypes, devices, the strategy or the group do not fit.
        NotImplementedError: gradients are required, or "push" does not support this; the message says why.

    Examples:
        >>> import torch, tatten, torch.distributed as dist
        >>> n, rank = dist.get_world_size(), dist.get_rank()  # under torchrun, after dist.init_process_group()
        >>> _ = torch.manual_seed(0)  # the same tensors on all ranks
        >>> query, (key, value) = torch.randn(1, 8, 1, 64), torch.randn(2, 1, 2, 4096, 64)
        >>> part = slice(4096 * rank // n, 4096 * (rank + 1) // n)  # the keys of this rank
        >>> state = tatten.decode_attention(query, key[:, :, part], value[:, :, part], return_lse=True)
        >>> out, lse = tatten.tree_merge(*state, dist.group.WORLD)
        >>> torch.allclose(out, tatten.decode_attention(query, key, value), atol=1e-5)
        True
    """
    check_tensors(out=out, lse=lse)
    for name, x in (("out", out), ("lse", lse)):
        if hasattr(x, "to_local"):
            raise TypeError(f"`{name}` must be a plain tensor, got a {type(x).__name__}: pass its `.to_local()`")
    groups = _group_names(mesh_or_group)
    if scatter_heads and len(groups) > 1:
        raise ValueError(f"`mesh_or_group` must have one dim to scatter heads over, got a mesh with {len(groups)} dims")
    # The op is one node of a graph. Eager mode calls the collectives directly, so that modes such as CommDebugMode see
    # them.
    merge_one = torch.ops.tatten.tree_merge.default if torch.compiler.is_compiling() else tree_merge_op
    for group in groups:
        out, lse = merge_one(out, lse, group, *group_size_and_rank(group), strategy, scatter_heads, batch_invariant)
    return out, lse


def _group_names(mesh_or_group: DeviceMesh | ProcessGroup | str) -> list[str]:
    """Return the names of the groups to merge over, in order."""
    if isinstance(mesh_or_group, str):
        return [mesh_or_group]
    if isinstance(mesh_or_group, ProcessGroup):
        return [mesh_or_group.group_name]
    if isinstance(mesh_or_group, DeviceMesh):
        if mesh_or_group.get_coordinate() is None:
            raise ValueError(f"`mesh_or_group` must contain this rank, got {mesh_or_group}")
        return [mesh_or_group.get_group(dim).group_name for dim in reversed(range(mesh_or_group.ndim))]
    wanted = "a DeviceMesh, a ProcessGroup or the name of one"
    raise TypeError(f"`mesh_or_group` must be {wanted}, got {type(mesh_or_group).__name__}")


def tree_merge_op(
    out: Tensor,
    lse: Tensor,
    group: str,
    n: int,
    rank: int,
    strategy: str,
    scatter_heads: bool = False,
    batch_invariant: bool = False,
) -> State:
    """Merge over one group: `tatten::tree_merge`, which decomposes so that Inductor sees collectives and merge."""
    check_states("tree_merge", out, lse)
    if strategy not in STRATEGIES:
        raise ValueError(f"`strategy` must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    if batch_invariant and strategy == "all_reduce":
        raise ValueError(
            "`strategy` must be 'auto', 'push' or 'all_gather' with `batch_invariant`, got 'all_reduce': "
            "the order in which it adds up ranks depends on the size"
        )
    if scatter_heads and (out.dim() != 4 or out.shape[1] % n):
        wanted = f"[batch, heads, q_length, head_dim] with heads divisible by {n} ranks"
        raise ValueError(f"`out` must be {wanted} to be scattered, got shape {tuple(out.shape)}")
    if n == 1 or lse.numel() == 0:
        out, lse = (x.chunk(n, dim=1)[0] if scatter_heads else x for x in (out, lse))
        return merge(out.unsqueeze(0), lse.unsqueeze(0))
    if strategy == "auto":
        strategy = fastest(out, lse, group, n, scatter_heads, batch_invariant)
    if strategy == "push":
        reason = push_unsupported_reason(out, group)
        if reason is not None:
            raise NotImplementedError(f"`strategy` 'push' does not support this merge: {reason}")
        merged: State = torch.ops.tatten.push_merge.default(out, lse, group, scatter_heads)
        return merged
    if strategy == "all_gather":
        return _all_gather(out, lse, group, n, scatter_heads, batch_invariant)
    return _all_reduce(out, lse, group, n, rank, scatter_heads)


def fastest(
    out: Tensor, lse: Tensor, group: str, n: int, scatter_heads: bool = False, batch_invariant: bool = False
) -> str:
    """Return the strategy that was measured to be fastest for this payload, of those that the group supports.

    With `batch_invariant` it is the same for payloads of all sizes.
    """
    payload = out.numel() * out.element_size() + lse.numel() * lse.element_size()
    if (batch_invariant or payload <= PUSH_BYTES) and push_unsupported_reason(out, group) is None:
        return "push"
    if scatter_heads or batch_invariant:  # with scattered heads it is an all-to-all: each rank gets only its part
        return "all_gather"
    reduced = 2 * lse.element_size() * (out.numel() + 2 * lse.numel())  # an all-reduce sends everything twice
    return "all_gather" if n * payload <= GATHER_BYTES or n * payload <= reduced else "all_reduce"


def _all_reduce(out: Tensor, lse: Tensor, group: str, n: int, rank: int, scatter_heads: bool) -> State:
    """Run Algorithm 3 of the paper: reduce the largest lse, then numerators and denominators relative to it."""
    lse = torch.where(lse < math.inf, lse, NEG_INF)  # NaN compares false
    max_lse = all_reduce(lse, "max", group)
    weights = torch.exp(lse - torch.where(max_lse == NEG_INF, 0.0, max_lse)).unsqueeze(-1)
    # An empty state's out may be NaN, and NaN * 0 is NaN: select before multiplying.
    values = torch.where(weights > 0, weights * out.to(weights.dtype), 0.0)
    if scatter_heads:
        max_lse = max_lse.chunk(n, dim=1)[rank]
        total, values = (_unstack_heads(reduce_scatter(_stack_heads(x, n), n, group), x, n) for x in (weights, values))
    else:
        total, values = (all_reduce(x.contiguous(), "sum", group) for x in (weights, values))
    merged = values / torch.where(total == 0, 1.0, total)
    return merged.to(out.dtype), max_lse + torch.log(total.squeeze(-1))


def _all_gather(out: Tensor, lse: Tensor, group: str, n: int, scatter_heads: bool, batch_invariant: bool) -> State:
    """Merge by one collective of packed states: `all_to_all` if each rank needs only its own heads.

    With `batch_invariant` the merge is an op, as Inductor's code for `merge` depends on the size.
    """
    merge_all: Callable[..., State] = merge
    if batch_invariant:
        merge_all = functools.partial(torch.ops.tatten.merge_states.default, batch_invariant=True)
    if scatter_heads:
        outs, lses = (x.unflatten(1, (n, -1)).movedim(1, 0) for x in (out, lse))
        return merge_all(*_unpack(all_to_all(_pack(outs, lses), n, group), outs, lses))
    outs, lses = out.unsqueeze(0), lse.unsqueeze(0)
    return merge_all(*_unpack(all_gather(_pack(outs, lses), n, group), outs, lses))


def _stack_heads(x: Tensor, n: int) -> Tensor:
    """Split the heads into n blocks and stack the blocks: `[n * batch, heads / n, ...]`."""
    blocks: Tensor = x.unflatten(1, (n, -1))
    return blocks.movedim(1, 0).flatten(0, 1).contiguous()


def _unstack_heads(part: Tensor, x: Tensor, n: int) -> Tensor:
    return part.view(x.shape[0], x.shape[1] // n, *x.shape[2:])


def _pack(outs: Tensor, lses: Tensor) -> Tensor:
    """Pack states `[m, ..., head_dim]` and `[m, ...]` into m rows of bytes, the lse first so that both are aligned."""
    rows = [x.contiguous().view(x.shape[0], math.prod(x.shape[1:])).view(torch.uint8) for x in (lses, outs)]
    return torch.nn.functional.pad(torch.cat(rows, dim=1), (0, -_row_bytes(outs, lses) % 8))


def _unpack(rows: Tensor, outs: Tensor, lses: Tensor) -> State:
    """Unpack the rows of `_pack`. `outs` and `lses` give the shapes and dtypes."""
    lse_bytes = _row_bytes(lses)
    lse = rows[:, :lse_bytes].view(lses.dtype).view(-1, *lses.shape[1:])
    out = rows[:, lse_bytes : lse_bytes + _row_bytes(outs)].view(outs.dtype).view(-1, *outs.shape[1:])
    return out, lse


def _row_bytes(*tensors: Tensor) -> int:
    return sum(math.prod(x.shape[1:]) * x.element_size() for x in tensors)
