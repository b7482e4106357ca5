"""How far attention may be from float64: a bound derived from the dtype, and where NaN and nothing must stand.

With `u` the rounding of the accumulator (float32, or float64 for float64) and `e` that of the dtype, both 2^-p:

- A score is a sum of head_dim products, `|error| <= (head_dim + 6) u sum|q k| |scale|`, factors of float8 included. A
  soft cap adds `4 u softcap`; adding the bias, and the lse that each of the `parts` of a KV keeps until it is merged,
  `(2 + parts) u |score + bias|`. Keys of weight below u don't count: the others have `|score + bias| <= |lse| + 32`.
  Together: `d`.
- Weights are then off by a factor of at most exp(2 d), one key as much as its sum; exp, the sum over n keys and merging
  add `(n + 8 parts + 32) u`, and `2 x` with x the error of exp itself.
- In low precision weights, the `out` of a part and the result are rounded: `3 e`, and `e` more for each further merge
  in the dtype. What is too small for the dtype is rounded to its smallest number. A weight below the accumulator's
  smallest normal number may be 0, which shows where the keys that weigh more have a value of 0.
- Queries in float32 beside keys in bfloat16 are read in two halves, which leave 2^-16 of them, and 2^-14 in Triton's
  interpreter, whose conversions cut off.

All of these are relative to `sum(weight |value|)`, the spread. An lse is off by `d + 2 x + (n + 8 parts + 32) u`.

Beside a large finite bias (`finfo.min`, -1e9) d says nothing: float32 does not resolve the scores. Rows whose keys are
all there are held to eager PyTorch in the accumulator's dtype, where `score + bias` is rounded alike: d = 0.

A row that meets +inf in its mask is NaN, and no other. In low precision PyTorch's CPU kernel has numbers there from 32
keys on (its exp of NaN is one), which is left to it.
"""

from __future__ import annotations

from typing import Any

import torch
from attention_cases import explicit
from torch import Tensor

from tatten.ops.layout import over_keys
from tatten.ops.reference import decode_attention_reference

RESOLVED = 0.25  # the largest d for which the bound says something


def assert_within_bound(
    out: Tensor,
    lse: Tensor,
    inputs: dict[str, Any],
    parts: int,
    roundings: int = 1,
    summed_wide: bool = False,
    out_dtype: torch.dtype | None = None,
) -> None:
    """`(out, lse)` is the state over `inputs`, those of `decode_attention`, on whatever device; see the module.

    Args:
        roundings: how often an out is rounded on the way, but for that of a part's own.
        summed_wide: whether weights and sums stay in the accumulator's dtype until the result is rounded, as those of
            latents do on a CPU.
        out_dtype: that of `out`; default: the query's.
    """
    query, value = inputs["query"], inputs["value"]
    accumulator = torch.float64 if query.dtype == torch.float64 else torch.float32
    out_dtype = query.dtype if out_dtype is None else out_dtype
    assert out.dtype == out_dtype
    assert lse.dtype == accumulator
    assert out.shape == (*query.shape[:3], value.shape[3])
    assert lse.shape == query.shape[:3]
    assert out.is_contiguous()
    assert lse.is_contiguous()
    rough = query.is_cpu and query.element_size() == 2 and not summed_wide
    given = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    out, lse = out.cpu().double(), lse.cpu().double()
    key, value = _widened(given)

    want, want_lse = decode_attention_reference(**given)
    undefined, empty = want.isnan().any(dim=-1), want_lse == float("-inf")
    assert not out[~undefined].isnan().any(), "NaN where eager has none"
    assert not lse[~undefined].isnan().any(), "NaN in the lse where eager has none"
    assert rough or out[undefined].isnan().all(), "no NaN where eager has it"
    assert not lse[undefined].isfinite().any(), "a state that is not defined must not look like one that is"
    assert torch.equal(lse == float("-inf"), empty), "empty where it is not, or the other way round"
    assert not out[empty].any(), "an empty state has out = 0 exactly"

    u = torch.finfo(accumulator).eps / 2
    multiplied = query.dtype if inputs["key"].element_size() == 1 else inputs["key"].dtype
    inner, e = (0.0 if dtype == accumulator else torch.finfo(dtype).eps / 2 for dtype in (multiplied, out_dtype))
    halves_leave = 0.0 if multiplied == query.dtype or summed_wide else 2.0**-16 if query.is_cuda else 2.0**-14
    exp_error = 2.0**-13 if rough else 16 * u  # PyTorch's CPU kernel takes a rougher exp in low precision
    n = value.shape[2]
    rest = (n + 8 * parts + 32) * u + 2 * exp_error
    scale = query.shape[3] ** -0.5 if given["scale"] is None else given["scale"]
    group = query.shape[1] // key.shape[1]
    products = given["query"].double().abs() @ key.abs().repeat_interleave(group, dim=1).mT * abs(scale)
    largest = torch.nn.functional.pad(products, (1, 0)).amax(dim=-1)
    size = torch.where(empty | undefined, 0.0, want_lse).abs() + 32
    d = u * ((query.shape[3] + 6) * largest + 4 * (given.get("softcap") or 0.0) + (2 + parts) * size)
    d += halves_leave * largest

    spread, _ = decode_attention_reference(**_with_absolute_values(given))
    relative = torch.expm1(2 * d).unsqueeze(-1) + rest + (0.0 if summed_wide else 2 * inner) + roundings * e
    finfo = torch.finfo(out_dtype)
    smallest = (n + parts + 1) * finfo.smallest_normal * finfo.eps + n * torch.finfo(accumulator).smallest_normal
    smallest *= 1 + value.abs().amax() if value.numel() else 1
    unresolved = (d > RESOLVED) & ~undefined
    if unresolved.any():
        eager = given | {"key": key.to(accumulator), "value": value.to(accumulator)}
        eager_out, _ = explicit(**{name: x for name, x in eager.items() if name not in ("key_scale", "value_scale")})
        want = torch.where(unresolved.unsqueeze(-1), eager_out.double(), want)
        relative = torch.where(unresolved.unsqueeze(-1), rest + 3 * max(inner, e, u), relative)
        spread = torch.where(unresolved.unsqueeze(-1), value.abs().amax(), spread)
    excess = ((out - want).abs() - relative * spread - smallest)[~undefined]
    assert excess.numel() == 0 or excess.max() <= 0, f"out is off by {excess.max():.3e} more than it may"
    excess = ((lse - want_lse).abs() - d - rest)[~undefined & ~empty]
    assert excess.numel() == 0 or excess.max() <= 0, f"lse is off by {excess.max():.3e} more than it may"


def _widened(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Keys and values in float64, with 0 where they are not read."""
    wide = []
    for name in ("key", "value"):
        x, factors = inputs[name].double().nan_to_num(0.0), inputs.get(f"{name}_scale")
        wide.append(x if factors is None else x * over_keys(factors.double().nan_to_num(0.0)))
    return wide[0], wide[1]


def _with_absolute_values(inputs: dict[str, Any]) -> dict[str, Any]:
    changed = {name: inputs[name].double().abs() for name in ("value", "value_scale") if inputs.get(name) is not None}
    return {**inputs, **changed}
