"""Checks of the inputs of `tatten::latent_attention`. Each names the argument, the expected and the actual value."""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.call import AttentionCall
from tatten.ops.pages import heads_first
from tatten.ops.pages_validation import check_pages
from tatten.ops.states import accumulator_dtype
from tatten.ops.validation import (
    check_batch_invariant,
    check_block_masks,
    check_call_no_grad,
    check_query,
    check_softmax,
    widest_on_cuda,
)

WIDEST_ROPE_ON_CUDA = 64  # tiles of 128 columns do not fit in shared memory beside those of rank 512
# With up to this many queries per sequence, over all heads, Hopper's tensor cores wait for latents anyway, so that
# float32 queries cost no time. With more, the products with their 16-bit residues would take time and shared memory.
FEW_QUERIES_ON_CUDA = 16


def check_latent_attention(call: AttentionCall) -> None:
    """Raise ValueError, TypeError or NotImplementedError unless the inputs fit `tatten::latent_attention`.

    It reads no data, so that no device is synchronised. `check_devices` checks the devices.
    """
    query, stored = call.query, call.segments[0]
    latent = stored.key
    check_call_no_grad(call)
    check_query(query)
    batch, rank = query.shape[0], query.shape[3]
    if (query.dtype, latent.dtype) != (torch.float32, torch.bfloat16):  # float16 lacks the range of float32
        _check_dtype("latent", latent, "query", query)
    shape = latent.shape
    if stored.block_table is not None:
        check_pages(call)
    elif len(shape) != 4 or 0 in shape or batch % shape[0] or shape[1] != 1 or shape[3] != rank:
        wanted = f"[kv_batch, 1, kv_length, {rank}] as `query` is {tuple(query.shape)}, with a kv_length of at least 1"
        raise ValueError(f"`latent` must be {wanted} and a kv_batch that divides {batch}, got shape {tuple(shape)}")
    if (rows := stored.kv_batch) != batch and (stored.kv_lens is not None or call.window is not None):
        name = "`window`" if stored.kv_lens is None else "`kv_lens`"
        raise ValueError(f"{name} must be None where sequences share latents: {batch} read {rows}; use `attn_mask`")
    if stored.block_table is None:
        _check_ropes(query, call.query_rope, latent, stored.rope)
    else:  # errors show the user's layout
        rope = stored.rope if stored.rope is None else heads_first(stored.rope)
        _check_ropes(query, call.query_rope, heads_first(latent), rope)
    check_softmax(call, latent.dtype)
    wide, out_dtype = accumulator_dtype(latent.dtype), call.out_dtype or query.dtype
    if out_dtype not in (latent.dtype, wide):
        wanted = " or ".join(dict.fromkeys((str(latent.dtype), str(wide))))
        raise TypeError(f"`out_dtype` must be {wanted} for `latent` in {latent.dtype}, got {out_dtype}")
    check_block_masks(call)


def _check_ropes(query: Tensor, query_rope: Tensor | None, latent: Tensor, key_rope: Tensor | None) -> None:
    if (query_rope is None) != (key_rope is None):
        name, other = ("query_rope", "key_rope") if query_rope is None else ("key_rope", "query_rope")
        raise ValueError(f"`{name}` must be given with `{other}`, got None")
    if query_rope is None or key_rope is None:
        return
    for name, rope, like_name, like in (
        ("query_rope", query_rope, "query", query),
        ("key_rope", key_rope, "latent", latent),
    ):
        _check_dtype(name, rope, "latent", latent)
        if rope.dim() != 4 or rope.shape[:3] != like.shape[:3]:
            wanted = f"[{', '.join(map(str, like.shape[:3]))}, width] like `{like_name}`"
            raise ValueError(f"`{name}` must be {wanted}, got shape {tuple(rope.shape)}")
    if key_rope.shape[3] != query_rope.shape[3]:
        have, want = key_rope.shape[3], query_rope.shape[3]
        raise ValueError(f"`key_rope` must have the width of `query_rope`, {want}, got {have}")


def check_latent_batch_invariant(call: AttentionCall) -> None:
    """Raise unless each sequence can be computed as if it were alone."""
    check_batch_invariant(call)
    batch, rows = call.query.shape[0], call.segments[0].kv_batch
    if rows != batch:
        raise ValueError(
            f"`latent` must have `query`'s batch, {batch}, with `batch_invariant`, got {rows}; "
            "expand it, as results must not depend on the sequences that share latents"
        )


def check_latent_widths_on_cuda(latent: Tensor, key_rope: Tensor | None) -> None:
    """Raise NotImplementedError if latents or their rope are too wide for the CUDA kernels' tiles."""
    if latent.dtype == torch.float64:  # computed by the reference
        return
    most, rank = widest_on_cuda(latent.dtype), latent.shape[3]
    if rank > most:
        raise NotImplementedError(f"`latent` must have a rank of at most {most} in {latent.dtype} on CUDA, got {rank}")
    if key_rope is not None and key_rope.shape[3] > WIDEST_ROPE_ON_CUDA:
        raise NotImplementedError(
            f"`key_rope` must have a width of at most {WIDEST_ROPE_ON_CUDA} on CUDA, got {key_rope.shape[3]}"
        )


def _check_dtype(name: str, x: Tensor, like_name: str, like: Tensor) -> None:
    if x.dtype != like.dtype:
        raise TypeError(f"`{name}` must have the dtype of `{like_name}`, {like.dtype}, got {x.dtype}")
