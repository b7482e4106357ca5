"""From a cache to the attention of the same layer: whose share of the latents a model has expanded in between.

Models of multi-head latent attention get latents from their cache and expand them, token by token, to the keys and
values that attention gets. As DTensors latents would not come through that: PyTorch multiplies none by a weight that is
a plain tensor, and `new_empty` of another width would be replicated, so that all latents were gathered. So each rank
expands its own as plain tensors, which do not say that they are a share.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tatten.caches.sharded_layer import Interleaved


class _Given(threading.local):  # Dynamo traces this, unlike a ContextVar
    layout: Interleaved | None = None


_given = _Given()


def hand_over(layout: Interleaved | None) -> None:
    """Tell the next attention of this thread that its keys and values are a share; None says that they are whole."""
    _given.layout = layout


def take_over() -> Interleaved | None:
    """Return what was handed over, once."""
    layout = _given.layout
    _given.layout = None
    return layout
