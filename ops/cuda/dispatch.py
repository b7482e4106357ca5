"""The ops on CUDA: checks and the choice of a provider, done once for tensors of one layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from tatten.ops.cuda.flash_attn import PACKAGES, package_attention
from tatten.ops.cuda.launcher import by_layout, on_device_of
from tatten.ops.cuda.providers import choose_provider, cudnn_attention, flash_attention, unsupported_reason
from tatten.ops.cuda.workload import Workload, needs_of
from tatten.ops.reach import segments_in_window
from tatten.ops.reference import bifurcated_attention_reference, decode_attention_reference
from tatten.ops.row_groups import rows_of, rows_of_segments
from tatten.ops.row_validation import check_rows
from tatten.ops.segment_validation import (
    check_bifurcated_attention,
    check_segments_batch_invariant,
    check_segments_no_grad,
)
from tatten.ops.state_validation import check_stack
from tatten.ops.states import State, merge, merge_each
from tatten.ops.validation import (
    check_batch_invariant,
    check_block_mask,
    check_cuda_head_dims,
    check_decode_attention,
    check_decode_no_grad,
    check_devices,
    check_no_grad,
    check_provider,
)
from tatten.ops.variant import AttentionVariant


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    kv_lens: Tensor | None,
    scale: float | None,
    block_mask: Tensor | None,
    variant: AttentionVariant,
    provider: str,
    batch_invariant: bool,
) -> State:
    check_decode_no_grad(query, key, value, attn_mask, variant)
    given = query, key, value, attn_mask, kv_lens, scale, block_mask, variant
    attend = _plan_decode(*given, provider, current_flash_attention_impl(), batch_invariant)
    return on_device_of(query, attend, query, key, value, attn_mask, kv_lens, block_mask, variant)


@by_layout
def _plan_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    kv_lens: Tensor | None,
    scale: float | None,
    block_mask: Tensor | None,
    variant: AttentionVariant,
    provider: str,
    flash_impl: str | None,
    batch_invariant: bool = False,
) -> Callable[..., State]:
    """Plan a function of query, key, value, attn_mask, kv_lens, block_mask and variant that computes the op.

    `flash_impl` is the current implementation of PyTorch's flash attention: a `Workload` has it, and a plan is for one.
    """
    tensors = {"key": key, "value": value, "attn_mask": attn_mask, "kv_lens": kv_lens, "block_mask": block_mask}
    check_devices(query, **tensors, **variant.tensors)
    check_decode_attention(query, key, value, attn_mask, kv_lens, variant)
    check_cuda_head_dims(query, value)
    check_provider(provider, query.device)
    if block_mask is not None:
        check_block_mask(block_mask, query.shape[0], key.shape[2], query.device)
    scale = query.shape[3] ** -0.5 if scale is None else scale
    work = Workload.of(query, key, value, needs_of(attn_mask, kv_lens, scale, variant))
    if batch_invariant:
        check_batch_invariant(provider, query.device, variant)
        provider = "triton"
    elif provider == "auto":
        provider = choose_provider(work)
    if provider == "reference":
        return lambda q, k, v, mask, lens, _, variant: decode_attention_reference(q, k, v, mask, lens, scale, variant)
    reason = unsupported_reason(provider, work)
    if reason is not None:
        raise NotImplementedError(f"`provider` {provider!r} can't compute this: {reason}")
    if provider in PACKAGES:
        return lambda q, k, v, _, lens, __, variant: package_attention(provider, q, k, v, scale, lens, variant)
    if provider != "triton":
        attend = {"cudnn": cudnn_attention, "flash": flash_attention}[provider]
        return lambda q, k, v, *_: attend(q, k, v, scale)

    from tatten.ops.cuda.decode import plan_attention

    given = query, key, value, attn_mask, kv_lens, scale, block_mask, variant
    return plan_attention(*given, batch_invariant=batch_invariant)


def bifurcated_attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    attn_masks: Sequence[Tensor | None],
    block_masks: Sequence[Tensor | None],
    scale: float | None,
    row_groups: Sequence[Tensor | None] | None,
    variant: AttentionVariant,
    batch_invariant: bool,
) -> State:
    check_segments_no_grad(query, keys, values, attn_masks, variant)
    row_groups = row_groups or [None] * len(keys)
    if batch_invariant or variant.window is not None:
        _check_bifurcated(query, keys, values, attn_masks, block_masks, row_groups, variant)
    if batch_invariant:
        check_segments_batch_invariant(query, keys, row_groups, variant)
    if variant.window is not None:
        segments = list(zip(keys, values, attn_masks, block_masks, strict=True))
        narrowed = segments_in_window(variant.window, query.shape[2], segments)
        keys, values, attn_masks, block_masks = zip(*narrowed, strict=True)
        variant = variant._replace(window=None)
    if batch_invariant or any(x is not None for x in row_groups):
        of_segments = zip(keys, attn_masks, block_masks, row_groups, strict=True)
        shared = len(keys) - 1 if batch_invariant else 0
        block_masks = [_block_mask_of_rows(query, *x, i < shared) for i, x in enumerate(of_segments)]
    flash_impl = current_flash_attention_impl()
    given = query, keys, values, attn_masks, block_masks, row_groups, scale, variant
    attend = _plan_bifurcated(*given, flash_impl, batch_invariant)
    return on_device_of(query, attend, query, keys, values, attn_masks, block_masks, row_groups, variant)


@by_layout
def _plan_bifurcated(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    attn_masks: Sequence[Tensor | None],
    block_masks: Sequence[Tensor | None],
    row_groups: Sequence[Tensor | None],
    scale: float | None,
    variant: AttentionVariant,
    flash_impl: str | None,
    batch_invariant: bool = False,
) -> Callable[..., State]:
    """Plan a function of query, keys, values, attn_masks, block_masks, row_groups and variant that computes the op.

    A window is not in `variant`: segments have been narrowed to it before.
    """
    _check_bifurcated(query, keys, values, attn_masks, block_masks, row_groups, variant)
    check_cuda_head_dims(query, values[0])
    scale = query.shape[3] ** -0.5 if scale is None else scale
    if len(keys) == 1 and keys[0].shape[0] == query.shape[0] and row_groups[0] is None and attn_masks[0] is None:
        options = scale, None, variant, "auto", flash_impl, batch_invariant
        attend = _plan_decode(query, keys[0], values[0], None, None, *options)
        return lambda q, ks, vs, _, __, ___, variant: attend(q, ks[0], vs[0], None, None, None, variant)
    if query.dtype == torch.float64:
        if batch_invariant:
            raise NotImplementedError("`query` must not be float64 with `batch_invariant` on CUDA: no kernel takes it")
        return lambda q, ks, vs, masks, _, groups, variant: _dense(
            bifurcated_attention_reference(q, ks, vs, masks, scale, rows_of_segments(groups, q, ks), variant)
        )

    from tatten.ops.cuda.segments import plan_segments

    given = query, keys, values, attn_masks, block_masks, scale, row_groups, variant
    return plan_segments(*given, batch_invariant=batch_invariant)


def _check_bifurcated(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    attn_masks: Sequence[Tensor | None],
    block_masks: Sequence[Tensor | None],
    row_groups: Sequence[Tensor | None],
    variant: AttentionVariant,
) -> None:
    given = {"keys": keys, "values": values, "attn_masks": attn_masks, "block_masks": block_masks}
    for name, tensors in {**given, "row_groups": row_groups}.items():
        check_devices(query, **{f"{name}[{i}]": x for i, x in enumerate(tensors)})
    check_devices(query, sinks=variant.sinks)
    check_bifurcated_attention(query, keys, values, attn_masks, block_masks, row_groups, variant)


def _block_mask_of_rows(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    block_mask: Tensor | None,
    row_groups: Tensor | None,
    every_block: bool,
) -> Tensor | None:
    """Find the block mask of a segment that has row groups or lists every block, if it needs one and has none."""
    if attn_mask is None or block_mask is not None or key.shape[2] == 0 or not (every_block or row_groups is not None):
        return block_mask
    mask = attn_mask.expand(*attn_mask.shape[:-1], key.shape[2])
    rows = None if row_groups is None else rows_of(row_groups, query, key)
    found: Tensor = torch.ops.tatten.block_mask.default(mask, key.shape[0], rows, every_block)
    return found


def row_groups(rows: Tensor, kv_batch: int, queries: int) -> Tensor:
    return on_device_of(rows, _plan_row_groups(rows, kv_batch, queries), rows)


@by_layout
def _plan_row_groups(rows: Tensor, kv_batch: int, queries: int) -> Callable[[Tensor], Tensor]:
    check_rows(rows)
    from tatten.ops.cuda.row_groups import plan_row_groups

    return plan_row_groups(rows, kv_batch, queries)


def _dense(state: State) -> State:
    return state[0].contiguous(), state[1].contiguous()


def block_list(attn_mask: Tensor, kv_batch: int, every_block: bool = False) -> Tensor:
    return on_device_of(attn_mask, _plan_block_list(attn_mask, kv_batch, every_block), attn_mask)


@by_layout
def _plan_block_list(attn_mask: Tensor, kv_batch: int, every_block: bool = False) -> Callable[[Tensor], Tensor]:
    from tatten.ops.cuda.block_mask import plan_block_list

    return plan_block_list(attn_mask, kv_batch, every_block=every_block)


def merge_states(out: Tensor, lse: Tensor, *, batch_invariant: bool = False) -> State:
    check_no_grad("merge_states", out=out, lse=lse)
    return on_device_of(out, _plan_merge_states(out, lse, batch_invariant), out, lse)


@by_layout
def _plan_merge_states(out: Tensor, lse: Tensor, batch_invariant: bool = False) -> Callable[[Tensor, Tensor], State]:
    """Plan the merge. The kernel always merges each state by itself, in the order of dim 0."""
    check_stack(out, lse)
    if out.dtype == torch.float64 or out.numel() == 0:
        return merge_each if batch_invariant else merge
    from tatten.ops.cuda.merge_states import plan_merge_states

    return plan_merge_states(out, lse)
