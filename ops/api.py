"""The public attention functions. They work in eager mode and inside `torch.compile` with any backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

import tatten.ops.library  # noqa: F401  (defines torch.ops.tatten)
from tatten.ops.masks import BlockList, BlockMask, KeySpans, data_of
from tatten.ops.validation import check_mask_alone, check_segments, check_tensors, names_keywords


def block_mask(attn_mask: Tensor, *, kv_batch: int | None = None) -> BlockMask:
    """Find the keys that a mask leaves over, once for all layers that share it.

    Without it each call of `decode_attention` finds them again: two small kernels on CUDA, a few on a CPU. A graph
    compiled with `backend="tatten"` does this by itself. Results are the same to the bit.

    Args:
        attn_mask: bool (True takes part) or additive, broadcastable to `[batch, q_heads, q_length, kv_length]`, of
            which the last dimension is kv_length and not 1.
        kv_batch: for `bifurcated_attention`, the batch of the segment that the mask is over, which divides the mask's.
            Default: the mask's.

    Returns:
        A `BlockMask`, on the device of the mask.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what was expected and what came.
    """
    check_tensors(attn_mask=attn_mask)
    check_mask_alone(attn_mask, kv_batch)
    kind = KeySpans if attn_mask.device.type == "cpu" else BlockList
    return kind(torch.ops.tatten.block_mask.default(attn_mask, kv_batch), attn_mask.shape[-1])


@overload
def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    block_mask: BlockMask | None = None,
    kv_lens: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    provider: str = "auto",
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    block_mask: BlockMask | None = None,
    kv_lens: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    provider: str = "auto",
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@names_keywords
def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    block_mask: BlockMask | None = None,
    kv_lens: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    provider: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a few queries per sequence over a long KV, as `F.scaled_dot_product_attention` computes it.

    Query head `h` reads kv head `h // (q_heads // kv_heads)`; nothing is repeated in memory. Keys outside the span that
    the mask and the lengths leave over are never read, and may hold anything, NaN included.

    Args:
        query: `[batch, q_heads, q_length, head_dim]`, float16, bfloat16, float32 or float64, any strides.
        key: `[batch, kv_heads, kv_length, head_dim]`, in `query`'s dtype or float8_e4m3fn (on CUDA from compute
            capability 8.9 on); kv_heads divides q_heads.
        value: `[batch, kv_heads, kv_length, value_dim]`, in the dtype of `key`.
        attn_mask: bool (True takes part) or additive in float32 or `query`'s dtype; broadcastable to
            `[batch, q_heads, q_length, kv_length]`, stride 0 included.
        block_mask: what `tatten.block_mask` found in `attn_mask`, to save finding it again in each layer that has the
            same mask. With `kv_lens` or `window`, which leave fewer keys than the mask does, it is not used.
        kv_lens: int32 or int64 `[batch]`, on the device of `query`: only the first `kv_lens[b]` keys of sequence `b`
            take part. Values outside `[0, kv_length]` are an error on a CPU and clamped on a GPU, which is never
            synchronised.
        scale: factor of the scores. Default: `head_dim ** -0.5`.
        window: each query attends to the last `window` keys up to its own place, at least 1. The queries stand at the
            end of the keys: query `l` at `n - q_length + l`, `n` being `kv_lens[b]` or else kv_length, so they are
            causal among themselves. A mask narrows this further. Sliding window: Mistral, arXiv 2310.06825.
        softcap: scores become `softcap * tanh(scores / softcap)` after `scale` and before an additive mask, above 0.
            Gemma 2, arXiv 2408.00118.
        sinks: `[q_heads]`, float32 or `query`'s dtype, on the device of `query`: a logit that takes part in the
            softmax of every query of its head, and has no value. It is what merging with the state `(0, sink)` gives;
            -inf is none. Attention sinks: arXiv 2309.17453; learned, one a head: gpt-oss.
        key_scale: float32 `[kv_heads]`, on the device of `query`, with float8 keys only: those of kv head `i` stand
            for `key[:, i] * key_scale[i]`. Default: 1. They are widened when they are read, not written back.
        value_scale: the same for the values.
        provider: who computes: "auto", or by name "cpu" on a CPU, and on CUDA "triton" (ours), "cudnn", "flash", or
            "fa3" where FlashAttention-3 is installed (flash_attn_interface, from hopper/ of flash-attention).
            What is named and cannot compute this is an error, never replaced.
        return_lse: return the attention state `(out, lse)` and not only `out`.

    Returns:
        `out` `[batch, q_heads, q_length, value_dim]` in `query`'s dtype, contiguous; with `return_lse` also `lse`
        `[batch, q_heads, q_length]`, the natural log-sum-exp of the scaled scores, in float32 (float64 for float64).
        A query with no key gets `out = 0` and `lse = -inf`, or its sink.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what was expected and what came.
        NotImplementedError: gradients are wanted, or the provider, the GPU or the kernel can't compute this.
    """
    check_tensors(query=query, key=key, value=value)
    out, lse = torch.ops.tatten.decode_attention.default(
        query,
        key,
        value,
        attn_mask,
        kv_lens,
        scale,
        None if block_mask is None else data_of(block_mask, attn_mask, key),
        window=window,
        softcap=softcap,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
        provider=provider,
    )
    return (out, lse) if return_lse else out


