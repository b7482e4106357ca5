"""Write a fork or a selection into the memory of an old one, after a check that the two match."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tatten.caches.layer import Layer
from tatten.caches.prompts import Prompts


def refill(
    old_layers: Sequence[Layer], old_prompts: Prompts, new_layers: Sequence[Layer], new_prompts: Prompts
) -> None:
    """Copy the layers and prompts of a new fork into those of an old one, the argument `into`.

    Raises:
        ValueError: the old fork has other shapes, or tensors of the new fork are in its memory. Nothing has been
            written.
    """
    _check_equal("a cache with the same number of layers", len(old_layers), len(new_layers))
    metadata = ({name: _metadata(tensor) for name, tensor in x.arguments.items()} for x in (old_prompts, new_prompts))
    _check_equal("a fork with prompts of the same kind", *metadata)
    for index, (old, new) in enumerate(zip(old_layers, new_layers, strict=True)):
        _check_layer(index, old, new)
    for old, new in zip(old_layers, new_layers, strict=True):
        _refill_layer(old, new)
    for name, tensor in old_prompts.arguments.items():
        tensor.copy_(new_prompts.arguments[name])


def _refill_layer(layer: Layer, new: Layer) -> None:
    """Copy segments, rows and suffix into the tensors of `layer`, whose suffix is cleared if `new` has none."""
    for old_segment, segment in zip(layer.segments, new.segments, strict=True):
        for old, tensor in zip(old_segment, segment, strict=True):
            if not old.is_set_to(tensor):
                old.copy_(tensor)
    for level, (old_rows, rows) in enumerate(zip(layer.rows, new.rows, strict=True)):
        if old_rows is not None:
            old_rows.copy_(_aligned(new.batch_size, new.segments[level][0]) if rows is None else rows)
    if new.keys is None or new.values is None:
        layer.clear()
    else:
        for old, tensor in zip(layer.tensors[-2:], (new.keys, new.values), strict=True):
            old.copy_(tensor)
        layer.length.copy_(new.length)
    layer.frozen = 0


def _check_layer(index: int, layer: Layer, new: Layer) -> None:
    sizes = [(x.batch_size, x.slots or 0) for x in (layer, new)]
    _check_equal("a fork with the same batch and capacity", *sizes)
    _check_equal("a fork with levels of the same lengths", layer.lengths, new.lengths)
    for level, (old_segment, segment) in enumerate(zip(layer.segments, new.segments, strict=True)):
        for name, old, tensor in zip(("keys", "values"), old_segment, segment, strict=True):
            where = f"level {level} of layer {index}"
            _check_equal(f"a fork with the same {name} in {where}", _metadata(old), _metadata(tensor))
            if any(_share_storage(tensor, x) and not (x is old and x.is_set_to(tensor)) for x in layer.tensors):
                raise ValueError(
                    f"`into` must have memory of its own, got one that shares rows or slots with the {name} to be "
                    f"copied into {where}"
                )
        if layer.rows[level] is None and new.rows[level] is not None:
            raise ValueError(f"`into` must have rows in level {level}, as the new selection has, got none")


def _aligned(batch: int, stored: Tensor) -> Tensor:
    """Return the row that each sequence reads in aligned blocks, `[batch]`."""
    return torch.arange(batch, device=stored.device) // (batch // stored.shape[0])


def _metadata(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype, str]:
    return tuple(tensor.shape), tensor.dtype, str(tensor.device)


def _share_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0


def _check_equal(requirement: str, actual: object, expected: object) -> None:
    if actual != expected:
        raise ValueError(f"`into` must be {requirement}, {expected}, got {actual}")
