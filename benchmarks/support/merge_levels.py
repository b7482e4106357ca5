"""One kernel that merges the attention states of all levels of a tree, whatever their strides."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

State = tuple[Tensor, Tensor]
MAX_STRIDE = 1 << 24  # floats hold integers up to here


@triton.jit
def _states_at(sequence, kv_head, in_group, seqs_per_node, strides, LEVEL: tl.constexpr):
    """Return where a level's states of some heads of a sequence begin, in units of the strides."""
    n = tl.cast(seqs_per_node[LEVEL], tl.int32)
    at = sequence // n * tl.cast(strides[4 * LEVEL], tl.int32) + sequence % n * tl.cast(
        strides[4 * LEVEL + 1], tl.int32
    )
    return (
        at + kv_head * tl.cast(strides[4 * LEVEL + 2], tl.int32) + in_group * tl.cast(strides[4 * LEVEL + 3], tl.int32)
    )


@triton.jit(do_not_specialize=["q_heads"])
def _merge_levels_kernel(
    outs,
    lses,
    seqs_per_node,
    out_strides,
    lse_strides,
    merged,
    q_heads,
    LEVELS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    sequence = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_ok = head < q_heads
    kv_head, in_group = head // GROUP, head % GROUP
    dims = tl.arange(0, DIM)

    lse_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    for level in tl.static_range(LEVELS):
        at = _states_at(sequence, kv_head, in_group, seqs_per_node, lse_strides, level)
        lse_max = tl.maximum(lse_max, tl.load(lses[level] + at, mask=head_ok, other=0.0))
    acc = tl.zeros([BLOCK_H, DIM], tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    for level in tl.static_range(LEVELS):
        at = _states_at(sequence, kv_head, in_group, seqs_per_node, lse_strides, level)
        weight = tl.exp(tl.load(lses[level] + at, mask=head_ok, other=0.0) - lse_max)
        at = _states_at(sequence, kv_head, in_group, seqs_per_node, out_strides, level) * DIM
        out = tl.load(outs[level] + at[:, None] + dims[None, :], mask=head_ok[:, None], other=0.0)
        acc += weight[:, None] * out.to(tl.float32)
        total += weight
    at = (sequence * q_heads + head) * DIM
    tl.store(
        merged + at[:, None] + dims[None, :], (acc / total[:, None]).to(merged.dtype.element_ty), mask=head_ok[:, None]
    )


def index_strides(x: Tensor) -> list[int]:
    """Return the strides of nodes, sequences, kv heads and group; 0 for a size of 1, whose stride may be anything."""
    return [0 if size == 1 else stride for size, stride in zip(x.shape[:4], x.stride(), strict=False)]


def merge_levels(states: Sequence[State]) -> Tensor:
    """Merge each level's `out` `[nodes, sequences, kv_heads, group, d]` and lse, to `[batch, q_heads, 1, d]`."""
    outs, lses = zip(*states, strict=True)
    kv_heads, group, dim = outs[0].shape[2:]
    batch, q_heads = outs[0].shape[0] * outs[0].shape[1], kv_heads * group
    if len(states) == 1:
        return outs[0].reshape(batch, q_heads, 1, dim)
    assert all(out.stride(4) == 1 for out in outs)
    out_rows = [stride / dim for out in outs for stride in index_strides(out)]
    lse_strides = [float(stride) for lse in lses for stride in index_strides(lse)]
    assert all(x == int(x) < MAX_STRIDE for x in (*out_rows, *lse_strides)), (out_rows, lse_strides)
    merged = torch.empty(batch, q_heads, 1, dim, dtype=outs[0].dtype, device=outs[0].device)
    block = min(8, triton.next_power_of_2(q_heads))
    # Sizes are passed as floats, on which Triton does not specialise: otherwise each tree would be compiled anew.
    # Strides of `out` are in rows, so that the compiler knows their alignment.
    _merge_levels_kernel[batch, triton.cdiv(q_heads, block)](
        outs,
        lses,
        tuple(float(out.shape[1]) for out in outs),
        tuple(out_rows),
        tuple(lse_strides),
        merged,
        q_heads,
        LEVELS=len(states),
        GROUP=group,
        DIM=dim,
        BLOCK_H=block,
        num_warps=4,
    )
    return merged


def merge_levels_reference(states: Sequence[State]) -> Tensor:
    """Compute the same by PyTorch's own functions, for a CPU."""
    outs = torch.stack([out.float().flatten(0, 1).flatten(1, 2) for out, _ in states])
    lses = torch.stack([lse.float().flatten(0, 1).flatten(1, 2) for _, lse in states])
    merged = (lses.softmax(0).unsqueeze(-1) * outs).sum(0)
    return merged.to(states[0][0].dtype).unsqueeze(2)
