"""Signatures of implementations, and adapters to schemas: one `AttentionVariant` holds the options of the softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tatten.ops.states import State
from tatten.ops.variant import PLAIN, AttentionVariant

OpKernel = Callable[..., Any]
DecodeImplementation = Callable[
    [
        Tensor,  # query
        Tensor,  # key
        Tensor,  # value
        Tensor | None,  # attn_mask
        Tensor | None,  # kv_lens
        float | None,  # scale
        Tensor | None,  # block_mask
        AttentionVariant,
        str,  # provider
        bool,  # batch_invariant
    ],
    State,
]
BifurcatedImplementation = Callable[
    [
        Tensor,  # query
        Sequence[Tensor],  # keys
        Sequence[Tensor],  # values
        Sequence[Tensor | None],  # attn_masks
        Sequence[Tensor | None],  # block_masks
        float | None,  # scale
        Sequence[Tensor | None] | None,  # row_groups
        AttentionVariant,
        bool,  # batch_invariant
    ],
    State,
]
LatentImplementation = Callable[
    [
        Tensor,  # query
        Tensor | None,  # query_rope
        Tensor,  # latent
        Tensor | None,  # key_rope
        Tensor | None,  # attn_mask
        Tensor | None,  # kv_lens
        float,  # scale
        Tensor | None,  # block_mask
        AttentionVariant,
        torch.dtype,  # of out
        bool,  # batch_invariant
    ],
    State,
]


def decode_kernel(implementation: DecodeImplementation) -> OpKernel:
    """Adapt an implementation of `tatten::decode_attention` to its schema: it gets the variant as one value."""

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
    ) -> State:
        variant = PLAIN  # making an equal one would take three times as long as these comparisons
        if not (window is None and softcap is None and sinks is None and key_scale is None and value_scale is None):
            variant = AttentionVariant(window, softcap, sinks, key_scale, value_scale)
        given = query, key, value, attn_mask, kv_lens, scale, block_mask
        return implementation(*given, variant, provider, batch_invariant)

    return kernel


def bifurcated_kernel(implementation: BifurcatedImplementation) -> OpKernel:
    """Adapt an implementation of `tatten::bifurcated_attention` to its schema."""

    def kernel(
        query: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        attn_masks: Sequence[Tensor | None],
        block_masks: Sequence[Tensor | None],
        scale: float | None = None,
        row_groups: Sequence[Tensor | None] | None = None,
        *,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        batch_invariant: bool = False,
    ) -> State:
        variant = AttentionVariant(window, softcap, sinks)
        segments = keys, values, attn_masks, block_masks
        return implementation(query, *segments, scale, row_groups, variant, batch_invariant)

    return kernel


def latent_kernel(implementation: LatentImplementation) -> OpKernel:
    """Adapt an implementation of `tatten::latent_attention` to its schema."""

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
    ) -> State:
        variant, out_dtype = AttentionVariant(window, softcap, sinks), out_dtype or query.dtype
        latents = (query, query_rope, latent, key_rope)
        return implementation(*latents, attn_mask, kv_lens, scale, block_mask, variant, out_dtype, batch_invariant)

    return kernel
