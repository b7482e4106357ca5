"""A fork into the memory of an old one: what they must have in common, and the copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tatten.caches.prompts import Prompts

if TYPE_CHECKING:
    from tatten.caches.shared_prefix import SharedPrefixCache
    from tatten.caches.shared_prefix_layer import Inherited, SharedPrefixLayer


def check_refill(into: SharedPrefixCache, inherited: Sequence[Inherited], prompts: Prompts) -> None:
    """Raise ValueError unless `into` is a fork of just these shapes, whose memory nothing of this is in."""
    _same("a cache with as many layers", len(into.layers), len(inherited))
    held = {name: _kind(tensor) for name, tensor in into.prompts.given.items()}
    _same("a fork with prompts of the same kind", held, {name: _kind(tensor) for name, tensor in prompts.given.items()})
    for index, (layer, new) in enumerate(zip(into.layers, inherited, strict=True)):
        _check_layer(index, layer, new)


def refill(into: SharedPrefixCache, inherited: Sequence[Inherited], prompts: Prompts) -> SharedPrefixCache:
    """Copy segments, rows and prompts into the tensors of `into`, empty its suffixes, and return it."""
    for layer, new in zip(into.layers, inherited, strict=True):
        for held, segment in zip(layer.segments, new.segments, strict=True):
            for old, tensor in zip(held, segment, strict=True):
                if not old.is_set_to(tensor):
                    old.copy_(tensor)
        for level, (old_rows, rows) in enumerate(zip(layer.rows, new.rows, strict=True)):
            if old_rows is not None:
                old_rows.copy_(_aligned(new.batch, new.segments[level][0]) if rows is None else rows)
        for tensor in (layer.keys, layer.values, layer.length):
            tensor.zero_()
        layer.frozen = 0
    for name, held_prompts in into.prompts.given.items():
        held_prompts.copy_(prompts.given[name])
    return into


def _check_layer(index: int, layer: SharedPrefixLayer, new: Inherited) -> None:
    sizes = (layer.keys.shape[0], layer.keys.shape[2]) if layer.forked else (layer.batch_size, 0)
    _same("a fork with the same batch and capacity", sizes, (new.batch, new.slots))
    _same("a fork with levels of the same lengths", layer.lengths, new.lengths)
    for level, (held, segment) in enumerate(zip(layer.segments, new.segments, strict=True)):
        for name, old, tensor in zip(("keys", "values"), held, segment, strict=True):
            where = f"level {level} of layer {index}"
            _same(f"a fork with the same {name} in {where}", _kind(old), _kind(tensor))
            if any(_share(tensor, x) and not (x is old and x.is_set_to(tensor)) for x in layer.tensors):
                raise ValueError(
                    f"`into` must have memory of its own, got one that shares rows or slots with the {name} to be "
                    f"copied into {where}"
                )
        if layer.rows[level] is None and new.rows[level] is not None:
            raise ValueError(f"`into` must have rows in level {level}, as the sequences to fork, got none")


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
