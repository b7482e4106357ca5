"""Rounding by bfloat16: SDPA on expanded keys and values, and on latents as the pass rewrites it, against float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tatten

HEADS, RANK, NOPE, ROPE, VALUE = 16, 512, 128, 64, 128


class Expanded(nn.Module):
    """Attention as a model with latents writes it: all latents are expanded to keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=False)
        nn.init.normal_(self.kv_b_proj.weight, std=RANK**-0.5)

    def forward(self, query: Tensor, latent: Tensor, key_rope: Tensor) -> Tensor:
        batch, _, length, _ = latent.shape
        expanded = self.kv_b_proj(latent).view(batch, length, HEADS, NOPE + VALUE).transpose(1, 2)
        key, value = expanded.split((NOPE, VALUE), dim=-1)
        key = torch.cat((key, key_rope.expand(-1, HEADS, -1, -1)), dim=-1)
        return F.scaled_dot_product_attention(query, key, value)


def errors(out: Tensor, exact: Tensor) -> dict[str, float]:
    """Return the relative errors by the norm and by the largest element."""
    off = out.double() - exact
    return {"norm": (off.norm() / exact.norm()).item(), "max": (off.abs().max() / exact.abs().max()).item()}


def measure(length: int, sharpness: float, device: str) -> dict[str, object]:
    """Return a row of the results, of 8 sequences; `sharpness` multiplies the query: at a large one few keys matter."""
    torch.manual_seed(0)
    shapes = (8, HEADS, 1, NOPE + ROPE), (8, 1, length, RANK), (8, 1, length, ROPE)
    query, latent, key_rope = (torch.randn(shape, device=device) for shape in shapes)
    inputs = [x.bfloat16() for x in (sharpness * query, latent, key_rope)]
    model = Expanded().to(device, torch.bfloat16).requires_grad_(False)
    torch._dynamo.reset()
    with torch.no_grad(), tatten.recording() as report:
        outs = {"sdpa": model(*inputs), "tatten": torch.compile(model, backend="tatten", dynamic=False)(*inputs)}
        exact = model.double()(*(x.double() for x in inputs))
    assert len(report.rewritten) == 1, report
    return {
        "section": "rounding",
        "length": length,
        "sharpness": sharpness,
        **{name: errors(out, exact) for name, out in outs.items()},
    }
