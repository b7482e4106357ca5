"""The pages of a layer in a step, and attention over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tatten.integrations.transformers.continuous_batching.steps import ChunkStep, RingStep, Step
from tatten.ops.decode import decode_attention
from tatten.ops.merge import merge_state
from tatten.ops.paged_attention import paged_attention


@dataclass(frozen=True)
class LayerPages:
    """The pools of a layer, the tables of a step, and its new keys and values.

    Attributes:
        key, value: the pools, `[pages, page, kv_heads, head_dim]`.
        step: the pages of each request, which all layers of a group share.
        new_key, new_value: those that the model stores, `[1, kv_heads, tokens, head_dim]`.
    """

    key: Tensor
    value: Tensor
    step: Step
    new_key: Tensor
    new_value: Tensor

    def write(self, key: Tensor, value: Tensor) -> None:
        """Store the new keys and values `[tokens, kv_heads, head_dim]`."""
        pools = self.key.view(-1, *self.key.shape[2:]), self.value.view(-1, *self.value.shape[2:])
        if key.is_cuda:
            from tatten.ops.cuda.write_tokens import write_tokens_on_cuda_

            write_tokens_on_cuda_(*pools, key, value, self.step.slots)
        else:
            for pool, new in zip(pools, (key, value), strict=True):
                pool.index_copy_(0, self.step.slots, new)

    @property
    def as_slots(self) -> tuple[Tensor, Tensor]:
        """The pools, viewed as pages of one key."""
        key, value = (pool.flatten(0, 1).unsqueeze(1) for pool in (self.key, self.value))
        return key, value


@torch.compiler.disable  # the graph of a compiled step has the op of compiled.py instead
def attend(
    query: Tensor,
    pages: LayerPages,
    scale: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Store the new keys and values of a layer, and attend to its pages, as `attention` does."""
    query, key, value = (x[0].transpose(0, 1) for x in (query, pages.new_key, pages.new_value))
    softmax: dict[str, Any] = {"scale": scale, "softcap": softcap}
    step = pages.step
    if step.window is not None and sliding_window not in (None, step.window):
        raise NotImplementedError(
            f"`sliding_window` must be the {step.window} tokens that the cache keeps, got {sliding_window}"
        )
    if isinstance(step, RingStep):
        # Attend first: new keys overwrite old keys that the chunk attends to.
        out = _attend_ring(query, key, value, pages, step, sinks, softmax)
        pages.write(key, value)
        return out[None]
    pages.write(key, value)
    # In a ring, the new key has replaced the key that left the window, so all keys count.
    options = softmax | {"window": None if step.window else sliding_window, "sinks": sinks, "shared_pages": step.shared}
    if isinstance(step, ChunkStep):
        chunks: Tensor = paged_attention(query, pages.key, pages.value, step.table, step.starts, step.lens, **options)
        return chunks[None]
    decoded: Tensor = decode_attention(
        query.unsqueeze(2), pages.key, pages.value, block_table=step.table, kv_lens=step.lens, **options
    )
    return decoded.transpose(1, 2).flatten(0, 1)[None]


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
