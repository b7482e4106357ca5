"""`tatten::latent_attention` on CUDA: checks, and launches of the decode kernel or of the latent kernels for Hopper."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tatten.ops.cuda.heuristics import capability, has_large_shared_memory
from tatten.ops.cuda.launcher import by_layout, on_device_of
from tatten.ops.cuda.recording import may_take_gluon
from tatten.ops.cuda.tma import takes_tma
from tatten.ops.latent_validation import (
    FEW_QUERIES_ON_CUDA,
    check_latent_attention,
    check_latent_batch_invariant,
    check_latent_no_grad,
    check_latent_widths_on_cuda,
)
from tatten.ops.reference import latent_attention_reference
from tatten.ops.states import State
from tatten.ops.validation import check_block_mask, check_devices
from tatten.ops.variant import PLAIN, AttentionVariant

if TYPE_CHECKING:
    from tatten.ops.cuda.mask_plan import MaskPlan


def latent_attention(
    query: Tensor,
    query_rope: Tensor | None,
    latent: Tensor,
    key_rope: Tensor | None,
    attn_mask: Tensor | None,
    kv_lens: Tensor | None,
    scale: float,
    block_mask: Tensor | None,
    variant: AttentionVariant,
    out_dtype: torch.dtype,
    batch_invariant: bool,
) -> State:
    check_latent_no_grad(query, query_rope, latent, key_rope, attn_mask, variant)
    tensors = query, query_rope, latent, key_rope, attn_mask, kv_lens
    attend = _plan(*tensors, scale, block_mask, variant, out_dtype, batch_invariant)
    return on_device_of(query, attend, *tensors, block_mask, variant)


@by_layout
def _plan(
    query: Tensor,
    query_rope: Tensor | None,
    latent: Tensor,
    key_rope: Tensor | None,
    attn_mask: Tensor | None,
    kv_lens: Tensor | None,
    scale: float,
    block_mask: Tensor | None,
    variant: AttentionVariant,
    out_dtype: torch.dtype,
    batch_invariant: bool = False,
) -> Callable[..., State]:
    """Plan a function of the tensors, the block mask and the variant that computes the op."""
    given = {"query_rope": query_rope, "latent": latent, "key_rope": key_rope, "attn_mask": attn_mask}
    check_devices(query, **given, kv_lens=kv_lens, block_mask=block_mask, **variant.tensors)
    check_latent_attention(query, query_rope, latent, key_rope, attn_mask, kv_lens, variant, out_dtype)
    check_latent_widths_on_cuda(latent, key_rope)
    if query.dtype != latent.dtype and not has_large_shared_memory(query.device):
        raise NotImplementedError(
            f"`query` must have the dtype of `latent`, {latent.dtype}, on a GPU where a program has less than 227 KiB "
            f"of shared memory, got {query.dtype}"
        )
    if block_mask is not None:
        check_block_mask(block_mask, latent.shape[0], latent.shape[2], query.device)
    if batch_invariant:
        check_latent_batch_invariant(query, latent, variant)
    if query.dtype == torch.float64:
        if batch_invariant:
            raise NotImplementedError("`query` must not be float64 with `batch_invariant` on CUDA: no kernel takes it")
        return lambda q, q_rope, c, k_rope, mask, lens, _, variant: latent_attention_reference(
            q, q_rope, c, k_rope, mask, lens, scale=scale, variant=variant
        )

    from tatten.ops.cuda.combine import plan_combine
    from tatten.ops.cuda.decode import plan_segment
    from tatten.ops.cuda.mask_plan import plan_mask

    plain = variant == PLAIN and scale > 0 and not batch_invariant
    if plain and query_rope is not None and key_rope is not None:
        mask = plan_mask(query, latent, attn_mask, kv_lens, block_mask, None)
        if _takes_sm90(query, query_rope, latent, key_rope, mask):
            return _plan_sm90(query, query_rope, latent, key_rope, mask, kv_lens, scale, out_dtype)

    masks = attn_mask, kv_lens, scale, block_mask, variant, None
    rope = _rope(query_rope, key_rope)
    options: dict[str, Any] = {"out_dtype": out_dtype, "batch_invariant": batch_invariant}
    segment = plan_segment(query, latent, latent, *masks, rope, latent=True, **options)
    combine = plan_combine(query, latent.shape[3], segment.tile_space)

    def attend(
        query: Tensor,
        query_rope: Tensor | None,
        latent: Tensor,
        key_rope: Tensor | None,
        attn_mask: Tensor | None,
        kv_lens: Tensor | None,
        block_mask: Tensor | None,
        variant: AttentionVariant,
    ) -> State:
        rope = _rope(query_rope, key_rope)
        state = combine(segment(query, latent, latent, attn_mask, kv_lens, block_mask, variant, rope=rope))
        return state.out, state.lse

    return attend


def _rope(query_rope: Tensor | None, key_rope: Tensor | None) -> tuple[()] | tuple[Tensor, Tensor]:
    """Return both ropes, or an empty tuple: checked inputs have both or neither."""
    return () if query_rope is None or key_rope is None else (query_rope, key_rope)


def _takes_sm90(query: Tensor, query_rope: Tensor, latent: Tensor, key_rope: Tensor, mask: MaskPlan) -> bool:
    """Return True if a kernel for Hopper can compute this, and is faster.

    The decode kernel computes few queries in 16 bits without a mask: 22.9 us for 8 x 4000, and 24.2 (H100).
    """
    from tatten.ops.cuda.combine import INTERPRETED
    from tatten.ops.cuda.kernels.decode import NO_MASK
    from tatten.ops.cuda.kernels.latent_visits import MOST_GROUPS

    few, unrounded = query.shape[1] * query.shape[2] <= FEW_QUERIES_ON_CUDA, query.dtype != latent.dtype
    return (
        not INTERPRETED
        and mask.kind == NO_MASK  # the bits of its block list are the whole mask, if there is one
        and mask.groups <= MOST_GROUPS
        and capability(query.device) == (9, 0)
        and query.shape[0] == latent.shape[0]
        and latent.element_size() == 2
        and (unrounded or mask.has_block_list if few else not unrounded)
        and (latent.shape[3], key_rope.shape[3]) == (512, 64)
        and query.stride(3) == query_rope.stride(3) == 1
        and takes_tma(latent)
        and takes_tma(key_rope)
        and may_take_gluon("latent_sm90")
    )


def _plan_sm90(
    query: Tensor,
    query_rope: Tensor,
    latent: Tensor,
    key_rope: Tensor,
    mask: MaskPlan,
    kv_lens: Tensor | None,
    scale: float,
    out_dtype: torch.dtype,
) -> Callable[..., State]:
    """Plan as `_plan` does, for calls that a kernel for Hopper supports."""
    from tatten.ops.cuda.combine import plan_combine
    from tatten.ops.cuda.latent_sm90 import plan_latent_segment

    has_lens = kv_lens is not None and not mask.has_block_list
    segment = plan_latent_segment(query, query_rope, latent, key_rope, mask, scale, out_dtype, has_lens=has_lens)
    combine = plan_combine(query, latent.shape[3], segment.tile_space)

    def attend(*tensors: Tensor) -> State:
        *of_segment, _ = tensors
        state = combine(segment(*of_segment))
        return state.out, state.lse

    return attend
