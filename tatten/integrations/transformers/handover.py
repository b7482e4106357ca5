"""From a cache to the attention of a model: whose share of the latents a layer has expanded, and a prefill that runs.

Models of multi-head latent attention get latents from their cache and expand them, token by token, to the keys and
values that attention gets. As DTensors latents would not come through that: PyTorch multiplies none by a weight that is
a plain tensor, and `new_empty` of another width would be replicated, so that all latents were gathered. So each rank
expands its own as plain tensors, which do not say that they are a share.

A step may fail between its cache and its attention. So a share is for the attention of the layer that wrote it, over as
many keys, in the same forward pass: the masks of the next one, another layer and any attention drop it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

if TYPE_CHECKING:
    from tatten.caches.layout import OneDevice
    from tatten.caches.striped_prefill import StripedPrefill


class LayerShare(NamedTuple):
    """A layer's share of the keys that all ranks hold: `keys` of them, dealt out as `layout` says."""

    layout: OneDevice
    layer: int
    keys: int


class _Given(threading.local):  # Dynamo traces this, unlike a ContextVar
    def __init__(self) -> None:  # in each thread: Dynamo guards on which attributes there are
        self.share: LayerShare | None = None
        self.prefill: StripedPrefill | None = None


_given = _Given()


def hand_over(share: LayerShare | None) -> None:
    """Tell the next attention of this thread that its keys and values are a share; None says that they are whole."""
    _given.share = share


def take_over(module: nn.Module, key: Tensor) -> OneDevice | None:
    """Return the layout of the share that a layer handed over to its attention, once; None where keys are whole."""
    share = _given.share
    _given.share = None
    if share is None or (share.layer, share.keys) != (getattr(module, "layer_idx", None), key.shape[2]):
        return None
    return share.layout


def running_prefill() -> StripedPrefill | None:
    """The prefill over several ranks for which this thread runs a model; else None."""
    return _given.prefill


@contextmanager
def run_prefill(prefill: StripedPrefill) -> Iterator[None]:
    """Have caches, masks and attention of this thread do their part of a prefill over several ranks."""
    _given.prefill = prefill
    try:
        yield
    finally:
        _given.prefill = None
