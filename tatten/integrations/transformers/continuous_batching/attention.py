"""Attention "tatten" of a layer in continuous batching, over the pages of its cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tatten.integrations.transformers.continuous_batching.compiled import TracedPages
from tatten.integrations.transformers.continuous_batching.layer_pages import LayerPages, attend

PAGES_ARGUMENT = "tatten_pages"  # the argument in which the cache passes pages to attention
BATCHING_ARGUMENT = "write_index"  # an argument that only continuous batching passes
UNSUPPORTED = ("attention_mask", "position_bias", "indices", "block_indices", "sinks")


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    pages: LayerPages | TracedPages | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Store the new keys and values, `[1, kv_heads, tokens, head_dim]`, and attend to the pages.

    Returns:
        `[1, tokens, q_heads, head_dim]`.
    """
    if pages is None:
        raise NotImplementedError(
            f"{type(module).__name__} must have pages for continuous batching, got a layer that shares the keys of "
            "another, or whose manager was made for another attention"
        )
    if key is not pages.new_key or value is not pages.new_value:
        raise NotImplementedError(
            f"{type(module).__name__} must attend to the keys and values that it stores, got others: "
            'use attn_implementation="sdpa"'
        )
    _check(module, dropout, kwargs | {"attention_mask": attention_mask})
    if s_aux is not None and s_aux.dtype != query.dtype:
        s_aux = s_aux.float()
    if isinstance(pages, TracedPages):
        return pages.attend(query, scaling, sliding_window, softcap, s_aux), None
    return attend(query, pages, scaling, sliding_window, softcap, s_aux), None


def _check(module: nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    """Raise NotImplementedError if a model passes arguments that attention over pages does not support."""
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f'`{name}` must be None in continuous batching on attention "tatten", got one from '
                f'{type(module).__name__}: use attn_implementation="sdpa"'
            )
    if dropout or kwargs.get("output_attentions"):
        raise NotImplementedError(
            f'continuous batching on attention "tatten" has neither dropout nor attention weights, as '
            f"{type(module).__name__} asks for"
        )
