"""Inputs and the yardstick shared by the op tests: every implementation is held to float64, on the error of SDPA."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tatten.ops.layout import over_keys, pack_gqa
from tatten.ops.reference import decode_attention_reference

NEG_INF = float("-inf")


@dataclass(frozen=True)
class Case:
    """One shape of decode attention: sizes, a dtype, a kind of mask, and whether lengths and sinks are given.

    `narrow`: keys and values are in 8 bits, "scaled" with a factor for each head, of which some are negative, or
    "per_key" with one for each key; in e4m3, or with `int8` in that.
    """

    batch: int = 2
    q_heads: int = 4
    kv_heads: int = 2
    q_len: int = 1
    kv_len: int = 33
    head_dim: int = 32
    value_dim: int | None = None
    dtype: torch.dtype = torch.float32
    mask: str = "none"
    lens: bool = False
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    narrow: str = ""
    int8: bool = False

    def __str__(self) -> str:
        dims = f"B{self.batch}-H{self.q_heads}x{self.kv_heads}-L{self.q_len}-S{self.kv_len}-D{self.head_dim}"
        value_dim = "" if self.value_dim is None else f"x{self.value_dim}"
        window = "" if self.window is None else f"-window{self.window}"
        softcap = "" if self.softcap is None else f"-cap{self.softcap}"
        narrow = f"-{'int8' if self.int8 else 'float8'}_{self.narrow}" if self.narrow else ""
        flags = f"{'-lens' if self.lens else ''}{window}{softcap}{'-sinks' if self.sinks else ''}{narrow}"
        return f"{dims}{value_dim}-{str(self.dtype)[6:]}-{self.mask}{flags}"

    def inputs(self, device: str = "cpu", poison: bool = True) -> dict[str, Tensor | float | None]:
        """Random inputs; keys and values that no query attends to are NaN where the contract says they are not read.

        Window, softcap and sinks are among them only where they are set: not every kernel takes them.
        """
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        query = randn(self.batch, self.q_heads, self.q_len, self.head_dim)
        key = randn(self.batch, self.kv_heads, self.kv_len, self.head_dim)
        value = randn(self.batch, self.kv_heads, self.kv_len, self.value_dim or self.head_dim)
        mask = make_mask(self, generator)
        lens = torch.randint(0, self.kv_len + 1, (self.batch,), generator=generator) if self.lens else None
        if lens is not None:
            lens[0] = self.kv_len
            lens[-1] = min(1, self.kv_len)
        if poison:
            unread = ~span_of(mask, lens, self)[:, None, :, None]
            key = key.masked_fill(unread, float("nan"))
            value = value.masked_fill(unread, float("nan"))
        if self.narrow and self.int8:
            key, value = ((40 * x).nan_to_num(127).round().clamp(-127, 127).to(torch.int8) for x in (key, value))
        elif self.narrow:
            key, value = key.to(torch.float8_e4m3fn), value.to(torch.float8_e4m3fn)
        inputs = {"query": query, "key": key, "value": value, "attn_mask": mask, "kv_lens": lens}
        moved = {name: None if x is None else to_device(x, device) for name, x in inputs.items()}
        sinks = to_device(2 * randn(self.q_heads), device) if self.sinks else None
        extras = {"window": self.window, "softcap": self.softcap, "sinks": sinks}
        size = 1 / 40 if self.int8 else 1.0
        if self.narrow == "scaled":
            extras["key_scale"], extras["value_scale"] = to_device(size * randn(2, self.kv_heads).float(), device)
        if self.narrow == "per_key":
            scales = size * torch.randn(2, self.batch, self.kv_heads, self.kv_len, generator=generator)
            if poison:
                scales = scales.masked_fill(unread[:, :, :, 0], float("nan"))
            key_scale, value_scale = to_device(scales, device)
            extras |= {"key_scale": key_scale, "value_scale": value_scale.to(self.dtype)}
        return {**moved, "scale": self.scale, **{name: x for name, x in extras.items() if x is not None}}


def to_device(x: Tensor, device: str) -> Tensor:
    """`x` on `device` with its strides, stride 0 included."""
    if device == "cpu":
        return x
    kept = tuple(slice(None) if stride else slice(0, 1) for stride in x.stride())
    return x[kept].to(device).expand(x.shape)


def make_mask(case: Case, generator: torch.Generator) -> Tensor | None:
    """The masks that decoders use, by name."""
    b, h, n, s = case.batch, case.q_heads, case.q_len, case.kv_len
    keys = torch.arange(s)
    window = torch.zeros(b, 1, n, s, dtype=torch.bool)
    for row in range(b):  # left padding of `row` keys, and a static cache of which all but a third is filled
        for i in range(n):
            window[row, 0, i] = (keys >= row) & (keys < s - s // 3 - (n - 1 - i))
    noise = torch.randn(b, h, n, s, generator=generator)
    match case.mask:
        case "none":
            return None
        case "causal":
            return window
        case "broadcast":
            return window[:1, :, :1].expand(b, h, n, s)
        case "2d":
            return window[0, 0]
        case "keys":  # one row for all, rank 1
            return window[0, 0, 0]
        case "holes":
            return noise > 0.5
        case "nearly_full":  # whole blocks are attended to by all
            return (noise < 2.5) | (keys < s // 2)
        case "nearly_zero":
            return torch.where((noise < 2.5) | (keys < s // 2), 0.0, noise).to(case.dtype)
        case "per_head":
            return noise[:1, :, :1] > 0
        case "empty_rows":
            holes = noise > 0
            holes[:, ::2] = False
            return holes
        case "all_false":
            return torch.zeros(b, 1, n, s, dtype=torch.bool)
        case "one_key":
            return (keys == s // 2).expand(b, 1, n, s)
        case "additive":
            return torch.where(window, noise[:, :1], NEG_INF).to(case.dtype)
        case "additive_f32":
            return torch.where(window, noise, NEG_INF)
        case "finfo_min":  # additive masks as older models write them: excluded unless everything is
            floor = torch.finfo(case.dtype).min
            return torch.where(window, 0.0, floor).to(case.dtype)
        case "alibi":
            slopes = 2.0 ** -torch.arange(1, h + 1)
            return (slopes[:, None, None] * (keys - s + 1)).to(case.dtype)[None]
        case "one_column":  # broadcast over the keys
            return torch.ones(b, 1, n, 1, dtype=torch.bool)
        case _:
            raise ValueError(case.mask)


def places_in_reach(
    lens: Tensor | None, batch: int, q_len: int, kv_len: int, window: int | None, device: torch.device | str = "cpu"
) -> Tensor:
    """bool `[batch, 1, q_len, kv_len]`: what lengths and window leave, written down one query at a time."""
    reach = torch.zeros(batch, 1, q_len, kv_len, dtype=torch.bool)
    for b, n in enumerate([kv_len] * batch if lens is None else lens.tolist()):
        for i in range(q_len):
            stop = n if window is None else max(n - q_len + i + 1, 0)
            start = 0 if window is None else max(stop - window, 0)
            reach[b, 0, i, start:stop] = True
    return reach.to(device)


def span_of(mask: Tensor | None, lens: Tensor | None, case: Case) -> Tensor:
    """`[batch, kv_len]`: keys between the first and the last that any query of the sequence attends to."""
    valid = places_in_reach(lens, case.batch, case.q_len, case.kv_len, case.window)
    if mask is not None:
        valid = valid & (mask if mask.dtype == torch.bool else mask != NEG_INF)
    used = valid.flatten(1, 2).any(dim=1)
    return (used.cumsum(1) > 0) & (used.flip(1).cumsum(1).flip(1) > 0)


def explicit(
    query, key, value, attn_mask=None, kv_lens=None, scale=None, window=None, softcap=None, sinks=None, dtype=None
) -> tuple[Tensor, Tensor]:
    """`(out, lse)` as models write attention out, heads repeated and NaN removed: a sink is one more column of scores.

    In `dtype`; default: float32, or float64 for float64.
    """
    dtype = dtype or (torch.float64 if query.dtype == torch.float64 else torch.float32)
    group = query.shape[1] // key.shape[1]
    key, value = (x.to(dtype).nan_to_num().repeat_interleave(group, dim=1) for x in (key, value))
    scores = query.to(dtype) @ key.mT * (query.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attn_mask is not None:
        scores = scores + (torch.where(attn_mask, 0.0, NEG_INF) if attn_mask.dtype == torch.bool else attn_mask)
    batch, _, q_len, kv_len = scores.shape
    reach = places_in_reach(kv_lens, batch, q_len, kv_len, window, query.device)
    scores = scores.masked_fill(~reach, NEG_INF)
    if sinks is not None:
        column = sinks.to(dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(dim=-1).nan_to_num(0.0)[..., :kv_len]
    return weights @ value, scores.logsumexp(dim=-1)


def widened(inputs: dict) -> dict:
    """The inputs with keys and values in the dtype of the query, as one without 8 bits would have them."""
    inputs, dtype = dict(inputs), inputs["query"].dtype
    for name in ("key", "value"):
        factors = inputs.pop(f"{name}_scale", None)
        if inputs[name].dtype != dtype:
            wide = inputs[name].float() if factors is None else inputs[name].float() * over_keys(factors)
            inputs[name] = wide.to(dtype)
    return inputs


def sdpa(query, key, value, attn_mask=None, kv_lens=None, scale=None, window=None, softcap=None, sinks=None) -> Tensor:
    """PyTorch's answer to the same question, with heads repeated and NaN removed.

    A sink is one more key, of zeros, whose score is all mask. SDPA has no soft cap: that is written out.
    """
    if softcap is not None:
        out, _ = explicit(query, key, value, attn_mask, kv_lens, scale, window, softcap, sinks)
        return out.to(query.dtype)
    group = query.shape[1] // key.shape[1]
    key, value = (x.nan_to_num().repeat_interleave(group, dim=1) for x in (key, value))
    if kv_lens is not None or window is not None:
        reach = places_in_reach(kv_lens, query.shape[0], query.shape[2], key.shape[2], window, query.device)
        if attn_mask is None:
            attn_mask = reach
        elif attn_mask.dtype == torch.bool:
            attn_mask = attn_mask & reach
        else:
            attn_mask = torch.where(reach, attn_mask, NEG_INF)
    if attn_mask is not None:  # torch 2.11 misreads a mask that broadcasts over the keys
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    if sinks is not None:
        mask = query.new_zeros(*query.shape[:3], key.shape[2], dtype=torch.promote_types(query.dtype, torch.float32))
        if attn_mask is not None:
            mask += torch.where(attn_mask, 0.0, NEG_INF) if attn_mask.dtype == torch.bool else attn_mask
        attn_mask = torch.cat((mask, sinks.to(mask.dtype)[:, None, None].expand(*mask.shape[:3], 1)), dim=-1)
        key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, scale=scale)


PLAIN = {"query", "key", "value", "attn_mask", "kv_lens", "scale"}


def sdpa_on_packed_heads(inputs: dict) -> Tensor:
    """PyTorch's answer with the query heads of a kv head as rows of one product, without a mask.

    Its sums run in another order there: on an AMD EPYC this is 3.5 times as far off as SDPA with heads repeated, on an
    Intel Xeon it is not.
    """
    query, key, value = (inputs[name] for name in ("query", "key", "value"))
    out = F.scaled_dot_product_attention(pack_gqa(query, key.shape[1]), key, value, scale=inputs["scale"])
    return out.reshape(*query.shape[:3], value.shape[3])


def assert_state(out: Tensor, lse: Tensor, inputs: dict) -> None:
    """`(out, lse)` is as near to float64 as SDPA is, twice over, plus one rounding of the result and those of a merge.

    The number of threads decides how many states are merged. Each lse is rounded once, and so is the largest, so that a
    weight `exp(lse - largest)` is off by a factor of at most `1 + 2 |lse| u`, with 2 u for exp and division. The merge
    is a weighted mean: whatever the number of states, it is off by that much of `sum(weight |value|)`.
    """
    query, value = inputs["query"], inputs["value"]
    assert out.dtype == query.dtype
    assert out.shape == (*query.shape[:3], value.shape[3])
    assert lse.shape == query.shape[:3]
    assert lse.dtype == (torch.float64 if query.dtype == torch.float64 else torch.float32)

    want_out, want_lse = decode_attention_reference(**inputs)
    assert not want_out.isnan().any(), "the case poisons keys that are used"
    eps = torch.finfo(query.dtype).eps
    # On CUDA SDPA returns NaN for some masks, so the CPU's answer counts too.
    on_cpu = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    answers = [sdpa(**widened(given)) for given in (inputs, on_cpu)]
    is_plain = inputs.keys() <= PLAIN and inputs["key"].dtype == query.dtype
    if is_plain and inputs["attn_mask"] is None and inputs["kv_lens"] is None:
        answers.append(sdpa_on_packed_heads(on_cpu))
    sdpa_error = max((x.double() - want_out.to(x.device)).abs().nan_to_num(0.0).max().item() for x in answers)
    absolute = {name: inputs[name].double().abs() for name in ("value", "value_scale") if inputs.get(name) is not None}
    spread, _ = decode_attention_reference(**inputs | absolute)
    sizes = want_lse.abs().nan_to_num(posinf=0.0)
    merge = torch.finfo(lse.dtype).eps / 2 * ((2 * sizes + 4).unsqueeze(-1) * spread).max().item()
    budget = 2 * sdpa_error + 2 * eps * want_out.abs().max().item() + merge
    error = (out.double() - want_out).abs()
    assert error.max() <= budget, f"out is off by {error.max():.3e}, allowed {budget:.3e}"

    empty = want_lse == NEG_INF
    assert torch.equal(lse == NEG_INF, empty)
    assert not out[empty].any(), "an empty state has out = 0 exactly"
    # scores are sums of head_dim products of the dtype's values; their rounding is what lse carries
    lse_budget = (
        8 * torch.finfo(lse.dtype).eps * max(1.0, want_lse[~empty].abs().max().item() if (~empty).any() else 1.0)
    )
    lse_budget *= query.shape[3] ** 0.5
    if query.is_cpu and query.element_size() == 2:
        lse_budget += 2**-14  # PyTorch's kernel takes a rougher exp there: up to 4e-5 off, measured on AVX-512
    assert (lse.double() - want_lse)[~empty].abs().max() <= lse_budget if (~empty).any() else True
