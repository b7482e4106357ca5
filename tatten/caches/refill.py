"""A fork or a selection into the memory of an old one: what they must have in common, and the copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tatten.caches.layer import Layer
from tatten.caches.prompts import Prompts


def refill(layers: Sequence[Layer], old_prompts: Prompts, others: Sequence[Layer], prompts: Prompts) -> None:
    """Make the layers and prompts of an old fork, `into`, those of a new one.

    Raises:
        ValueError: the old fork has other shapes, or some of this is in its memory. Nothing has been written.
    """
    _same("a cache with as many layers", len(layers), len(others))
    kinds = ({name: _kind(tensor) for name, tensor in x.arguments.items()} for x in (old_prompts, prompts))
    _same("a fork with prompts of the same kind", *kinds)
    for index, (layer, new) in enumerate(zip(layers, others, strict=True)):
        _check_layer(index, layer, new)
    for layer, new in zip(layers, others, strict=True):
        _refill_layer(layer, new)
    for name, tensor in old_prompts.arguments.items():
        tensor.copy_(prompts.arguments[name])


def _refill_layer(layer: Layer, new: Layer) -> None:
    """Copy segments, rows and suffix into the tensors of a layer, and empty the suffix of a fork."""
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
    _same("a fork with the same batch and capacity", *sizes)
    _same("a fork with levels of the same lengths", layer.lengths, new.lengths)
    for level, (old_segment, segment) in enumerate(zip(layer.segments, new.segments, strict=True)):
        for name, old, tensor in zip(("keys", "values"), old_segment, segment, strict=True):
            where = f"level {level} of layer {index}"
            _same(f"a fork with the same {name} in {where}", _kind(old), _kind(tensor))
            if any(_share(tensor, x) and not (x is old and x.is_set_to(tensor)) for x in layer.tensors):
                raise ValueError(
                    f"`into` must have memory of its own, got one that shares rows or slots with the {name} to be "
                    f"copied into {where}"
                )
        if layer.rows[level] is None and new.rows[level] is not None:
            raise ValueError(f"`into` must have rows in level {level}, as the given sequences, got none")


def _aligned(batch: int, stored: Tensor) -> Tensor:
    """The rows of aligned blocks."""
    return torch.arange(batch, device=stored.device) // (batch // stored.shape[0])


def _kind(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype, str]:
    return tuple(tensor.shape), tensor.dtype, str(tensor.device)


def _share(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0


def _same(what: str, got: object, want: object) -> None:
    if got != want:
        raise ValueError(f"`into` must be {what}, {want}, got {got}")