@overload
def bifurcated_attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    *,
    attn_masks: Sequence[Tensor | None] | None = None,
    block_masks: Sequence[BlockMask | None] | None = None,
    scale: float | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def bifurcated_attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    *,
    attn_masks: Sequence[Tensor | None] | None = None,
    block_masks: Sequence[BlockMask | None] | None = None,
    scale: float | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@names_keywords
def bifurcated_attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    *,
    attn_masks: Sequence[Tensor | None] | None = None,
    block_masks: Sequence[BlockMask | None] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a KV in segments, of which each may be shared by several sequences of the batch.

    Segment `i` has a batch `B_i` that divides the query's `B`; its row `j` serves the sequences `j * B // B_i` to
    `(j + 1) * B // B_i - 1`: one prompt for all (`B_i = 1`), a tree of prefixes (1, 4, 16, ...), or a KV of its own for
    each (`B_i = B`). The queries that share a row are rows of one matrix product, so that it is read once. The result
    is that of attention over all segments, one after the other, each repeated for its sequences.

    Bifurcated Attention (arXiv 2403.08845), with any number of levels as in FlashInfer's cascade (arXiv 2501.01005).

    Args:
        query: `[B, q_heads, q_length, head_dim]`, float16, bfloat16, float32 or float64, any strides.
        keys: for each segment `[B_i, kv_heads, length_i, head_dim]`, in `query`'s dtype; kv_heads divides q_heads, and
            length_i may be 0.
        values: for each segment `[B_i, kv_heads, length_i, value_dim]`.
        attn_masks: for each segment None, or a mask that broadcasts to `[B, q_heads, q_length, length_i]` or, one for
            each row of the segment, `[B_i, q_heads, q_length, length_i]`; bool (True takes part) or additive, in
            float32 or `query`'s dtype. Keys outside the span that it leaves over are never read.
        block_masks: for each segment None, or what `tatten.block_mask` found in its mask, with `kv_batch=B_i`.
        scale: factor of the scores. Default: `head_dim ** -0.5`.
        return_lse: return the attention state `(out, lse)` and not only `out`.

    Returns:
        `out` `[B, q_heads, q_length, value_dim]` in `query`'s dtype, contiguous; with `return_lse` also `lse`
        `[B, q_heads, q_length]`, as `decode_attention`.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what was expected and what came.
        NotImplementedError: gradients are wanted, or head_dim is too large for the CUDA kernel.
    """
    for name, tensors in (("keys", keys), ("values", values), ("attn_masks", attn_masks)):
        if isinstance(tensors, Tensor):
            raise TypeError(f"`{name}` must be a sequence of Tensors, got {type(tensors).__name__}")
    if isinstance(block_masks, BlockMask):
        raise TypeError(f"`block_masks` must be a sequence of BlockMasks, got {type(block_masks).__name__}")
    masks = [None] * len(keys) if attn_masks is None else list(attn_masks)
    given = {f"{name}[{i}]": x for name, tensors in (("keys", keys), ("values", values)) for i, x in enumerate(tensors)}
    check_tensors(query=query, **given, **{f"attn_masks[{i}]": x for i, x in enumerate(masks) if x is not None})
    data: list[Tensor | None] = [None] * len(keys)
    if block_masks is not None:
        check_segments(keys, attn_masks=masks, block_masks=block_masks)
        for i, (found, mask, key) in enumerate(zip(block_masks, masks, keys, strict=True)):
            data[i] = None if found is None else data_of(found, mask, key, i)
    out, lse = torch.ops.tatten.bifurcated_attention.default(query, list(keys), list(values), masks, data, scale)
    return (out, lse) if return_lse else out
