"""Prefill a cache over a mesh: of the n ranks that share the sequence, rank r runs tokens r, r + n, ...

The cache stores the keys and values of these tokens on the same rank, so they are written straight into its slots. The
prompt may come in chunks. All ranks run the same number of tokens of a chunk, of which the last may be padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tatten.caches.interleaved import Interleaved
from tatten.caches.layer import Layer
from tatten.ops.distributed.striped import striped_attention
from tatten.ops.sizes import ceil_div


class StripedPrefill:
    """A prefill of `tokens` tokens into the layers of one cache, which stay empty until `finish`.

    Attributes:
        width: number of tokens of the current chunk that this rank runs; the same on all ranks.
        stored: number of tokens of earlier chunks that each rank has stored.
    """

    def __init__(self, layout: Interleaved, layers: Sequence[Layer], tokens: int):
        self._layout, self._layers, self._tokens = layout, layers, tokens
        self._storage: dict[int, tuple[Tensor, Tensor]] = {}
        self._done: set[int] = set()
        self._attended = True  # whether `attend` has read the keys and values that were stored last
        self._ring = layout.ring
        self.width = self.stored = 0

    def chunks(self, size: int, device: torch.device) -> Iterator[Tensor]:
        """Yield the positions of this rank's tokens of each chunk, `[width]`. Padding has the last token's position.

        Args:
            size: tokens of a chunk on all ranks together, a multiple of their number.
        """
        ranks = self._layout.ranks
        for start in range(0, self._tokens, size):
            self.stored = start // ranks
            self.width = ceil_div(min(size, self._tokens - start), ranks)
            self._done.clear()
            positions = start + self._layout.rank + ranks * torch.arange(self.width, device=device)
            yield positions.clamp(max=self._tokens - 1)  # a model's table of positions may have no more
            self._check_attended()
            missing = [index for index in range(len(self._layers)) if index not in self._done]
            if missing:
                raise ValueError(
                    f"`model` must give keys and values to each layer of the cache, got none for {missing}"
                )

    def store(self, layer: Layer, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's keys and values of the current chunk. Return all of this rank's so far, as views."""
        index = next((i for i, candidate in enumerate(self._layers) if candidate is layer), None)
        if index is None:
            raise ValueError("`model` must be called with the cache that is prefilled, got keys for another one")
        if index in self._done:
            raise ValueError(f"`model` must give keys and values to each layer once, got them twice for layer {index}")
        self._check_attended()
        if key.shape[2] != self.width:
            raise ValueError(f"`key` must have the {self.width} tokens of this rank, got shape {tuple(key.shape)}")
        if index not in self._storage:
            self._storage[index] = layer.storage_for(key, value, self._tokens)
        self._done.add(index)
        self._attended = False
        end = self.stored + self.width
        for storage, new in zip(self._storage[index], (key, value), strict=True):
            storage[:, :, self.stored : end].copy_(new)
        keys, values = (storage[:, :, :end] for storage in self._storage[index])
        return keys, values

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
        """Compute causal attention of this rank's queries of the current chunk to the tokens of all ranks.

        This is a collective of the ranks that share the sequence. `keys` and `values` are the results of `store`.
        """
        if (query.shape[2], keys.shape[2]) != (self.width, self.stored + self.width):
            raise ValueError(
                f"attention must be of {self.width} tokens to {self.stored + self.width}, got query of shape "
                f"{tuple(query.shape)} and key of shape {tuple(keys.shape)}"
            )
        self._attended = True
        return striped_attention(query, keys, values, self._ring, scale)

    def finish(self, last: Tensor) -> Tensor:
        """Give the stored tokens to the layers. Return `last` of the rank that runs the last token, on all ranks."""
        last = self._layout.broadcast(last.contiguous(), self._tokens - 1)
        for index, layer in enumerate(self._layers):
            layer.adopt(self._storage[index], self._tokens)
        return last

    def abandon(self) -> None:
        """Clear the slots that were written. They may be those of a cache that was used before."""
        for storage in self._storage.values():
            for tensor in storage:
                tensor[:, :, : self.stored + self.width].zero_()

    def _check_attended(self) -> None:
        """Raise ValueError if a layer did not call `attend`: its attention saw only the tokens of this rank."""
        if not self._attended:
            raise ValueError('`model` must call attention "tatten" in each layer, got one that did not')
