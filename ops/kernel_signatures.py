"""Adapters from the schemas of the attention ops to their implementations.

A schema is a flat list of arguments, and an implementation takes an `AttentionCall`. In this module, a *kernel* is a
function with the arguments of a schema, which PyTorch's dispatcher calls. It is not a GPU kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tatten.ops.call import BIFURCATED, DECODE, LATENT, Attend, AttentionCall, KeyValue, check_segments
from tatten.ops.pages import heads_first

OpKernel = Callable[..., Any]
_tuple = tuple.__new__  # makes a named tuple in half the time that its constructor takes


def decode_kernel(attend: Attend) -> OpKernel:
    """Return a function with the schema of `tatten::decode_attention` that calls `attend`."""

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        kv_lens: Tensor | None = None,
        scale: float | None = None,
        block_mask: Tensor | None = None,
        *,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
        provider: str = "auto",
        batch_invariant: bool = False,
        indices: Tensor | None = None,
        index_block: int = 1,
        rest_bias: float | None = None,
        block_table: Tensor | None = None,
        shared_pages: Tensor | None = None,
    ) -> Any:
        if block_table is not None:
            key, value = heads_first(key), heads_first(value)
            key_scale, value_scale = (x if x is None else heads_first(x) for x in (key_scale, value_scale))
        masks = attn_mask, kv_lens, block_mask
        pages = block_table, shared_pages
        stored = _tuple(KeyValue, (key, value, *masks, None, key_scale, value_scale, None, indices, *pages))
        softmax, picks = (scale, window, softcap, sinks), (index_block, rest_bias)
        return attend(
            _tuple(AttentionCall, (DECODE, query, (stored,), *softmax, None, None, provider, batch_invariant, *picks))
        )

    return kernel


def bifurcated_kernel(attend: Attend) -> OpKernel:
    """Return a function with the schema of `tatten::bifurcated_attention` that calls `attend`.

    The function raises ValueError if `keys` is empty, or if another list has a different number of entries.
    """

    def kernel(
        query: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        attn_masks: Sequence[Tensor | None] | None = None,
        block_masks: Sequence[Tensor | None] | None = None,
        scale: float | None = None,
        row_groups: Sequence[Tensor | None] | None = None,
        *,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        batch_invariant: bool = False,
        indices: Sequence[Tensor | None] | None = None,
        index_block: int = 1,
    ) -> Any:
        none = [None] * len(keys)
        masks, blocks = none if attn_masks is None else attn_masks, none if block_masks is None else block_masks
        groups, picks = row_groups or none, none if indices is None else indices
        check_segments(keys, values=values, attn_masks=masks, block_masks=blocks, row_groups=groups, indices=picks)
        if not keys:
            raise ValueError("`keys` must hold at least one segment, got none")
        lens = scales = rope = table = shared = None
        segments = tuple(
            [
                _tuple(KeyValue, (*stored, lens, block_mask, rows, scales, scales, rope, segment_picks, table, shared))
                for *stored, block_mask, rows, segment_picks in zip(
                    keys, values, masks, blocks, groups, picks, strict=True
                )
            ]
        )
        softmax, options = (scale, window, softcap, sinks), ("auto", batch_invariant, index_block, None)
        return attend(_tuple(AttentionCall, (BIFURCATED, query, segments, *softmax, None, None, *options)))

    return kernel


def latent_kernel(attend: Attend) -> OpKernel:
    """Return a function with the schema of `tatten::latent_attention` that calls `attend`."""

    def kernel(
        query: Tensor,
        query_rope: Tensor | None,
        latent: Tensor,
        key_rope: Tensor | None,
        attn_mask: Tensor | None = None,
        kv_lens: Tensor | None = None,
        *,
        scale: float,
        block_mask: Tensor | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        batch_invariant: bool = False,
        indices: Tensor | None = None,
        index_block: int = 1,
        rest_bias: float | None = None,
        block_table: Tensor | None = None,
    ) -> Any:
        if block_table is not None:
            latent, key_rope = heads_first(latent), key_rope if key_rope is None else heads_first(key_rope)
        masks = attn_mask, kv_lens, block_mask
        stored = _tuple(KeyValue, (latent, latent, *masks, None, None, None, key_rope, indices, block_table, None))
        softmax, options = (scale, window, softcap, sinks), ("auto", batch_invariant, index_block, rest_bias)
        return attend(_tuple(AttentionCall, (LATENT, query, (stored,), *softmax, query_rope, out_dtype, *options)))

    return kernel


def _unchanged(call: AttentionCall) -> Any:
    return call


# Each takes the arguments of an op and returns them as an `AttentionCall`.
decode_call = decode_kernel(_unchanged)
bifurcated_call = bifurcated_kernel(_unchanged)
latent_call = latent_kernel(_unchanged)
