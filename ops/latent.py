"""The public function for attention to latents, in eager mode and in `torch.compile` with any backend."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

import tatten.ops.library  # noqa: F401  (defines torch.ops.tatten)
from tatten.ops.argument_names import names_arguments
from tatten.ops.masks import BlockMask, data_of
from tatten.ops.pages_validation import check_without_picks
from tatten.ops.picks import picks_options
from tatten.ops.validation import check_tensors


@overload
def latent_attention(
    query: Tensor,
    query_rope: Tensor | None,
    latent: Tensor,
    key_rope: Tensor | None,
    *,
    attn_mask: Tensor | None = None,
    block_mask: BlockMask | None = None,
    kv_lens: Tensor | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    indices: Tensor | None = None,
    index_block: int = 1,
    distinct_indices: bool = False,
    rest_bias: float | None = None,
    block_table: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def latent_attention(
    query: Tensor,
    query_rope: Tensor | None,
    latent: Tensor,
    key_rope: Tensor | None,
    *,
    attn_mask: Tensor | None = None,
    block_mask: BlockMask | None = None,
    kv_lens: Tensor | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    indices: Tensor | None = None,
    index_block: int = 1,
    distinct_indices: bool = False,
    rest_bias: float | None = None,
    block_table: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@names_arguments
def latent_attention(
    query: Tensor,
    query_rope: Tensor | None,
    latent: Tensor,
    key_rope: Tensor | None,
    *,
    attn_mask: Tensor | None = None,
    block_mask: BlockMask | None = None,
    kv_lens: Tensor | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    indices: Tensor | None = None,
    index_block: int = 1,
    distinct_indices: bool = False,
    rest_bias: float | None = None,
    block_table: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the *absorbed* form of multi-head latent attention: all heads attend to one cached latent per token.

    Let `W_uk` and `W_uv` be the parts of a head's up-projection (`kv_b_proj`) that compute its key and its value from a
    latent `c`. Then `q . (W_uk c) = (q W_uk) . c`, and the mean of `W_uv c` is `W_uv` times the mean of `c`, so neither
    keys nor values have to be computed. The score of a head is `scale * (query . latent + query_rope . key_rope)`.
    `out` is the weighted mean of the latents, to which `W_uv` is applied once. Each latent is read once for all heads.

    DeepSeek-V2, arXiv 2405.04434, section 2.1.

    Args:
        query: `[batch, heads, q_length, rank]`, the part of the queries without rope, times `W_uk`; float16, bfloat16,
            float32 or float64, any strides. It may be in float32 if the others are in bfloat16.
        query_rope: `[batch, heads, q_length, width]`, the part with rope, or None if there is none.
        latent: `[kv_batch, 1, kv_length, rank]`, at least one key; it may be a view of a wider cache. kv_batch divides
            batch: sequence `b` attends to row `b * kv_batch // batch`, which is read once for all its sequences.
        key_rope: `[kv_batch, 1, kv_length, width]`, the part of the keys that has rope and that all heads share; None
            if `query_rope` is. These four have one dtype, except for a `query` in float32.
        attn_mask: as in `decode_attention`, broadcastable to `[batch, heads, q_length, kv_length]`.
        block_mask: the result of `tatten.block_mask` for `attn_mask`, as in `decode_attention`.
        kv_lens: int32 or int64 `[batch]`, as in `decode_attention`; neither it nor `window` may be given if
            `kv_batch < batch`.
        scale: factor of the scores. It has no default: a model's scale follows from the width of its keys, as
            `(128 + 64) ** -0.5` for DeepSeek-V3, and latents don't show that width.
        window: as in `decode_attention`.
        softcap: as in `decode_attention`.
        sinks: `[heads]`, as in `decode_attention`.
        out_dtype: dtype of `out`: `query`'s, which is the default, or the accumulator's (float32, or float64 for
            float64), so that `W_uv` is applied to sums that were not rounded.
        batch_invariant: as in `decode_attention`. Each sequence then has latents of its own: kv_batch is batch.
        indices: int32 or int64 `[batch, 1, q_length, picks]`: the latents that each query attends to, as in
            `decode_attention`.
        index_block, distinct_indices, rest_bias: as in `decode_attention`.
        block_table: int32 `[batch, max_pages]`, as in `decode_attention`: latents are in pages. `latent` is then a pool
            `[pages, page, 1, rank]`, and `key_rope` one of `[pages, page, 1, width]`, of any strides: columns of one
            pool `[pages, page, 1, rank + width]`, for example. `kv_lens` must be given, and each sequence has entries
            of its own.
        return_lse: return the attention state `(out, lse)` instead of `out`.

    Returns:
        `out` `[batch, heads, q_length, rank]` in `out_dtype`, contiguous; with `return_lse` also `lse`
        `[batch, heads, q_length]`, as in `decode_attention`. States over disjoint latents merge, before or
        after `W_uv`.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
        NotImplementedError: gradients are required, or the device or the kernel cannot compute this.

    Examples:
        >>> import torch, tatten
        >>> latent, key_rope = torch.randn(2, 1, 300, 32), torch.randn(2, 1, 300, 8)  # a cache of 40 numbers a token
        >>> w_uk, w_uv = torch.randn(2, 4, 16, 32)  # for 4 heads, with keys and values of 16
        >>> q, query_rope = torch.randn(2, 4, 1, 16), torch.randn(2, 4, 1, 8)
        >>> out = tatten.latent_attention(q @ w_uk, query_rope, latent, key_rope, scale=24**-0.5) @ w_uv.mT

        Computed from keys and values for each head, the result is the same:

        >>> key = torch.cat((latent @ w_uk.mT, key_rope.expand(2, 4, 300, 8)), dim=3)
        >>> query = torch.cat((q, query_rope), dim=3)
        >>> torch.allclose(out, tatten.decode_attention(query, key, latent @ w_uv.mT), atol=1e-3)
        True
    """
    if block_table is not None:
        check_tensors(block_table=block_table)
        check_without_picks(indices)
        block_mask = None
    ropes = {name: x for name, x in (("query_rope", query_rope), ("key_rope", key_rope)) if x is not None}
    check_tensors(query=query, latent=latent, **ropes)
    if scale is None:
        raise TypeError("`scale` must be a number: it follows from the width of the keys, not of latents; got None")
    options = picks_options(indices, query, latent, index_block, distinct_indices, rest_bias, "latent")
    if block_table is not None:
        options["block_table"] = block_table
    out, lse = torch.ops.tatten.latent_attention.default(
        query,
        query_rope,
        latent,
        key_rope,
        attn_mask,
        kv_lens,
        scale=scale,
        block_mask=None if block_mask is None else data_of(block_mask, attn_mask, latent, name="latent"),
        window=window,
        softcap=softcap,
        sinks=sinks,
        out_dtype=out_dtype,
        batch_invariant=batch_invariant,
        **options,
    )
    return (out, lse) if return_lse else out
