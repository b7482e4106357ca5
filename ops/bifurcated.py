"""The public function for keys that sequences share, in eager mode and in `torch.compile` with any backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

import tatten.ops.library  # noqa: F401  (defines torch.ops.tatten)
from tatten.ops.argument_names import names_arguments
from tatten.ops.call import check_segments
from tatten.ops.masks import BlockMask, data_of
from tatten.ops.picks import MISSING_INDICES, distinct_picks
from tatten.ops.segment_validation import check_rows_fit
from tatten.ops.validation import check_tensors


@overload
def bifurcated_attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    *,
    attn_masks: Sequence[Tensor | None] | None = None,
    block_masks: Sequence[BlockMask | None] | None = None,
    rows: Sequence[Tensor | None] | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    batch_invariant: bool = False,
    indices: Sequence[Tensor | None] | None = None,
    index_block: int = 1,
    distinct_indices: bool = False,
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
    rows: Sequence[Tensor | None] | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    batch_invariant: bool = False,
    indices: Sequence[Tensor | None] | None = None,
    index_block: int = 1,
    distinct_indices: bool = False,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@names_arguments
def bifurcated_attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    *,
    attn_masks: Sequence[Tensor | None] | None = None,
    block_masks: Sequence[BlockMask | None] | None = None,
    rows: Sequence[Tensor | None] | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    batch_invariant: bool = False,
    indices: Sequence[Tensor | None] | None = None,
    index_block: int = 1,
    distinct_indices: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention over keys and values in segments, each shared by one or several sequences of the batch.

    Segment `i` has a batch `B_i` that divides the query's `B`; its row `j` serves the sequences `j * B // B_i` to
    `(j + 1) * B // B_i - 1`: one prompt for all (`B_i = 1`), a tree of prefixes (1, 4, 16, ...), or one KV for each
    sequence (`B_i = B`). If `rows[i]` is given, sequence `b` reads row `rows[i][b]` instead, so that groups may have
    any sizes. One matrix product holds all queries that share a row, so that the row is read once. The result is that
    of attention over the concatenated segments, each repeated for its sequences.

    This is Bifurcated Attention (arXiv 2403.08845), with any number of levels as in FlashInfer's cascade
    (arXiv 2501.01005).

    Args:
        query: `[B, q_heads, q_length, head_dim]`, float16, bfloat16, float32 or float64, any strides.
        keys: for each segment `[B_i, kv_heads, length_i, head_dim]`, in `query`'s dtype; kv_heads divides q_heads, and
            length_i may be 0.
        values: for each segment `[B_i, kv_heads, length_i, value_dim]`.
        attn_masks: for each segment None or a mask. A mask broadcasts to `[B, q_heads, q_length, length_i]`, or has one
            entry for each row of the segment: `[B_i, q_heads, q_length, length_i]`. It is bool (True takes part) or
            additive, in float32 or `query`'s dtype. Keys before the first and after the last one that it allows are
            never read. If `rows[i]` is given, a mask of batch `B` has one entry for each sequence, even where
            `B_i = B`.
        block_masks: for each segment None, or the result of `tatten.block_mask` for its mask with `kv_batch=B_i` and
            `rows=rows[i]`.
        rows: for each segment None, or an int32 or int64 tensor `[B]` on the device of `query`: the row of the segment
            that each sequence reads. Rows may come in any order, and in any number; rows that no sequence reads may
            hold anything. Values outside `[0, B_i)` are an error on a CPU; on a GPU, which is never synchronised, they
            are clamped.
        scale: factor of the scores. Default: `head_dim ** -0.5`.
        window: as in `decode_attention`, over all segments together: query `l` is at position `n - q_length + l`, where
            `n` is the sum of all `length_i`. Keys in no query's window are never read. A block mask is ignored for a
            segment that the window narrows.
        softcap: as in `decode_attention`.
        sinks: `[q_heads]`, as in `decode_attention`: each counts once, however many segments there are.
        batch_invariant: as in `decode_attention`. The last segment then has each sequence's own keys: its batch is `B`,
            without `rows`. The call with one sequence alone has the same segments, each with the row that this sequence
            reads. Block masks of all but the last segment are ignored.
        indices: for each segment None, which stands for all of its keys, or the keys of the segment that each query
            attends to: int32 or int64 `[B, 1 or kv_heads, q_length, picks]`, counted from the segment's first key;
            else as in `decode_attention`. To get them from the index of a key among all segments, subtract the number
            of keys before the segment: a segment skips the indices of other segments' keys.
        index_block, distinct_indices: as in `decode_attention`, for all segments.
        return_lse: return the attention state `(out, lse)` instead of `out`.

    Returns:
        `out` `[B, q_heads, q_length, value_dim]` in `query`'s dtype, contiguous; with `return_lse` also `lse`
        `[B, q_heads, q_length]`, as in `decode_attention`.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
        NotImplementedError: gradients are required, head_dim is too large for the CUDA kernel, or `batch_invariant`
            comes with a `softcap` on a CPU or with float64 on CUDA.

    Examples:
        >>> import torch, tatten
        >>> query = torch.randn(16, 8, 1, 64)  # 16 samples
        >>> prompt, suffix = torch.randn(2, 1, 2, 1000, 64), torch.randn(2, 16, 2, 50, 64)  # keys and values of each
        >>> out = tatten.bifurcated_attention(query, [prompt[0], suffix[0]], [prompt[1], suffix[1]])
        >>> key, value = (torch.cat((p.expand(16, -1, -1, -1), s), dim=2) for p, s in zip(prompt, suffix))
        >>> torch.allclose(out, tatten.decode_attention(query, key, value), atol=1e-5)
        True
    """
    for name, tensors in (("keys", keys), ("values", values), ("attn_masks", attn_masks), ("indices", indices)):
        optional = name in ("attn_masks", "indices")
        if isinstance(tensors, Tensor) or not (hasattr(tensors, "__len__") or (tensors is None and optional)):
            raise TypeError(f"`{name}` must be a sequence of Tensors, got {type(tensors).__name__}")
    if isinstance(block_masks, BlockMask):
        raise TypeError(f"`block_masks` must be a sequence of BlockMasks, got {type(block_masks).__name__}")
    masks = [None] * len(keys) if attn_masks is None else list(attn_masks)
    named = {f"{name}[{i}]": x for name, tensors in (("keys", keys), ("values", values)) for i, x in enumerate(tensors)}
    check_tensors(query=query, **named, **{f"attn_masks[{i}]": x for i, x in enumerate(masks) if x is not None})
    data: list[Tensor | None] = [None] * len(keys)
    if block_masks is not None:
        check_segments(keys, attn_masks=masks, block_masks=block_masks)
        for i, (block_mask, mask, key) in enumerate(zip(block_masks, masks, keys, strict=True)):
            data[i] = None if block_mask is None else data_of(block_mask, mask, key, i)
    groups = None if rows is None else _row_groups(query, keys, rows)
    op = torch.ops.tatten.bifurcated_attention.default
    if batch_invariant and data:  # a block mask depends on all sequences that share the segment
        data[:-1] = [None] * (len(data) - 1)
    segments = list(keys), list(values), masks, data
    options: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks, "batch_invariant": batch_invariant}
    if indices is not None:
        check_tensors(**{f"indices[{i}]": x for i, x in enumerate(indices) if x is not None})
        picks = list(indices) if distinct_indices else _distinct_picks(query, keys, indices, index_block)
        options |= {"indices": picks, "index_block": index_block}
    elif index_block != 1 or distinct_indices:
        raise ValueError(MISSING_INDICES)
    out, lse = op(query, *segments, scale, groups, **options)
    return (out, lse) if return_lse else out


def _distinct_picks(
    query: Tensor, keys: Sequence[Tensor], indices: Sequence[Tensor | None], index_block: int
) -> list[Tensor | None]:
    check_segments(keys, indices=indices)
    return [
        None if picks is None else distinct_picks(picks, query, key, index_block, f"indices[{i}]", f"keys[{i}]")
        for i, (picks, key) in enumerate(zip(indices, keys, strict=True))
    ]


def _row_groups(query: Tensor, keys: Sequence[Tensor], rows: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Check the rows of each segment, and return the row groups that they make."""
    if isinstance(rows, Tensor):
        raise TypeError(f"`rows` must be a sequence of Tensors, got {type(rows).__name__}")
    check_segments(keys, rows=rows)
    groups: list[Tensor | None] = [None] * len(keys)
    for i, (key, segment_rows) in enumerate(zip(keys, rows, strict=True)):
        if segment_rows is not None:
            check_tensors(**{f"rows[{i}]": segment_rows})
            check_rows_fit(segment_rows, query, key, i)
            queries = query.shape[1] // key.shape[1] * query.shape[2]
            groups[i] = torch.ops.tatten.row_groups.default(segment_rows, key.shape[0], queries)
    return groups
