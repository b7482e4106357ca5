"""Random calls of `latent_attention` with a block table, each as a call of `decode_attention` with the same answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from latent_calls import LatentCall, draw_latent_call
from op_masks import Choose
from paged_calls import PagedCall, draw_pages
from torch import Tensor


@dataclass(frozen=True)
class PagedLatentCall:
    """A call over latents in pages.

    Attributes:
        latents: the call over latents in order.
        paged: the call of `decode_attention` that it expands to, whose keys are in pages.
    """

    latents: LatentCall
    paged: PagedCall

    def inputs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments of `latent_attention`, and those of `decode_attention` over keys in order with the same answer."""
        paged, dense = self.paged.inputs()
        given, _ = self.latents.of_latents(paged)
        _, expanded = self.latents.of_latents(dense)
        return given | {"block_table": paged["block_table"]}, expanded

    @property
    def out_dtype(self) -> torch.dtype:
        dtype = self.latents.expanded.dtype
        return torch.promote_types(dtype, torch.float32) if self.latents.wide else dtype

    def run(self, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The op's answer."""
        return self.latents.run(given)


def draw_paged_latents(choose: Choose, tiny: bool = False) -> PagedLatentCall:
    """A call; `tiny` is for an interpreter."""
    latents = draw_latent_call(choose, tiny)
    expanded = replace(latents.expanded, lens=choose([torch.int32, torch.int64]), found=False)
    latents = replace(latents, expanded=expanded)
    return PagedLatentCall(latents, draw_pages(choose, expanded, tiny))
