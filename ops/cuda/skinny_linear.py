"""`tatten::skinny_linear` on CUDA: one launch for all weights, and cuBLAS for many rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tatten.ops.cuda.allocation import Dense, allocate
from tatten.ops.cuda.gpu import has_early_launches, has_large_shared_memory, has_wgmma
from tatten.ops.cuda.launcher import Launch, by_layout, on_device_of
from tatten.ops.sizes import ceil_div, power_of_2
from tatten.ops.skinny_linear import (
    BLOCK_IN,
    BLOCK_OUT,
    MOST_ROWS,
    MOST_WEIGHTS,
    check_linear_no_grad,
    check_skinny_linear,
)


def skinny_linear(
    x: Tensor, weights: Sequence[Tensor], parts: int = 1, out_dtype: torch.dtype | None = None
) -> list[Tensor]:
    check_linear_no_grad(x, weights)  # a plan may stem from tensors without gradients
    return on_device_of(x, plan_skinny_linear(x, weights, parts, out_dtype), x, weights)


def pays_on(device: torch.device) -> bool:
    """Return True for GPUs of Hopper. The kernel was measured to be faster than cuBLAS on an H100."""
    return device.type == "cuda" and has_wgmma(device)


Product = Callable[[Tensor, Sequence[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class SkinnyLinear:
    """Computes the op for tensors of the layout that it was planned for."""

    launch: Launch
    writes: tuple[Dense, ...]

    def __call__(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        products = allocate(x, *self.writes)
        nothing = [None] * (MOST_WEIGHTS - len(weights))
        self.launch(x.contiguous(), *[w.contiguous() for w in weights], *nothing, *products, *nothing)
        return products


def by_cublas(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Compute the op in one part, in the dtype of `x`, for many rows: the kernel would read weights several times."""
    rows = x.reshape(-1, x.shape[-1])
    products = [x.new_empty((1, *x.shape[:-1], weight.shape[0])) for weight in weights]
    for product, weight in zip(products, weights, strict=True):
        torch.mm(rows, weight.T, out=product.flatten(0, -2))  # autocast leaves calls with `out` alone
    return products


@by_layout
def plan_skinny_linear(x: Tensor, weights: Sequence[Tensor], parts: int, out_dtype: torch.dtype | None) -> Product:
    out_dtype = check_skinny_linear(x, weights, parts, out_dtype)
    in_features, outs = x.shape[-1], [weight.shape[0] for weight in weights]
    rows = x.numel() // in_features if in_features else 0
    writes = tuple([Dense.of((parts, *x.shape[:-1], n), out_dtype) for n in outs])
    if 0 in (rows, sum(outs)):
        return lambda x, weights: [x.new_zeros(layout.shape, dtype=out_dtype) for layout in writes]

    if rows > MOST_ROWS and parts == 1 and out_dtype == x.dtype:
        return by_cublas

    from tatten.ops.cuda.combine import INTERPRETED
    from tatten.ops.cuda.kernels.skinny_linear import _skinny_linear_kernel

    block_rows = min(MOST_ROWS, max(16, power_of_2(rows)))
    programs = sum(ceil_div(n, BLOCK_OUT) for n in outs) * parts
    pdl = not INTERPRETED and has_early_launches(x.device)
    # 100 KiB of shared memory for up to 16 rows, and 160 for 64.
    stages = 5 if has_large_shared_memory(x.device) else 2
    sizes = [*outs, *[0] * (MOST_WEIGHTS - len(outs))]
    launch = Launch(
        _skinny_linear_kernel,
        (programs, ceil_div(rows, block_rows)),
        {"num_warps": 4, "num_stages": stages, "launch_pdl": pdl},
        rows=rows,
        parts=parts,
        IN=in_features,
        **{f"OUT_{i}": n for i, n in enumerate(sizes)},
        BLOCK_OUT=BLOCK_OUT,
        BLOCK_ROWS=block_rows,
        BLOCK_IN=BLOCK_IN,
        PDL=pdl,
        FLOAT32_DOTS=INTERPRETED,  # bf16 dots are garbage in the interpreter (Triton 3.6 to 3.9)
    )
    return SkinnyLinear(launch, writes)
