"""Attention of a layer in continuous batching, over the pages of its cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tatten.integrations.transformers.continuous_batching.steps import ChunkStep, RingStep, Step
from tatten.ops.decode import decode_attention
from tatten.ops.merge import merge_state
from tatten.ops.paged_attention import paged_attention

PAGES_ARGUMENT = "tatten_pages"  # the argument in which the cache passes pages to attention
BATCHING_ARGUMENT = "write_index"  # an argument that only continuous batching passes
UNSUPPORTED = ("attention_mask", "position_bias", "indices", "block_indices", "sinks")


@dataclass(frozen=True)
class LayerPages:
    """The pools of a layer, and the tables of a step.

    Attributes:
        key, value: the pools, `[pages, page, kv_heads, head_dim]`.
        step: the pages of each request, which all layers of a group share.
    """

    key: Tensor
    value: Tensor
    step: Step

    def write(self, key: Tensor, value: Tensor) -> None:
        """Store the new keys and values `[tokens, kv_heads, head_dim]`."""
        for pool, new in ((self.key, key), (self.value, value)):
            pool.flatten(0, 1).index_copy_(0, self.step.slots, new)

    @property
    def as_slots(self) -> tuple[Tensor, Tensor]:
        """The pools, viewed as pages of one key."""
        key, value = (pool.flatten(0, 1).unsqueeze(1) for pool in (self.key, self.value))
        return key, value


@torch.compiler.disable
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    pages: LayerPages | None,
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
            f"{type(module).__name__} must have separate keys in each layer for continuous batching, got a layer that "
            "shares the keys of another"
        )
    _check(module, pages.step, sliding_window, dropout, kwargs | {"attention_mask": attention_mask})
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if s_aux is not None and s_aux.dtype != query.dtype:
        s_aux = s_aux.float()
    softmax: dict[str, Any] = {"scale": scaling, "softcap": softcap}
    step = pages.step
    if isinstance(step, RingStep):
        # Attend first: new keys overwrite old keys that the chunk attends to.
        out = _attend_ring(query, key, value, pages, step, s_aux, softmax)
        pages.write(key, value)
        return out[None], None
    pages.write(key, value)
    if isinstance(step, ChunkStep):
        options = softmax | {"window": None if step.window else sliding_window, "sinks": s_aux}
        options["shared_pages"] = step.shared
        out = paged_attention(query, pages.key, pages.value, step.table, step.starts, step.lens, **options)
        return out[None], None
    # In a ring, the new key has replaced the key that left the window, so all keys count.
    out = decode_attention(
        query.unsqueeze(2),
        pages.key,
        pages.value,
        block_table=step.table,
        kv_lens=step.lens,
        shared_pages=step.shared,
        window=None if step.window else sliding_window,
        sinks=s_aux,
        **softmax,
    )
    return out.transpose(1, 2).flatten(0, 1)[None], None


def _attend_ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: LayerPages,
    step: RingStep,
    sinks: Tensor | None,
    softmax: dict[str, Any],
) -> Tensor:
    """Attend to the new keys and to the keys that the ring held before them, and merge the two states."""
    pools = key.unsqueeze(1), value.unsqueeze(1)
    out, lse = paged_attention(
        query,
        *pools,
        step.new_table,
        step.starts,
        step.new_lens,
        window=step.window,
        sinks=sinks,
        return_lse=True,
        **softmax,
    )
    if step.old_table is None or step.old_lens is None:
        return out
    order = step.backwards
    old_query = query if order is None else query[order]
    old = paged_attention(
        old_query, *pages.as_slots, step.old_table, step.starts, step.old_lens, return_lse=True, **softmax
    )
    old_out, old_lse = old if order is None else (x[order] for x in old)
    return merge_state(out, lse, old_out, old_lse)[0]


def _check(module: nn.Module, step: Step, sliding_window: int | None, dropout: float, kwargs: dict[str, Any]) -> None:
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
    window = step.window
    if window is not None and sliding_window not in (None, window):
        raise NotImplementedError(
            f"`sliding_window` of {type(module).__name__} must be the {window} tokens that the cache keeps, got "
            f"{sliding_window}"
        )
