"""A fork into the memory of an old one: what they must have in common, and the copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tatten.caches.prompts import Prompts

if TYPE_CHECKING:
    from tatten.caches.shared_prefix import SharedPrefixCache
    from tatten.caches.shared_prefix_layer import Rows, Segment


def check_refill(
    into: SharedPrefixCache,
    segments: Sequence[tuple[Segment, ...]],
    rows: Sequence[Rows],
    prompts: Prompts,
    suffix: tuple[int, int],
) -> None:
    """Raise ValueError unless `into` is a fork of just these shapes, whose memory nothing of this is in.

    Args:
        segments, rows: of each layer.
        suffix: batch and capacity.
    """
    _same("a cache with as many layers", len(into.layers), len(segments))
    _same("a fork with the same batch and capacity", (into.batch_size, into.capacity), suffix)
    _same("a fork with as many levels", len(into.layers[0].segments), len(segments[0]))
    describe = {name: (tuple(x.shape), x.dtype, str(x.device)) for name, x in prompts.given.items()}
    held = {name: (tuple(x.shape), x.dtype, str(x.device)) for name, x in into.prompts.given.items()}
    _same("a fork with prompts of the same kind", held, describe)
    for index, (layer, new, new_rows) in enumerate(zip(into.layers, segments, rows, strict=True)):
        for level, (old_segment, segment) in enumerate(zip(layer.segments, new, strict=True)):
            for name, old, tensor in zip(("keys", "values"), old_segment, segment, strict=True):
                want = tuple(tensor.shape), tensor.dtype, str(tensor.device)
                what = f"a fork with the same {name} in level {level} of layer {index}"
                _same(what, (tuple(old.shape), old.dtype, str(old.device)), want)
                if any(_share(tensor, x) and not (x is old and x.is_set_to(tensor)) for x in layer.tensors):
                    raise ValueError(
                        f"`into` must have memory of its own, got one that shares rows or slots with the {name} to be "
                        f"copied into level {level} of layer {index}"
                    )
            if layer.rows[level] is None and new_rows[level] is not None:
                raise ValueError(f"`into` must have rows in level {level}, as the sequences to fork, got none")


def refill(
    into: SharedPrefixCache, segments: Sequence[tuple[Segment, ...]], rows: Sequence[Rows], prompts: Prompts
) -> SharedPrefixCache:
    """Copy segments, rows and prompts into the tensors of `into`, empty its suffixes, and return it."""
    for layer, new, new_rows in zip(into.layers, segments, rows, strict=True):
        for old_segment, segment, old_rows, row in zip(layer.segments, new, layer.rows, new_rows, strict=True):
            for old, tensor in zip(old_segment, segment, strict=True):
                if not old.is_set_to(tensor):
                    old.copy_(tensor)
            if old_rows is not None:
                old_rows.copy_(_aligned(layer.batch_size, segment[0]) if row is None else row)
        for tensor in (layer.keys, layer.values, layer.length):
            tensor.zero_()
        layer.frozen = 0
    for name, held in into.prompts.given.items():
        held.copy_(prompts.given[name])
    return into


def _aligned(batch: int, stored: Tensor) -> Tensor:
    """The rows of aligned blocks."""
    return torch.arange(batch, device=stored.device) // (batch // stored.shape[0])


def _share(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0


def _same(what: str, got: object, want: object) -> None:
    if got != want:
        raise ValueError(f"`into` must be {what}, {want}, got {got}")
