"""The ops on CUDA: check the arguments and make a plan, once for tensors of one layout.

The plan of an attention op includes the choice of a provider.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from tatten.ops.call import BIFURCATED, LATENT, Attend, AttentionCall, KeyValue
from tatten.ops.cuda.flash_attn import PACKAGES, package_attention
from tatten.ops.cuda.latent import plan_latents
from tatten.ops.cuda.launcher import by_layout, on_device_of
from tatten.ops.cuda.providers import choose_provider, cudnn_attention, flash_attention, unsupported_reason
from tatten.ops.cuda.workload import Workload, needs_of
from tatten.ops.latent_validation import (
    check_latent_attention,
    check_latent_batch_invariant,
    check_latent_widths_on_cuda,
)
from tatten.ops.pages import sharing
from tatten.ops.pages_validation import check_table_alone
from tatten.ops.picks_validation import check_picks
from tatten.ops.reach import within_window
from tatten.ops.reference import attention_reference
from tatten.ops.row_groups import rows_of
from tatten.ops.segment_validation import check_bifurcated_attention, check_segments_batch_invariant
from tatten.ops.state_validation import check_stack
from tatten.ops.states import State, merge, merge_each
from tatten.ops.validation import (
    check_batch_invariant,
    check_call_no_grad,
    check_cuda_head_dims,
    check_decode_attention,
    check_devices,
    check_no_grad,
    check_provider,
    check_rows,
)


def attention(call: AttentionCall) -> State:
    """Compute any of the attention ops, and return its state."""
    check_call_no_grad(call)
    if call.op == BIFURCATED and not call.has_picks:
        call = _prepare_segments(call)
    return on_device_of(call.query, _plan(current_flash_attention_impl(), *call), call)


def _prepare_segments(call: AttentionCall) -> AttentionCall:
    """Apply the window to the segments, and find the block masks that the kernels need.

    Kernels need them for segments with row groups and, with `batch_invariant`, for all segments but the last. Block
    masks of the call are kept where they still hold.
    """
    has_rows = any(x.row_groups is not None for x in call.segments)
    if not (has_rows or call.batch_invariant or call.window is not None):
        return call
    check_devices(**call.tensors)
    check_bifurcated_attention(call)
    if call.batch_invariant:
        check_segments_batch_invariant(call)
    call = within_window(call)
    if not (has_rows or call.batch_invariant):
        return call
    shared = len(call.segments) - 1 if call.batch_invariant else 0
    segments = [_with_block_mask(call.query, x, i < shared) for i, x in enumerate(call.segments)]
    return call._replace(segments=tuple(segments))


def _with_block_mask(query: Tensor, stored: KeyValue, every_block: bool) -> KeyValue:
    """Find the block mask of a segment with row groups or `every_block`, if it has a mask and no block mask.

    With `every_block`, empty blocks are listed too.
    """
    mask, groups, kv_batch, kv_len = stored.attn_mask, stored.row_groups, stored.key.shape[0], stored.key.shape[2]
    if mask is None or stored.block_mask is not None or kv_len == 0 or not (every_block or groups is not None):
        return stored
    mask = mask.expand(*mask.shape[:-1], kv_len)
    data = torch.ops.tatten.block_mask.default(mask, kv_batch, rows_of(query, stored), every_block)
    return stored._replace(block_mask=data)


@by_layout
def _plan(flash_impl: str | None, *fields: Any) -> Attend:
    """Plan a function that computes the op for calls whose fields have this layout.

    `flash_impl` is the active implementation of PyTorch's flash attention. The choice of a provider depends on it
    (`Workload.flash_impl`), so each implementation has a plan of its own.
    """
    call = AttentionCall(*fields)
    check_devices(**call.tensors)
    if call.has_picks:
        return _plan_picks(call)
    if call.op == LATENT:
        return plan_latents(call)
    return _plan_segments(call) if call.op == BIFURCATED else _plan_decode(call)


def _plan_decode(call: AttentionCall) -> Attend:
    query, (stored,), provider = call.query, call.segments, call.provider
    check_decode_attention(call)
    check_cuda_head_dims(query, stored.value)
    check_provider(provider, query.device)
    work = Workload.of(query, stored.key, stored.value, needs_of(call))
    if call.batch_invariant:
        check_batch_invariant(call)
        provider = "triton"
    elif provider == "auto":
        provider = choose_provider(work)
    if provider == "reference":
        return attention_reference
    reason = unsupported_reason(provider, work)
    if reason is not None:
        raise NotImplementedError(f"`provider` {provider!r} can't compute this: {reason}")
    if provider in PACKAGES:
        return lambda call: package_attention(provider, call)
    if provider != "triton":
        return {"cudnn": cudnn_attention, "flash": flash_attention}[provider]

    if sharing(call) is not None and query.shape[0] > 1:
        from tatten.ops.cuda.shared_attention import plan_shared_attention

        return plan_shared_attention(call)
    from tatten.ops.cuda.decode import plan_attention

    # Shared pages that the call can't use would leave its work tiles without lanes.
    return plan_attention(call._replace(segments=(stored._replace(shared_pages=None),)))


def _plan_segments(call: AttentionCall) -> Attend:
    """Plan a call whose window `_prepare_segments` has applied."""
    check_bifurcated_attention(call)
    query, first = call.query, call.segments[0]
    check_cuda_head_dims(query, first.value)
    one_plain_segment = len(call.segments) == 1 and first.row_groups is None and first.attn_mask is None
    if one_plain_segment and first.key.shape[0] == query.shape[0]:
        return _plan_decode(call)
    if query.dtype == torch.float64:
        if call.batch_invariant:
            raise NotImplementedError("`query` must not be float64 with `batch_invariant` on CUDA: no kernel takes it")
        return attention_reference

    from tatten.ops.cuda.segments import plan_segments

    return plan_segments(call)


def _plan_picks(call: AttentionCall) -> Attend:
    """Plan a call of any attention op with `indices`."""
    query, value = call.query, call.segments[0].value
    if call.op == LATENT:
        check_latent_attention(call)
        check_latent_widths_on_cuda(value, call.segments[0].rope)
    else:
        (check_bifurcated_attention if call.op == BIFURCATED else check_decode_attention)(call)
        check_provider(call.provider, query.device)
        check_cuda_head_dims(query, value)
    check_picks(call)
    if call.batch_invariant:
        checks = {LATENT: check_latent_batch_invariant, BIFURCATED: check_segments_batch_invariant}
        checks.get(call.op, check_batch_invariant)(call)
    if call.provider not in ("auto", "triton"):
        raise NotImplementedError(f"`provider` {call.provider!r} can't compute this: it has no `indices`")
    if query.dtype == torch.float64:
        if call.batch_invariant:
            raise NotImplementedError("`query` must not be float64 with `batch_invariant` on CUDA: no kernel takes it")
        return attention_reference
    reason = unsupported_reason("triton", Workload.of(query, call.segments[0].key, value, needs_of(call)))
    if reason is not None:
        raise NotImplementedError(f"`indices` can't be computed: {reason}")

    from tatten.ops.cuda.picked import plan_picked

    return plan_picked(call)


def row_groups(rows: Tensor, kv_batch: int, queries: int) -> Tensor:
    return on_device_of(rows, _plan_row_groups(rows, kv_batch, queries), rows)


@by_layout
def _plan_row_groups(rows: Tensor, kv_batch: int, queries: int) -> Callable[[Tensor], Tensor]:
    check_rows(rows)
    from tatten.ops.cuda.row_groups import plan_row_groups

    return plan_row_groups(rows, kv_batch, queries)


def shared_pages(block_table: Tensor, kv_lens: Tensor, n_pages: int, page_size: int, q_length: int = 1) -> Tensor:
    plan = _plan_shared_pages(block_table, kv_lens, n_pages, page_size, q_length)
    return on_device_of(block_table, plan, block_table, kv_lens)


@by_layout
def _plan_shared_pages(
    block_table: Tensor, kv_lens: Tensor, n_pages: int, page_size: int, q_length: int
) -> Callable[[Tensor, Tensor], Tensor]:
    check_table_alone(block_table, kv_lens, n_pages, page_size, q_length)
    from tatten.ops.cuda.shared_pages import plan_shared_pages

    return plan_shared_pages(block_table, n_pages, page_size, q_length)


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
    """Plan the merge. The kernel has one program per query and head, so it is batch-invariant in any case."""
    check_stack(out, lse)
    if out.dtype == torch.float64 or out.numel() == 0:
        return merge_each if batch_invariant else merge
    from tatten.ops.cuda.merge_states import plan_merge_states

    return plan_merge_states(out, lse)
