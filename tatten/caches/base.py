"""The base of the caches: layers, the mask and positions of a step, and selection in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tatten.caches.arguments import check_positive
from tatten.caches.layer import Layer, SelectedRows
from tatten.caches.layers import select_layers_
from tatten.caches.layout import ONE_DEVICE, OneDevice
from tatten.caches.prompts import Prompts
from tatten.caches.selection import Selection, expand_to_batch

if TYPE_CHECKING:
    from tatten.caches.agreement import Agreement


class BaseCache:
    """Keys and values of all layers; all shapes are fixed, except while a root grows, and lengths are on the device.

    Attributes:
        layers: one for each layer of the model.
        prompts: the tokens of the prompts that take part in attention.
        layout: the tokens that this rank stores.
        agreement: checks that all ranks get the same calls; None for a cache without this check.
        device: the device of `mask` and `positions` before the first tokens.
    """

    layers: list[Layer]
    prompts: Prompts
    layout: OneDevice = ONE_DEVICE
    agreement: Agreement | None = None
    device: torch.device | str | None = None

    @property
    def batch_size(self) -> int:
        """Number of sequences; 0 before the first tokens."""
        return self.layers[0].batch_size

    @property
    def capacity(self) -> int:
        """Number of tokens that each sequence can hold on all ranks together, since the last fork; 0 before a fork."""
        return self.layers[0].capacity

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values on this rank. Each prefix counts once; of a parent's suffix, the used slots."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors)

    def mask(self, q_len: int = 1) -> Tensor:
        """Return the bool mask of the current step, True where a query attends to a key.

        Call it before the last layer gets the step's keys.

        Returns:
            `[1 or batch, 1, q_len, total]`: causal, without unused slots and padding. `total` is the length of the keys
            that a layer will return: the prefix and `capacity`, or before a fork the tokens so far and `q_len`. Over a
            mesh the mask is a DTensor, sharded as these keys.

        Raises:
            ValueError: `q_len` is below 1 or, which graphs do not check, exceeds the free slots.
            TypeError: `q_len` is not an int.
        """
        tokens, total = self._step(q_len)
        last = self.layers[-1]
        # The first tokens attend to each other as plain tensors, before they are sharded.
        layout = self.layout if last.static or last.segments else ONE_DEVICE
        places = torch.arange(layout.rank, total, layout.ranks, device=tokens.device)
        visible = (places <= tokens[:, None])[None, None]
        if (real := self.prompts.real(self._prompt_length(total), total)) is not None:
            visible = visible & self._by_sequence(real[:, layout.local_from(0)])[:, None, None]
        return layout.mask(visible)

    def positions(self, q_len: int = 1) -> Tensor:
        """Return the position ids of the step's tokens, int64 `[1 or batch, q_len]`, not counting padding.

        Raises the errors of `mask`.
        """
        tokens, total = self._step(q_len)
        positions = self.prompts.positions(tokens, self._prompt_length(total))
        return self._by_sequence(positions) if self.prompts.arguments else positions

    def select_(self, indices: Sequence[int] | Tensor) -> None:
        """Select sequences in place, as beam search does at each step. If the batch size stays, so do the addresses.

        Args:
            indices: ints, or an integer tensor with one dimension. The values of a tensor on an accelerator are never
                read on the host, and not checked.

        Raises:
            IndexError: there is no such sequence.
            ValueError: `indices` is empty or has another number of dimensions, or the cache is empty.
            TypeError: `indices` holds something other than integers.
        """
        selection = self._selection(indices)
        self.prompts = self._selected_prompts(selection, select_layers_(self.layers, selection))

    def _layer(self, layer: int) -> Layer:
        if not 0 <= layer < len(self.layers):
            raise IndexError(f"`layer` must be 0 to {len(self.layers) - 1}, got {layer}")
        return self.layers[layer]

    def _step(self, q_len: int) -> tuple[Tensor, int]:
        """Return the places of the step's tokens, `[q_len]`, and `total`.

        They follow from the last layer, which is updated last, so that they are the same throughout a step.
        """
        check_positive("q_len", q_len)
        last = self.layers[-1]
        prefix = last.prefix_length
        if last.static:
            last.check_room(q_len)
            new = torch.arange(q_len, device=last.length.device)
            return prefix + last.length + new, prefix + last.capacity
        stored = self.layers[0].tensors
        return torch.arange(prefix, prefix + q_len, device=stored[0].device if stored else self.device), prefix + q_len

    def _prompt_length(self, total: int) -> int:
        last = self.layers[-1]
        return last.lengths[0] if last.static and last.lengths else total

    def _by_sequence(self, of_prompts: Tensor) -> Tensor:
        """Expand a tensor of the prompts, `[G, ...]`, to one entry for each sequence, `[batch, ...]`."""
        rows = self.layers[0].rows[0] if self.layers[0].static and self.layers[0].rows else None
        return expand_to_batch(of_prompts, self.batch_size or of_prompts.shape[0], rows)

    def _selection(self, indices: Sequence[int] | Tensor) -> Selection:
        """Return the selection of `indices`, checked on a mesh against those of other ranks."""
        try:
            selection = Selection(indices, self.batch_size)
        except (ValueError, TypeError, IndexError):
            if self.agreement is not None:
                self.agreement.check_selection(None, self.batch_size)
            raise
        if self.agreement is not None:
            self.agreement.check_selection(selection, self.batch_size)
        return selection

    def _selected_prompts(self, selection: Selection, kept: SelectedRows) -> Prompts:
        """Return the prompts in the order of the root's rows: after a fork the rows that are kept, before it the
        selected sequences.
        """
        return self.prompts.map(
            (lambda prompts: prompts[kept[0][0]]) if self.layers[0].static and kept else selection.take
        )
