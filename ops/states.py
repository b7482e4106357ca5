"""The algebra of attention states, in plain PyTorch.

A state is `(out, lse)` of attention over a set of keys: the softmax-weighted mean of the values and the log-sum-exp of
the scaled scores. States of disjoint sets merge (FlashInfer, arXiv 2501.01005, section 2.2):

    m   = max(lse_i)
    w_i = exp(lse_i - m)
    out = sum(w_i * out_i) / sum(w_i)
    lse = m + log(sum(w_i))

The merge is associative and commutative, and its identity is the empty state `(0, -inf)`. In float32 a weight is off by
up to `2^-23 * max(abs(lse))`, relative to 1: see `tatten.merge_states`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NEG_INF = float("-inf")
State = tuple[Tensor, Tensor]  # (out, lse)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and of the lse: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge N states stacked on dim 0, in aten: `out` is `[N, ..., head_dim]`, `lse` is `[N, ...]`.

    A state whose lse is -inf, +inf or NaN is empty, whatever its `out` holds. The sum runs in the order of dim 0.
    """
    lse = torch.where(lse < float("inf"), lse, NEG_INF)  # NaN compares false
    lse_max = lse.amax(dim=0)
    weights = torch.exp(lse - torch.where(lse_max == NEG_INF, 0.0, lse_max))
    weight_sum = weights.sum(dim=0)
    weights = weights.unsqueeze(-1)
    # An empty state's out may be NaN, and NaN * 0 is NaN: select before multiplying.
    values = torch.where(weights > 0, out.to(weights.dtype), 0.0)
    merged = (weights * values).sum(dim=0) / torch.where(weight_sum == 0, 1.0, weight_sum).unsqueeze(-1)
    return merged.to(out.dtype), lse_max + torch.log(weight_sum)


def merge_each(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the states of each sequence, an index of dim 1, by itself.

    No bit of its result depends on the other sequences, nor on their number. `merge` on a CPU adds up five states and
    more in an order that depends on the number of sequences.
    """
    if lse.dim() == 1 or lse.numel() == 0:
        return merge(out, lse)
    outs, lses = zip(*(merge(*each) for each in zip(out.unbind(1), lse.unbind(1), strict=True)), strict=True)
    return torch.stack(outs), torch.stack(lses)


def combine_partials(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Combine the partials of one op in order, two at a time: fewer kernels than stacking them for `merge`.

    The first weight of two is `w_a / (w_a + w_b) = sigmoid(lse_a - lse_b)`. The `out` of an empty partial must be 0.
    NaN in a partial stems from NaN in keys that count, and is propagated.
    """
    out, lse = outs[0], lses[0]
    for next_out, next_lse in zip(outs[1:], lses[1:], strict=True):
        # Two empty partials may have any weight, but -inf - -inf is NaN. Not lerp: infinite values would become NaN.
        ahead = (lse - next_lse).nan_to_num(0.0).unsqueeze(-1)
        out = torch.addcmul(out * torch.sigmoid(ahead), next_out.to(ahead.dtype), torch.sigmoid(-ahead))
        lse = torch.logaddexp(lse, next_lse)
    return out.to(outs[0].dtype), lse
