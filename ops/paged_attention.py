"""The public function for mixed batches over keys in pages, in eager mode and in `torch.compile`."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

import tatten.ops.library  # noqa: F401  (defines torch.ops.tatten)
from tatten.ops.argument_names import names_arguments
from tatten.ops.shared_pages import SharedPages, data_of_pages
from tatten.ops.validation import check_tensors


@overload
def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    kv_lens: Tensor,
    *,
    scale: float | None = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    key_scale: Tensor | None = ...,
    value_scale: Tensor | None = ...,
    batch_invariant: bool = ...,
    shared_pages: SharedPages | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    kv_lens: Tensor,
    *,
    scale: float | None = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    key_scale: Tensor | None = ...,
    value_scale: Tensor | None = ...,
    batch_invariant: bool = ...,
    shared_pages: SharedPages | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@names_arguments
def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    kv_lens: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    batch_invariant: bool = False,
    shared_pages: SharedPages | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute causal attention of a mixed batch: any number of new tokens per sequence, over keys in pages.

    One call serves decode steps, speculative steps and chunks of prefills. The keys of the new tokens are in the pages
    already. Query `i` of a sequence with `q` queries and `n` keys has position `n - q + i`, and attends to the keys
    from 0 up to and including its position.

    Args:
        query: `[tokens, q_heads, head_dim]`, the sequences one after the other; float16, bfloat16, float32 or float64,
            any strides.
        key: `[pages, page, kv_heads, head_dim]`, a pool as `tatten.decode_attention` takes it with `block_table`.
        value: `[pages, page, kv_heads, value_dim]`, in the dtype of `key`.
        block_table: int32 `[batch, max_pages]`, any strides. Key `j` of sequence `b` is
            `key[block_table[b, j // page], j % page]`. Entries beyond a length may be anything; a key whose entry is
            outside `[0, pages)` is left out.
        cu_seqlens_q: int32 `[batch + 1]`: the queries of sequence `b` are the tokens from `cu_seqlens_q[b]` up to but
            not including `cu_seqlens_q[b + 1]`. It begins with 0 and doesn't decrease; a sequence may have no query.
            Tokens from `cu_seqlens_q[-1]` on are padding. Other values are an error on a CPU. A GPU, which is never
            synchronised, reads the first entry as 0, and each of the others as at least the one before it and at most
            the number of tokens.
        kv_lens: int32 or int64 `[batch]`: the number of keys of each sequence, those of the new tokens included. Values
            outside `[0, max_pages * page]` are an error on a CPU, and clamped on a GPU.
        scale, softcap, sinks, key_scale, value_scale: as for `tatten.decode_attention`.
        window: number of keys, at least 1, that a query attends to: those up to and including its own position.
        batch_invariant: make each sequence's result bitwise equal to that of a call without the other sequences. On a
            CPU `softcap` is not supported with it.
        shared_pages: the result of `tatten.shared_pages` for `block_table` and `kv_lens`. Sequences with one query read
            a page that they share once. Results are the same up to rounding. Ignored with `window` or
            `batch_invariant`, in float64 on CUDA, and in exported programs.
        return_lse: return the attention state `(out, lse)` instead of `out`.

    Returns:
        `out` `[tokens, q_heads, value_dim]` in `query`'s dtype, contiguous; with `return_lse` also `lse`
        `[tokens, q_heads]`, the natural log-sum-exp of the scaled scores, in float32 (float64 for float64). A query
        with no key, such as one whose position is negative, gets `out = 0` and `lse = -inf`, or its sink. Padding gets
        `out = 0` and `lse = -inf`.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
        NotImplementedError: gradients are required, or the GPU or the kernel cannot compute this.

    Examples:
        >>> import torch, tatten
        >>> key, value = torch.randn(2, 100, 16, 2, 64)  # 100 pages of 16 keys
        >>> table = torch.randperm(100).int().view(2, 50)
        >>> starts = torch.tensor([0, 1, 301], dtype=torch.int32)  # a decode step, and a chunk of 300 tokens
        >>> query = torch.randn(301, 8, 64)
        >>> out = tatten.paged_attention(query, key, value, table, starts, torch.tensor([700, 500]))
        >>> out.shape
        torch.Size([301, 8, 64])
    """
    check_tensors(
        query=query, key=key, value=value, block_table=block_table, cu_seqlens_q=cu_seqlens_q, kv_lens=kv_lens
    )
    options = {
        "scale": scale,
        "window": window,
        "softcap": softcap,
        "sinks": sinks,
        "key_scale": key_scale,
        "value_scale": value_scale,
        "batch_invariant": batch_invariant or None,
        "shared_pages": None if shared_pages is None else data_of_pages(shared_pages, block_table, key),
    }
    # The dispatcher spends time on each argument, even on a default.
    arguments = {name: x for name, x in options.items() if x is not None}
    out, lse = torch.ops.tatten.paged_attention.default(
        query, key, value, block_table, cu_seqlens_q, kv_lens, **arguments
    )
    return (out, lse) if return_lse else out
