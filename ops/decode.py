"""The public functions for keys that no sequences share, in eager mode and in `torch.compile`."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

import tatten.ops.library  # noqa: F401  (defines torch.ops.tatten)
from tatten.ops.argument_names import names_arguments
from tatten.ops.masks import BlockList, BlockMask, KeySpans, data_of
from tatten.ops.pages_validation import check_without_picks
from tatten.ops.picks import picks_options
from tatten.ops.shared_pages import SharedPages, data_of_pages
from tatten.ops.validation import check_mask_alone, check_tensors


def block_mask(attn_mask: Tensor, *, kv_batch: int | None = None, rows: Tensor | None = None) -> BlockMask:
    """Find the keys that a mask allows, once for all layers that share the mask.

    Without a block mask, each call of `decode_attention` with a mask searches the mask again, which takes two small
    kernels on CUDA and a few on a CPU. Graphs compiled with `backend="tatten"` share it already. Results are equal to
    the bit.

    Args:
        attn_mask: bool (True takes part) or additive, broadcastable to `[batch, q_heads, q_length, kv_length]`. Its
            last dimension must be kv_length, not 1.
        kv_batch: the batch of the segment, for `bifurcated_attention`; it divides the batch of the mask. Default: the
            batch of the mask.
        rows: the `rows` of the segment, if it has them; `kv_batch` may then be any number.

    Returns:
        A `BlockMask` on the device of the mask.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.

    Examples:
        >>> import torch, tatten
        >>> query, key, value = torch.randn(2, 8, 1, 64), torch.randn(2, 2, 100, 64), torch.randn(2, 2, 100, 64)
        >>> mask = (torch.arange(100) < 60).expand(2, 1, 1, 100)
        >>> blocks = tatten.block_mask(mask)
        >>> for layer in range(32):
        ...     query = tatten.decode_attention(query, key, value, attn_mask=mask, block_mask=blocks)
    """
    check_tensors(attn_mask=attn_mask)
    check_mask_alone(attn_mask, kv_batch, rows)
    kind = KeySpans if attn_mask.device.type == "cpu" else BlockList
    return kind(torch.ops.tatten.block_mask.default(attn_mask, kv_batch, rows), attn_mask.shape[-1])


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
    batch_invariant: bool = False,
    indices: Tensor | None = None,
    index_block: int = 1,
    distinct_indices: bool = False,
    rest_bias: float | None = None,
    block_table: Tensor | None = None,
    shared_pages: SharedPages | None = None,
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
    batch_invariant: bool = False,
    indices: Tensor | None = None,
    index_block: int = 1,
    distinct_indices: bool = False,
    rest_bias: float | None = None,
    block_table: Tensor | None = None,
    shared_pages: SharedPages | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@names_arguments
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
    batch_invariant: bool = False,
    indices: Tensor | None = None,
    index_block: int = 1,
    distinct_indices: bool = False,
    rest_bias: float | None = None,
    block_table: Tensor | None = None,
    shared_pages: SharedPages | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of a few queries per sequence over a long KV, as `F.scaled_dot_product_attention` does.

    Query head `h` reads kv head `h // (q_heads // kv_heads)`; nothing is repeated in memory. Keys before the first and
    after the last key that the mask and the lengths allow are never read, and may hold anything, NaN included.

    Args:
        query: `[batch, q_heads, q_length, head_dim]`, float16, bfloat16, float32 or float64, any strides.
        key: `[batch, kv_heads, kv_length, head_dim]`, in `query`'s dtype, int8 or float8_e4m3fn (on CUDA from compute
            capability 8.9 on); kv_heads divides q_heads.
        value: `[batch, kv_heads, kv_length, value_dim]`, in the dtype of `key`.
        attn_mask: bool (True takes part) or additive in float32 or `query`'s dtype; broadcastable to
            `[batch, q_heads, q_length, kv_length]`, stride 0 included.
        block_mask: the result of `tatten.block_mask` for `attn_mask`, so that layers with the same mask search it once.
            Ignored with `kv_lens` or `window`, which narrow the mask: the call then searches the mask itself.
        kv_lens: int32 or int64 `[batch]`, on the device of `query`: only the first `kv_lens[b]` keys of sequence `b`
            take part. Values outside `[0, kv_length]` are an error on a CPU; on a GPU, which is never synchronised,
            they are clamped.
        scale: factor of the scores. Default: `head_dim ** -0.5`.
        window: number of keys, at least 1, that a query attends to: those up to and including its own position. The
            queries are at the end of the keys, query `l` at position `n - q_length + l`, where `n` is `kv_lens[b]` or
            else kv_length, so that they are causal among themselves. A mask narrows this further. Sliding window
            attention: Mistral, arXiv 2310.06825.
        softcap: above 0; scores become `softcap * tanh(scores / softcap)`, after `scale` and before an additive mask.
            Gemma 2, arXiv 2408.00118.
        sinks: `[q_heads]`, float32 or `query`'s dtype, on the device of `query`: one logit per query head that takes
            part in the softmax and has no value, as if merging with the state `(0, sink)`. -inf means no sink.
            Attention sinks: arXiv 2309.17453; learned ones: gpt-oss.
        key_scale: float32 or `query`'s dtype, on the device of `query`, with keys in float8 or int8 only: `[kv_heads]`,
            where the keys of kv head `i` represent `key[:, i] * key_scale[i]`, or `[batch, kv_heads, kv_length]`, where
            they represent `key * key_scale[..., None]`. Keys are upcast as they are read. Scales of keys that are not
            read may be anything. Default: 1.
        value_scale: the same for the values.
        provider: the kernel library that computes attention: "auto"; "cpu" on a CPU; on CUDA "triton" (tatten's own
            kernel), "cudnn", "flash" (PyTorch's), or, if installed, "fa2", "fa3" and "fa4" (FlashAttention 2 to 4). A
            named provider that cannot compute the call raises; there is no fallback. FlashAttention's packages read
            whole tiles: values around the lengths and windows must be finite for them.
        batch_invariant: make each sequence's result bitwise equal to that of a call without the other sequences,
            whatever they are and however many. The chunks in which keys are added up then depend on the sequence's own
            length and mask only. On CUDA this uses tatten's own kernel, and on a CPU `softcap` is not supported with
            it.
        indices: int32 or int64 `[batch, 1 or kv_heads, q_length, picks]`, any strides, on the device of `query`: the
            keys that each query attends to, the same for all query heads or for those of a kv head. A mask and
            `kv_lens` narrow them further. No other key is read, nor its value, nor its part of the mask. Entries
            outside `[0, ceil(kv_length / index_block))` are skipped. A block mask is ignored, and `window` must be
            None.
        index_block: number of keys that each entry of `indices` names: entry `i` names the keys `i * index_block` up to
            but not including `(i + 1) * index_block`, as far as they exist.
        distinct_indices: promise that no row of `indices` has an entry twice. Without it, repeated entries are
            removed first, so that each key counts once. An entry that breaks the promise is an error on a CPU; on a
            GPU it counts as often as it is listed.
        rest_bias: with `indices` and an additive mask or none: the bias of the keys that no entry names, which are
            excluded by default. It is at most half of float32's `finfo.min`, as models write masks, so that it matters
            only to a query whose picked keys all have a bias of at most half of it: such a query attends to all
            keys, as under the dense mask.
        block_table: int32 `[batch, max_pages]`, any strides, on the device of `query`: keys and values are in pages.
            `key` and `value` are then pools `[pages, page, kv_heads, head_dim]` of any strides, with 1, 2, 4, ... or
            256 keys in a page. Key `j` of sequence `b` is `key[block_table[b, j // page], j % page]`. `kv_lens` must be
            given, at most `max_pages * page`. Entries beyond a length may be anything, and so may keys that no length
            covers. A key whose entry is outside `[0, pages)` is left out. Masks and windows count keys from the start
            of their sequence. Scales for each key are `[pages, page, kv_heads]`. A block mask is ignored, and `indices`
            must be None.
        shared_pages: the result of `tatten.shared_pages` for `block_table` and `kv_lens`, so that pages that sequences
            share are read once. Results are the same up to rounding. It stays valid while sequences grow, but not if
            entries that it counts on change. Ignored with `attn_mask`, `window` or `batch_invariant`.
        return_lse: return the attention state `(out, lse)` instead of `out`.

    Returns:
        `out` `[batch, q_heads, q_length, value_dim]` in `query`'s dtype, contiguous; with `return_lse` also `lse`
        `[batch, q_heads, q_length]`, the natural log-sum-exp of the scaled scores, in float32 (float64 for float64).
        A query with no key gets `out = 0` and `lse = -inf`, or its sink.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
        NotImplementedError: gradients are required, or the provider, the GPU or the kernel cannot compute this.

    Examples:
        >>> import torch, tatten
        >>> query = torch.randn(2, 8, 1, 64)  # one new token, 8 query heads
        >>> key, value = torch.randn(2, 2, 2, 4096, 64)  # a static cache of 2 kv heads, partly filled
        >>> out = tatten.decode_attention(query, key, value, kv_lens=torch.tensor([100, 3000]))
        >>> out.shape
        torch.Size([2, 8, 1, 64])
    """
    check_tensors(query=query, key=key, value=value)
    paged = block_table is not None
    if paged:
        check_tensors(block_table=block_table)
        check_without_picks(indices)
    options = {
        "attn_mask": attn_mask,
        "kv_lens": kv_lens,
        "scale": scale,
        "block_mask": None if block_mask is None or paged else data_of(block_mask, attn_mask, key),
        "window": window,
        "softcap": softcap,
        "sinks": sinks,
        "key_scale": key_scale,
        "value_scale": value_scale,
        "provider": None if provider == "auto" else provider,
        "batch_invariant": batch_invariant or None,
        "block_table": block_table,
        "shared_pages": None if shared_pages is None else data_of_pages(shared_pages, block_table, key),
    }
    options |= picks_options(indices, query, key, index_block, distinct_indices, rest_bias)
    # The dispatcher spends time on each argument, even on a default.
    arguments = {name: x for name, x in options.items() if x is not None}
    out, lse = torch.ops.tatten.decode_attention.default(query, key, value, **arguments)
    return (out, lse) if return_lse else out
