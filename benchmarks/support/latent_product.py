"""The product of sums over latents in float32 and `W_uv` in bfloat16 by three programs, a section of `latent.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from support.decode_cases import L2
from support.errors import relative_error
from support.latent_kernel import RANK
from support.timing import as_graph, in_turns, microseconds

VALUE = 128
Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    heads: int
    batch: int

    @property
    def bytes(self) -> int:
        """The bytes of the weight, and of the numbers read and written for each row."""
        return self.heads * (2 * VALUE * RANK + self.batch * (4 * RANK + 2 * VALUE))


def shapes(device: str) -> list[Shape]:
    if device == "cpu":
        return [Shape(4, 2)]
    return [Shape(heads, batch) for heads in (128, 16) for batch in (1, 8, 64, 128, 512)]


def rounded(sums: Tensor, weight: Tensor) -> Tensor:
    """Multiply by PyTorch's own product, of sums that are rounded first."""
    return torch.bmm(sums.transpose(0, 1).flatten(1, 2).to(weight.dtype), weight.mT)


def split(sums: Tensor, weight: Tensor) -> Tensor:
    """Multiply by PyTorch's own product of both halves of the sums in float32; Inductor computes the halves."""
    rows = sums.transpose(0, 1).flatten(1, 2)
    upper = (rows.view(torch.int32) & ~0xFFFF).view(torch.float32)
    halves = torch.cat((upper.bfloat16(), (rows - upper).bfloat16()), 1)
    return torch.bmm(halves, weight.mT, out_dtype=torch.float32).unflatten(1, (2, -1)).sum(1).bfloat16()


def products(device: str) -> dict[str, Product]:
    tatten = torch.ops.tatten.project_heads.default
    if device == "cpu":  # where `bmm` takes no `out_dtype`
        return {"tatten": tatten, "rounded": rounded}
    return {"tatten": tatten, "rounded": rounded, "split": torch.compile(split, dynamic=False)}


def measure(s: Shape, device: str, rate: float, rounds: int) -> dict[str, object]:
    """Return a row of the results; `rate` is that of the floor, in bytes per second."""
    torch._dynamo.reset()
    sums = torch.randn(s.batch, s.heads, 1, RANK, device=device)
    copies = range(-(-L2[device] // (2 * s.heads * VALUE * RANK)))
    # As in a model: below the weights of the keys in one tensor.
    weights = [torch.randn(s.heads, 2 * VALUE, RANK, device=device).bfloat16()[:, VALUE:] for _ in copies]
    exact = torch.einsum("bhlr,hcr->bhlc", sums.double(), weights[0].double())
    steps, errors = {}, {}
    for name, product in products(device).items():

        def step(product: Product = product) -> list[Tensor]:
            return [product(sums, weight) for weight in weights]

        out = step()[0]
        out = out if out.dim() == 4 else out.unflatten(1, (-1, 1)).transpose(0, 1)
        errors[name] = relative_error(out.double(), exact)
        if not errors[name] < 1e-2:
            raise ArithmeticError(f"{name} is wrong: relative error {errors[name]:.1e}, allowed 1e-2")
        steps[name] = as_graph(step) if device == "cuda" else step
    us = in_turns(steps, rounds, lambda _, step: microseconds(step, device, len(weights), 10))
    row = {"section": "product", **asdict(s), "us": us, "errors": errors, "floor_us": s.bytes / rate * 1e6}
    return {**row, "ratio": us["tatten"] / us["rounded"]}
