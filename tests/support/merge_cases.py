"""States to merge, what they merge to in float64, and how far from that a merge in float32 may be.

With `u` the rounding of the lse's dtype, `e` that of `out`'s, n states in any bracketing, and L the largest |lse| among
those that are not empty:

- An lse of size L is rounded by `u L`, once in each of the at most n - 1 merges that it goes through, so that it is off
  by `d = n u (L + 8)`; 8 for exp, log and the sums of a merge.
- Weights are the exponentials of differences of these: off by a factor of at most exp(2 d).
- `out` is rounded in each merge: `n e`. In sums, `n u` and a few more.

Where d is large (rows of finite floors: `finfo.min`, -1e9) weights are not resolved. What is left is that `out` lies
between the smallest and the largest of the states', and `lse` within d of the largest lse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

INF = float("inf")
RESOLVED = 0.25  # the largest d for which the bound of `out` says something
FLOORS = {"near": 0.0, "-1e4": -1e4, "-1e9": -1e9, "min": torch.finfo(torch.float32).min}
State = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class States:
    """`n` states of `rows` rows, `dim` wide.

    Attributes:
        spread: of the lse's, in units of a normal distribution.
        floor: where the lse's of half of the rows lie, a name in FLOORS.
        empty: the share of states that are empty in a row.
        junk: whether an empty state is marked by +inf and NaN too, and its `out` is NaN; else by -inf, and 0.
    """

    n: int
    dtype: torch.dtype = torch.float32
    rows: int = 5
    dim: int = 3
    spread: float = 1.0
    floor: str = "near"
    empty: float = 0.0
    junk: bool = True
    seed: int = 0

    def make(self, device: str = "cpu") -> State:
        generator = torch.Generator().manual_seed(self.seed)
        out = torch.randn(self.n, self.rows, self.dim, generator=generator).to(self.dtype)
        lse = self.spread * torch.randn(self.n, self.rows, generator=generator)
        lse[:, ::2] += FLOORS[self.floor]
        lse = lse.to(torch.float64 if self.dtype == torch.float64 else torch.float32)
        gone = torch.rand(self.n, self.rows, generator=generator) < self.empty
        marks = torch.tensor([-INF, INF, float("nan")] if self.junk else [-INF], dtype=lse.dtype)
        mark = marks[torch.randint(0, len(marks), gone.shape, generator=generator)]
        out = out.masked_fill(gone.unsqueeze(-1), float("nan") if self.junk else 0.0)
        return out.to(device), torch.where(gone, mark, lse).to(device)


def draw_states(choose: Callable[[Sequence[Any]], Any], sizes: Sequence[int], junk: bool = True) -> States:
    """States, by whatever chooses one of a sequence."""
    return States(
        n=choose(sizes),
        dtype=choose([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
        rows=choose([1, 2, 5]),
        dim=choose([1, 3, 16]),
        spread=choose([1.0, 0.0, 30.0, 1e3]),
        floor=choose(list(FLOORS)),
        empty=choose([0.0, 0.3, 0.9, 1.0]),
        junk=junk,
        seed=choose(range(1000)),
    )


def counted(lse: Tensor) -> Tensor:
    """Which states are not empty."""
    return lse.abs() < INF


def exact(out: Tensor, lse: Tensor) -> State:
    """The definition, in float64."""
    real, out, lse = counted(lse), out.double(), lse.double()
    lse, out = torch.where(real, lse, -INF), torch.where(real.unsqueeze(-1), out, 0.0)
    some = real.any(dim=0)
    weights = torch.where(some, lse, 0.0).softmax(dim=0).unsqueeze(-1)
    return (weights * out).sum(dim=0), lse.logsumexp(dim=0)


def assert_merged(got: State, states: State, merges: int | None = None) -> None:
    """`got` is the merge of all `states`, stacked, in whatever bracketing; `merges`: how many there were, at most."""
    out, lse = states
    n = out.shape[0] if merges is None else merges + 1
    assert got[0].dtype == out.dtype
    assert got[1].dtype == lse.dtype
    want_out, want_lse = exact(out, lse)
    real = counted(lse)
    some = real.any(dim=0)
    assert torch.equal(got[1] == -INF, ~some)
    assert not got[0][~some].any(), "an empty state has out = 0 exactly"
    assert got[0].isfinite().all()

    u, e = torch.finfo(lse.dtype).eps / 2, torch.finfo(out.dtype).eps / 2
    largest = torch.where(real, lse, 0.0).double().abs().amax(dim=0)
    d = n * u * (largest + 8)
    values = torch.where(real.unsqueeze(-1), out, 0.0).double()
    weights = torch.where(real & some, lse.double(), -INF).masked_fill(~some, 0.0).softmax(dim=0).unsqueeze(-1)
    spread = (weights * values.abs()).sum(dim=0)
    rounding = n * (e + 4 * u)
    tiny = n * torch.finfo(out.dtype).smallest_normal * torch.finfo(out.dtype).eps
    off = (got[0].double() - want_out).abs()
    near = off <= (torch.expm1(2 * d).unsqueeze(-1) + rounding) * spread + tiny
    low = torch.where(real.unsqueeze(-1), values, INF).amin(dim=0)
    high = torch.where(real.unsqueeze(-1), values, -INF).amax(dim=0)
    slack = rounding * values.abs().amax(dim=0) + tiny
    between = (got[0] >= low - slack) & (got[0] <= high + slack)
    resolved = (d <= RESOLVED).unsqueeze(-1)
    assert (between & (near | ~resolved))[some].all(), f"out is off by {off[some].max():.3e}"
    assert ((got[1].double() - want_lse).abs() <= d)[some].all(), "lse is off"
