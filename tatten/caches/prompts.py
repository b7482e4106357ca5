"""The tokens of a cache's prompts that take part in attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from tatten.passes.symbolic import FakeTensor


class Prompts:
    """The real tokens of the prompts: all tokens, those of a mask, or the first ones of each prompt by its length.

    Attributes:
        mask: bool `[G, P]`, True for real tokens; or None.
        lens: int32 or int64 `[G]`, the number of real tokens, which come first; or None.
    """

    def __init__(self, mask: Tensor | None = None, lens: Tensor | None = None):
        if mask is not None and lens is not None:
            raise ValueError("`prompt_lens` must be None if `prompt_mask` is passed, got both")
        for name, argument in (("prompt_mask", mask), ("prompt_lens", lens)):
            if argument is not None and not isinstance(argument, Tensor):
                raise TypeError(f"`{name}` must be a Tensor, got {type(argument).__name__}")
        if mask is not None and mask.dtype != torch.bool:
            raise TypeError(f"`prompt_mask` must be bool, got {mask.dtype}")
        if mask is not None and mask.dim() != 2:
            raise ValueError(f"`prompt_mask` must be [prompts, length], got shape {tuple(mask.shape)}")
        if lens is not None and lens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"`prompt_lens` must be int32 or int64, got {lens.dtype}")
        if lens is not None and lens.dim() != 1:
            raise ValueError(f"`prompt_lens` must be [prompts], got shape {tuple(lens.shape)}")
        if _is_readable(lens) and lens.min() < 0:
            raise ValueError(f"`prompt_lens` must be at least 0, got {int(lens.min())}")
        self.mask, self.lens = mask, lens

    @property
    def arguments(self) -> dict[str, Tensor]:
        """The mask or the lengths by the name of the argument; empty without both."""
        tensors = {"prompt_mask": self.mask, "prompt_lens": self.lens}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    @property
    def device(self) -> torch.device | None:
        """The device of the mask or the lengths; None without both."""
        return next((tensor.device for tensor in self.arguments.values()), None)

    def real(self, prompt_length: int, total: int) -> Tensor | None:
        """Return a bool mask `[G, total]` of the tokens that take part, or None if all do.

        All tokens after the prompts take part.

        Args:
            prompt_length: number of tokens of each prompt with padding. It is not needed for a mask.
            total: number of tokens.
        """
        if self.mask is not None:
            return F.pad(self.mask, (0, total - self.mask.shape[1]), value=True)
        if self.lens is not None:
            places = torch.arange(total, device=self.lens.device)
            return (places < self.lens[:, None]) | (places >= prompt_length)
        return None

    def positions(self, places: Tensor, prompt_length: int) -> Tensor:
        """Return the positions of the tokens at these places, int64 `[1 or G, len(places)]`, not counting padding."""
        if self.mask is not None:
            # The last column is for all tokens after the prompts.
            padding = (~F.pad(self.mask, (0, 1), value=True)).cumsum(1)
            return (places - padding.index_select(1, places.clamp(max=self.mask.shape[1]))).clamp(min=0)
        if self.lens is not None:
            padding = (places.clamp(max=prompt_length - 1) + 1 - self.lens[:, None]).clamp(min=0)
            return (places - padding).clamp(min=0)
        return places[None]

    def map(self, change: Callable[[Tensor], Tensor]) -> Prompts:
        """Return the prompts with a function of tensors `[G, ...]` applied to the mask or the lengths."""
        mask, lens = (None if tensor is None else change(tensor) for tensor in (self.mask, self.lens))
        return Prompts(mask, lens)

    def check_lens(self, prompt_length: int) -> None:
        """Raise ValueError if a prompt has more than `prompt_length` tokens. Lengths on an accelerator are not read."""
        if _is_readable(self.lens) and self.lens.max() > prompt_length:
            tokens = f"{prompt_length}, the tokens of each prompt with padding"
            raise ValueError(f"`prompt_lens` must be at most {tokens}, got {int(self.lens.max())}")

    def check(self, key: Tensor, start: int) -> None:
        """Raise ValueError unless the mask or the lengths fit keys `[batch, kv_heads, q_len, ...]` from `start` on."""
        for name, tensor in self.arguments.items():
            if not start and tensor.shape[0] != key.shape[0]:
                raise ValueError(f"`{name}` must have batch {key.shape[0]}, as `key`, got {tensor.shape[0]}")
            if tensor.device != key.device:
                raise ValueError(f"`{name}` must be on {key.device}, as `key`, got {tensor.device}")
        end = start + key.shape[2]
        if self.mask is not None and start < self.mask.shape[1] < end:
            raise ValueError(
                f"`prompt_mask` must cover all or none of tokens {start} to {end - 1}, got {self.mask.shape[1]}"
            )


def _is_readable(lens: Tensor | None) -> TypeGuard[Tensor]:
    """Return True for lengths on a CPU, of which there are some, and which are not fake."""
    return lens is not None and lens.device.type == "cpu" and len(lens) > 0 and not isinstance(lens, FakeTensor)
