"""Operations on all layers of a cache. They compute rows and lengths once for each device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from tatten.caches.layer import Layer, SelectedRows
from tatten.caches.selection import Selection
from tatten.ops.sizes import ceil_div

T = TypeVar("T")
Layers = list[Layer]


def used_slots(layers: Layers, name: str) -> int:
    """Return the number of used slots of the suffixes, or 0 before a fork. Synchronizes once for all layers.

    Raises:
        ValueError: `name` was called before the prefill or in the middle of a step.
    """
    empty = [index for index, layer in enumerate(layers) if not layer.segments]
    if empty:
        raise ValueError(f"`{name}` needs a prefill of all {len(layers)} layers, got none in layers {empty}")
    lengths = [layer.prefix_length for layer in layers]
    if layers[0].static:
        device = layers[0].length.device
        lengths = torch.stack([layer.length.to(device) for layer in layers]).tolist()
    if len(set(lengths)) > 1:
        raise ValueError(f"`{name}` must come between steps, when all layers have the same length, got {lengths}")
    return lengths[0] if layers[0].static else 0


def fork_layers(layers: Layers, n: int, capacity: int, used: int) -> Layers:
    """Make layers of `n` children of each sequence, without slots. `used` is the number of used slots of each layer."""
    ranks = layers[0].layout.ranks
    capacity = ceil_div(capacity, ranks) * ranks
    rows = _on_each_device(layers, lambda layer: layer.inherited_rows(n, used))
    return [layer.fork(n, capacity, used, rows[layer.device]) for layer in layers]


def select_layers(layers: Layers, selection: Selection, narrow: bool) -> tuple[Layers, SelectedRows]:
    """Make layers of the selected sequences. Also return the rows of the segments that they keep."""
    kept = _on_each_device(layers, lambda layer: layer.selected_rows(selection, narrow))
    return [layer.select(selection, kept[layer.device]) for layer in layers], kept[layers[0].device]


def select_layers_(layers: Layers, selection: Selection) -> SelectedRows:
    """Select in place, and return the rows of the segments that are kept.

    If the batch size stays, the tensors of rows keep their addresses.
    """
    same_batch = len(selection) == layers[0].batch_size
    kept = _on_each_device(layers, lambda layer: layer.selected_rows(selection, narrow=not same_batch))
    if same_batch and layers[0].static:
        old_rows = _on_each_device(layers, lambda layer: layer.rows)
        kept = {device: _in_place(old_rows[device], new) for device, new in kept.items()}
    for layer in layers:
        layer.select_(selection, kept[layer.device])
    return kept[layers[0].device]


def _on_each_device(layers: Layers, compute: Callable[[Layer], T]) -> dict[torch.device, T]:
    return {device: compute(layer) for device, layer in {layer.device: layer for layer in layers}.items()}


def _in_place(old_rows: Sequence[Tensor | None], new: SelectedRows) -> SelectedRows:
    """Write new rows into the old tensors of rows, for segments that have both."""
    return [
        (stored, rows if old is None or rows is None else old.copy_(rows))
        for old, (stored, rows) in zip(old_rows, new, strict=True)
    ]
