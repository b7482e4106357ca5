"""Keep `rope_deltas`, which a prefill of Qwen2-VL and others makes anew, at the address that a captured step reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

NAME = "rope_deltas"  # the differences between the positions of new tokens and their places in the text


class RopeDeltas:
    """The `rope_deltas` of a step's modules, in buffers. Modules have the buffers only while steps run."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @contextlib.contextmanager
    def in_buffers(self, model: nn.Module) -> Iterator[None]:
        """Copy the tensors of a model's modules to buffers, which take their places, and put them back at the end.

        A tensor that takes the place of a buffer meanwhile stays.
        """
        replaced: list[tuple[nn.Module, Tensor, Tensor]] = []
        try:
            for name, module in model.named_modules():
                x = vars(module).get(NAME)
                if isinstance(x, Tensor):
                    buffer = self._filled_with(x, name)
                    replaced.append((module, x, buffer))
                    setattr(module, NAME, buffer)
            yield
        finally:
            for module, x, buffer in replaced:
                if vars(module).get(NAME) is buffer:
                    setattr(module, NAME, x)

    def _filled_with(self, x: Tensor, name: str) -> Tensor:
        """Return the buffer of the module `name`, with a copy of `x`."""
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype, buffer.device) != (x.shape, x.dtype, x.device):
            buffer = self._buffers[name] = torch.empty_like(x)
        return buffer.copy_(x)
