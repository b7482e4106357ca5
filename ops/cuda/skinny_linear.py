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
    ALIGNED,
    BLOCK_IN,
    BLOCK_OUT,
    MOST_ROWS,
    MOST_WEIGHTS,
    ONE_ROW_FEATURES,
    SMS,
    check_linear_no_grad,
    check_skinny_linear,
)

Tile = tuple[int, int, int]  # the rows and the input features of a weight, and the warps of the program
# The tiles of layers of one row with up to so many input features, by `benchmarks/one_row_tiles.py` on an H200.
ONE_ROW_TILES: tuple[tuple[int, Tile], ...] = (
    (1024, (2, 512, 4)),
    (1536, (4, 2048, 8)),
    (2048, (2, 2048, 8)),
    (2560, (4, 2048, 8)),
    (3584, (2, 2048, 8)),
    (4096, (1, 2048, 8)),
    (5120, (2, 4096, 4)),
    (6144, (1, 8192, 4)),
    (9728, (1, 8192, 8)),
    (12288, (1, 8192, 4)),
    (16384, (1, 512, 2)),
    (ONE_ROW_FEATURES, (1, 2048, 4)),
)


def skinny_linear(
    x: Tensor, weights: Sequence[Tensor], parts: int = 1, out_dtype: torch.dtype | None = None
) -> list[Tensor]:
    check_linear_no_grad("skinny_linear", x, weights)  # a plan may stem from tensors without gradients
    return on_device_of(x, plan_skinny_linear(x, weights, parts, out_dtype), x, weights)


def pays_on(device: torch.device) -> bool:
    """Return True for GPUs of Hopper.

    The kernel for several rows was measured to be faster than cuBLAS on an H100. The one for one row was measured on an
    H200, beside cuBLAS and Inductor's tuned kernels.
    """
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
    if rows == parts == 1 and in_features <= ONE_ROW_FEATURES:
        return SkinnyLinear(one_row_launch(x, outs, one_row_tile(in_features)), writes)
    return SkinnyLinear(few_rows_launch(x, outs, rows, parts), writes)


def few_rows_launch(x: Tensor, outs: Sequence[int], rows: int, parts: int) -> Launch:
    """Return a launch for `[..., in_features]` of several rows, or of several parts."""
    from tatten.ops.cuda.combine import INTERPRETED
    from tatten.ops.cuda.kernels.skinny_linear import _skinny_linear_kernel

    block_rows = min(MOST_ROWS, max(16, power_of_2(rows)))
    programs = sum(ceil_div(n, BLOCK_OUT) for n in outs) * parts
    pdl = not INTERPRETED and has_early_launches(x.device)
    # A stage has 20 KiB for up to 16 rows, and 32 for 64. Microseconds with 4 and 5 stages for 8 rows, on an H200: gate
    # and up of Llama-3.1-8B 61.5 and 62.4; query, key and value, which have fewer programs than SMs, 17.8 and 16.9.
    stages = (4 if block_rows == 16 and programs > SMS else 5) if has_large_shared_memory(x.device) else 2
    return Launch(
        _skinny_linear_kernel,
        (programs, ceil_div(rows, block_rows)),
        {"num_warps": 4, "num_stages": stages, "launch_pdl": pdl},
        rows=rows,
        parts=parts,
        **feature_counts(x, outs),
        BLOCK_OUT=BLOCK_OUT,
        BLOCK_ROWS=block_rows,
        BLOCK_IN=BLOCK_IN,
        # The number of rows must not decide this, because staggering changes the order of sums.
        # Microseconds without and with it for 8 rows, on an H200: query, key and value of Llama-3.1-8B 18.4 and 16.9.
        # With 64 rows, down in two parts takes 33.4 and 34.8. Loads of rows that are not aligned would spill.
        STAGGERED=parts == 1 and x.shape[-1] % ALIGNED == 0,
        PDL=pdl,
        FLOAT32_DOTS=INTERPRETED,  # bf16 dots are garbage in the interpreter (Triton 3.6 to 3.9)
    )


def one_row_launch(x: Tensor, outs: Sequence[int], tile: Tile) -> Launch:
    """Return a launch for one row in one part."""
    from tatten.ops.cuda.combine import INTERPRETED
    from tatten.ops.cuda.kernels.skinny_linear import _one_row_linear_kernel

    block_out, block_in, warps = tile
    pdl = not INTERPRETED and has_early_launches(x.device)
    return Launch(
        _one_row_linear_kernel,
        (sum(ceil_div(n, block_out) for n in outs),),
        {"num_warps": warps, "launch_pdl": pdl},
        **feature_counts(x, outs),
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        PDL=pdl,
    )


def one_row_tile(in_features: int) -> Tile:
    return next(tile for most_features, tile in ONE_ROW_TILES if in_features <= most_features)


def feature_counts(x: Tensor, outs: Sequence[int]) -> dict[str, int]:
    """Return the numbers of input and output features, by the names of the kernels' arguments."""
    padded = [*outs, *[0] * (MOST_WEIGHTS - len(outs))]
    return {"IN": x.shape[-1], **{f"OUT_{i}": n for i, n in enumerate(padded)}}
