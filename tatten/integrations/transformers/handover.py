"""From a cache to the attention of a model: whose share of the latents a layer has expanded, and a prefill that runs.

Models of multi-head latent attention get latents from their cache and expand them, token by token, to the keys and
values that attention gets. As DTensors latents would not come through that: PyTorch multiplies none by a weight that is
a plain tensor, and `new_empty` of another width would be replicated, so that all latents were gathered. So each rank
expands its own as plain tensors, which do not say that they are a share.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tatten.caches.sharded_layer import Interleaved
    from tatten.caches.striped_prefill import StripedPrefill


class _Given(threading.local):  # Dynamo traces this, unlike a ContextVar
    def __init__(self) -> None:  # in each thread: Dynamo guards on which attributes there are
        self.layout: Interleaved | None = None
        self.prefill: StripedPrefill | None = None


_given = _Given()


def hand_over(layout: Interleaved | None) -> None:
    """Tell the next attention of this thread that its keys and values are a share; None says that they are whole."""
    _given.layout = layout


def take_over() -> Interleaved | None:
    """Return what was handed over, once."""
    layout = _given.layout
    _given.layout = None
    return layout


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
