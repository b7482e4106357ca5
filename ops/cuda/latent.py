"""`tatten::latent_attention` on CUDA: checks, and launches of the decode kernel or of the latent kernels for Hopper."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tatten.ops.call import Attend, AttentionCall
from tatten.ops.cuda.gpu import has_large_shared_memory, has_wgmma
from tatten.ops.cuda.recording import may_take_gluon
from tatten.ops.cuda.tma import takes_tma
from tatten.ops.latent_validation import (
    FEW_QUERIES_ON_CUDA,
    check_latent_attention,
    check_latent_batch_invariant,
    check_latent_widths_on_cuda,
)
from tatten.ops.reference import attention_reference

if TYPE_CHECKING:
    from tatten.ops.cuda.mask_plan import MaskPlan


def plan_latents(call: AttentionCall) -> Attend:
    """Plan a function that computes the op for calls of this layout."""
    query, (stored,) = call.query, call.segments
    check_latent_attention(call)
    check_latent_widths_on_cuda(stored.key, stored.rope)
    if query.dtype != stored.key.dtype and not has_large_shared_memory(query.device):
        raise NotImplementedError(
            f"`query` must have the dtype of `latent`, {stored.key.dtype}, on a GPU where a program has less than "
            f"227 KiB of shared memory, got {query.dtype}"
        )
    if call.batch_invariant:
        check_latent_batch_invariant(call)
    if query.dtype == torch.float64:
        if call.batch_invariant:
            raise NotImplementedError("`query` must not be float64 with `batch_invariant` on CUDA: no kernel takes it")
        return attention_reference

    from tatten.ops.cuda.decode import plan_attention
    from tatten.ops.cuda.mask_plan import plan_mask

    if call.plain and call.score_scale > 0 and call.query_rope is not None:
        mask = plan_mask(query, stored)
        if _takes_sm90(call, mask):
            from tatten.ops.cuda.latent_sm90 import plan_latents_sm90

            return plan_latents_sm90(call, mask)
    return plan_attention(call)


def _takes_sm90(call: AttentionCall, mask: MaskPlan) -> bool:
    """Return True if a kernel for Hopper can compute this, and is faster.

    The decode kernel computes few queries in 16 bits without a mask: 22.9 us for 8 x 4000, and 24.2 (H100).
    """
    from tatten.ops.cuda.combine import INTERPRETED
    from tatten.ops.cuda.kernels.decode import NO_MASK
    from tatten.ops.cuda.kernels.latent_visits import MOST_GROUPS

    query, query_rope, latent, key_rope = call.query, call.query_rope, call.segments[0].key, call.segments[0].rope
    assert query_rope is not None
    assert key_rope is not None
    few, unrounded = query.shape[1] * query.shape[2] <= FEW_QUERIES_ON_CUDA, query.dtype != latent.dtype
    return (
        not INTERPRETED
        and mask.kind == NO_MASK  # the bits of its block list are the whole mask, if there is one
        and mask.groups <= MOST_GROUPS
        and has_wgmma(query.device)
        and call.segments[0].block_table is None
        and query.shape[0] == latent.shape[0]
        and latent.element_size() == 2
        and (unrounded or mask.has_block_list if few else not unrounded)
        and (latent.shape[3], key_rope.shape[3]) == (512, 64)
        and query.stride(3) == query_rope.stride(3) == 1
        and takes_tma(latent)
        and takes_tma(key_rope)
        and may_take_gluon("latent_sm90")
    )
