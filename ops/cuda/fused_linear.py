"""`tatten::fused_linear` on CUDA: one launch for a norm, linear layers of one row, a gate and a residual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tatten.ops.cuda.allocation import Dense, allocate
from tatten.ops.cuda.gpu import has_early_launches
from tatten.ops.cuda.launcher import Launch, by_layout, on_device_of
from tatten.ops.cuda.skinny_linear import feature_counts
from tatten.ops.fused_linear import check_fused_linear
from tatten.ops.sizes import ceil_div, power_of_2
from tatten.ops.skinny_linear import MOST_WEIGHTS, check_linear_no_grad

ELEMENTS = 64  # the most numbers of weights that a thread holds


def fused_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    gate: str | None = None,
    residual: Tensor | None = None,
    prefetch: bool = False,
) -> list[Tensor]:
    # A plan may stem from tensors without gradients.
    check_linear_no_grad("fused_linear", x, weights, norm_weight=norm_weight, residual=residual)
    plan = plan_fused_linear(x, weights, norm_weight, eps, gate, residual, prefetch)
    return on_device_of(x, plan, x, weights, norm_weight, residual)


@dataclass(frozen=True)
class FusedLinear:
    """Computes the op for tensors of the layout that it was planned for."""

    launch: Launch | None  # None if no weight has a row
    writes: tuple[Dense, ...]

    def __call__(
        self, x: Tensor, weights: Sequence[Tensor], norm_weight: Tensor | None, residual: Tensor | None
    ) -> list[Tensor]:
        results = allocate(x, *self.writes)
        if self.launch is None:
            return results
        no_weights = [None] * (MOST_WEIGHTS - len(weights))
        around = [None if y is None else y.contiguous() for y in (norm_weight, residual)]
        no_results = [None] * (MOST_WEIGHTS - len(results))
        self.launch(x.contiguous(), *[w.contiguous() for w in weights], *no_weights, *around, *results, *no_results)
        return results


@by_layout
def plan_fused_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    norm_weight: Tensor | None,
    eps: float,
    gate: str | None,
    residual: Tensor | None,
    prefetch: bool,
) -> FusedLinear:
    check_fused_linear(x, weights, norm_weight, eps, gate, residual)
    from tatten.ops.cuda.combine import INTERPRETED
    from tatten.ops.cuda.kernels.fused_linear import GELU, GELU_TANH, NO_GATE, SILU, _fused_linear_kernel

    outs = [weight.shape[0] for weight in weights]
    block_out, block_in, warps = tile_of_rows(x.shape[-1], 1 if gate is None else 2)
    results = outs if gate is None else outs[:1]
    writes = tuple([Dense.of((*x.shape[:-1], n), x.dtype) for n in results])
    if sum(results) == 0:
        return FusedLinear(None, writes)
    pdl = not INTERPRETED and has_early_launches(x.device)
    launch = Launch(
        _fused_linear_kernel,
        (sum(ceil_div(n, block_out) for n in results),),
        # ptxas may multiply and add in one instruction. This takes fewer registers, 80 instead of 89 for query, key and
        # value of Llama-3.1-8B, so more programs load at a time. No sum has to equal that of another launch.
        {"num_warps": warps, "launch_pdl": pdl, "enable_fp_fusion": True},
        eps=eps,
        **feature_counts(x, outs),
        GATE={None: NO_GATE, "silu": SILU, "gelu": GELU, "gelu_tanh": GELU_TANH}[gate],
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        # The previous launch writes the copy of a weight that is not contiguous.
        PREFETCH=prefetch and all(y.is_contiguous() for y in (*weights, norm_weight) if y is not None),
        PDL=pdl,
    )
    return FusedLinear(launch, writes)


def tile_of_rows(in_features: int, n_weights: int) -> tuple[int, int, int]:
    """Return the rows of each weight, the padded features, and the warps of a program.

    A program holds rows of `n_weights` weights: of two with a gate.
    """
    block_in = max(16, power_of_2(in_features))
    elements = block_in * n_weights  # of a program with one row of each weight
    warps = next(n for n in (4, 8, 16) if elements <= 32 * ELEMENTS * n)
    return 32 * ELEMENTS * warps // elements, block_in, warps
