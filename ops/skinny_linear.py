"""Linear layers of few rows that read one input: `skinny_linear`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tatten.ops.sizes import ceil_div
from tatten.ops.validation import check_no_grad

DTYPES = torch.bfloat16, torch.float16
BLOCK_OUT, BLOCK_IN = 64, 128  # a weight's tile in the kernel for several rows; parts begin at multiples of `BLOCK_IN`
ALIGNED = 8  # features: rows of a weight then begin at multiples of 16 bytes, so that the kernel can load them ahead
MOST_WEIGHTS = 3  # query, key and value
MOST_ROWS = 64  # the most that were measured

# `choose_parts` takes the most of `PARTS` that leave at most one program for each SM of an H100.
# `benchmarks/skinny_linear.py --parts` measures others.
SMS, PARTS = 132, (1, 2, 4)
MOST_FEATURES = 8192  # of a program
ONE_ROW_FEATURES = 1 << 16  # the most of the kernel for one row, which unrolls its loop over them


def skinny_linear(
    x: Tensor, weights: Sequence[Tensor], parts: int = 1, out_dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Compute `x @ weight.T` for each weight, in partial sums over `parts` shares of the input features.

    A weight has far more bytes than the few rows of `x`, so a read of the weight bounds the time. Weights that are
    multiplied with one `x` share a launch, and parts give programs to more of the GPU. The sum over parts is left to
    the caller, whose compiler fuses it into the next op.

    Args:
        x: `[..., in_features]`, bfloat16 or float16, any strides.
        weights: one to three of `[out_features, in_features]`, in the dtype of `x`, any strides. On CUDA, a weight that
            is not contiguous is copied.
        parts: the number of partial sums, from 1 on.
        out_dtype: float32, or the dtype of `x`, which is the default.

    Returns:
        For each weight, `[parts, ..., out_features]` in `out_dtype`, contiguous. The partial sums of a row add up to
        the product. They are summed in float32 and rounded once. On CUDA, the order of the sums differs between one row
        and several rows in one part. More than 64 rows in one part and in the dtype of `x` are a product of cuBLAS,
        which may round more than once.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or numbers do not fit; the message names the argument.
        NotImplementedError: gradients are required.
    """
    out_dtype = check_skinny_linear(x, weights, parts, out_dtype)
    bounds = [min(i * BLOCK_IN, x.shape[-1]) for i in part_bounds(x.shape[-1], parts)]
    shares = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
    rows = x.float()
    return [
        torch.stack([rows[..., share] @ weight[:, share].float().T for share in shares]).to(out_dtype)
        for weight in weights
    ]


def part_bounds(in_features: int, parts: int) -> list[int]:
    """Return where parts begin, in blocks of `BLOCK_IN` features, and where the last one ends, as in the kernel."""
    blocks = ceil_div(in_features, BLOCK_IN)
    return [part * blocks // parts for part in range(parts + 1)]


def choose_parts(out_features: Sequence[int], in_features: int, rows: int | None) -> int:
    """Return the number of parts for weights of these sizes. `rows` is None if it is dynamic.

    One row has one part, because its kernel has many programs. All other numbers of rows have the same number of parts.
    """
    if rows == 1 and in_features <= ONE_ROW_FEATURES:
        return 1
    programs = sum(ceil_div(n, BLOCK_OUT) for n in out_features)
    fill = max((parts for parts in PARTS if parts * programs <= SMS), default=1)
    return max(1, min(max(fill, ceil_div(in_features, MOST_FEATURES)), ceil_div(in_features, BLOCK_IN)))


def check_skinny_linear(x: Tensor, weights: Sequence[Tensor], parts: int, out_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the result; raise unless `skinny_linear` supports the arguments."""
    check_linear_no_grad("skinny_linear", x, weights)
    check_linear_operands(x, weights)
    if parts < 1:
        raise ValueError(f"`parts` must be at least 1, got {parts}")
    if out_dtype not in (None, torch.float32, x.dtype):
        raise TypeError(f"`out_dtype` must be float32 or the dtype of `x`, {x.dtype}, got {out_dtype}")
    return out_dtype or x.dtype


def check_linear_operands(x: Tensor, weights: Sequence[Tensor]) -> None:
    """Raise unless `x` and the weights of a launch have dtypes, devices and shapes that fit."""
    if not 1 <= len(weights) <= MOST_WEIGHTS:
        raise ValueError(f"`weights` must have one to {MOST_WEIGHTS} tensors, got {len(weights)}")
    if x.dtype not in DTYPES:
        raise TypeError(f"`x` must be bfloat16 or float16, got {x.dtype}")
    if x.dim() == 0:
        raise ValueError("`x` must be [..., in_features], got a tensor without dimensions")
    for i, weight in enumerate(weights):
        if weight.device != x.device:
            raise ValueError(f"`weights[{i}]` must be on the device of `x`, {x.device}, got {weight.device}")
        if weight.dtype != x.dtype:
            raise TypeError(f"`weights[{i}]` must have the dtype of `x`, {x.dtype}, got {weight.dtype}")
        if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
            wanted = f"[out_features, {x.shape[-1]}], with the features of `x`"
            raise ValueError(f"`weights[{i}]` must be {wanted}, got shape {tuple(weight.shape)}")


def check_linear_no_grad(op: str, x: Tensor, weights: Sequence[Tensor], **others: Tensor | None) -> None:
    """Apply `check_no_grad` to the operands of `op`."""
    check_no_grad(op, x=x, **{f"weights[{i}]": weight for i, weight in enumerate(weights)}, **others)


def fake_skinny_linear(
    x: Tensor, weights: Sequence[Tensor], parts: int = 1, out_dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return tensors like the results of `skinny_linear`, uninitialised: its fake implementation."""
    out_dtype = check_skinny_linear(x, weights, parts, out_dtype)
    return [x.new_empty((parts, *x.shape[:-1], weight.shape[0]), dtype=out_dtype) for weight in weights]
