"""The arguments that change an attention call's softmax, or the meaning of its keys and values, as one value."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AttentionVariant(NamedTuple):
    """The arguments of `tatten.decode_attention` that travel together below the op; all None is plain attention.

    The word is FlashInfer's. It is a tuple because `tatten.ops.cuda.launcher.by_layout` keys tuples by their contents.
    """

    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        """The arguments that are tensors, by name."""
        return {"sinks": self.sinks, "key_scale": self.key_scale, "value_scale": self.value_scale}


PLAIN = AttentionVariant()
