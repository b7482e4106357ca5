"""Pass state of a thread from a cache to the attention of a model: the share of latents, and the running prefill.

A model with multi-head latent attention gets latents from its cache. It expands them, token by token, to the keys and
values for attention. DTensors do not survive this: PyTorch can't multiply them by a weight that is a plain tensor, and
`new_empty` of another width would be replicated, which gathers all latents. So each rank expands its share as plain
tensors. These do not tell attention that they are a share, so the cache hands the layout over here.

A step may fail between its cache and its attention. So a share is valid only for the attention of the layer that wrote
it, over the same number of keys, in the same forward pass. The next forward pass, another layer and any call of
attention drop it.
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
    """A rank's share of a layer's keys.

    Attributes:
        layout: the layout of the keys over the ranks.
        layer: index of the layer.
        keys: number of keys of this rank.
    """

    layout: OneDevice
    layer: int
    keys: int


class _ThreadState(threading.local):  # Dynamo traces this, unlike a ContextVar
    def __init__(self) -> None:  # sets all attributes in each thread, as Dynamo guards on their presence
        self.share: LayerShare | None = None
        self.prefill: StripedPrefill | None = None


_thread_state = _ThreadState()


def hand_over(share: LayerShare | None) -> None:
    """Set the share that the next attention of this thread gets; None if its keys and values are complete."""
    _thread_state.share = share


def take_over(module: nn.Module, key: Tensor) -> OneDevice | None:
    """Return the layout of the share that was handed over to a layer, and drop it; None if the keys are complete."""
    share = _thread_state.share
    _thread_state.share = None
    if share is None or (share.layer, share.keys) != (getattr(module, "layer_idx", None), key.shape[2]):
        return None
    return share.layout


def running_prefill() -> StripedPrefill | None:
    """Return the prefill over several ranks for which this thread runs a model, or None."""
    return _thread_state.prefill


@contextmanager
def run_prefill(prefill: StripedPrefill) -> Iterator[None]:
    """Make caches, masks and attention of this thread take part in a prefill over several ranks."""
    _thread_state.prefill = prefill
    try:
        yield
    finally:
        _thread_state.prefill = None
