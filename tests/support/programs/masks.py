"""Masks of every kind: bool and additive, broadcast, sliced, with infinities and finite floors."""

from __future__ import annotations

from dataclasses import dataclass

from programs.builder import Builder

FLOORS = (
    "-inf",
    "max(torch.finfo(DT).min, torch.finfo(torch.float32).min)",
    "-1e9",
    "-1e4",
    "torch.finfo(torch.float16).min",
)
SEEN = (
    "torch.ones({shape}, dtype=torch.bool)",
    "torch.rand({shape}) > 0.3",
    "(torch.arange({n}) < ({n} + 1) // 2).expand({shape})",
    "(torch.arange({n}) >= torch.arange({batch}).view({batch}, 1, 1, 1)).expand({shape})",
    "(torch.arange({n}) <= torch.arange({rows})[:, None] + {n} - {rows}).expand({shape})",
    "((torch.arange({n}) >= 1) & (torch.arange({n}) < {n} - 1)).expand({shape}).clone()",
    "(torch.arange({n}) == {n} - 1).expand({shape})",
    "(torch.rand({shape}) > 0.5) & (torch.rand({first}, 1) > 0.4)",
    "torch.rand({shape}) > 0.97",
)


@dataclass(frozen=True)
class Scores:
    """The shape of attention's scores; the length as the inputs' sizes have it."""

    batch: int
    heads: int
    q_len: int
    length: str


def mask_input(b: Builder, scores: Scores, poisoned: bool) -> str:
    """A mask of the program's inputs; `poisoned` says that the last key holds NaN, and must not be seen."""
    n, slack = scores.length, b.pick((0, 0, 2)) if not poisoned else 0
    columns = f"{n} + {slack}" if slack else n
    dims = [b.pick((size, 1)) for size in (scores.batch, scores.heads, scores.q_len)][b.pick((0, 0, 0, 1, 2)) :]
    columns = "1" if not poisoned and not slack and b.chance(3) else columns
    shape, first = ", ".join([*map(str, dims), columns]), ", ".join(map(str, dims))
    seen = b.pick(SEEN).format(shape=shape, first=first, n=f"({columns})", batch=dims[0], rows=dims[-1])
    if (len(dims) != 3 and "view(" in seen) or columns == "1":
        seen = f"torch.rand({shape}) > 0.3"
    if poisoned:
        seen = f"({seen}) & (torch.arange({n}) < {n} - 1)"
    kind = "bool" if poisoned else b.pick(("bool", "bool", "float32", "DT", "DT"))
    if kind == "bool":
        return b.input("mask", seen)
    floor = b.pick(FLOORS)
    dtype = "DT" if kind == "DT" else "torch.float32"
    bias = b.pick(("torch.tensor(0.0)", "rand({shape}).float()", "-0.5 * torch.arange({n}).flip(0).float()"))
    code = f"torch.where({seen}, {bias.format(shape=shape, n=columns)}, {floor}).to({dtype})"
    if floor == "-inf" and b.chance(10):
        code = f"torch.where(torch.arange({columns}) == 1, inf, {code})"
    return b.input("mask", code)


def mask_for_call(b: Builder, mask: str, key: str) -> str:
    """The mask as one layer passes it: sliced to the length, viewed, made additive, by the layer itself or as it is."""
    tensor = b.tensor(mask)
    forms = ["{x}", "{x}", "{x}"]
    if tensor.shape[-1] > b.tensor(key).shape[2]:
        forms = ["{x}[..., : {n}]", "{x}.narrow(-1, 0, {n})", "{x}[..., 1 : {n} + 1]"]
    elif b.chance(30):
        forms = ["{x}[..., : {n}]", "{x}.clone()", "{x}[...]", "{x}.view({x}.shape)", "{x}.contiguous()"]
        forms += (
            ["{x}[None]"] if tensor.dim() < 4 else ["{x}[:]", "{x}[:, :, :, : {n}]", "{x}[:, :1]", "{x}[..., :1, :]"]
        )
        if tensor.dtype.is_floating_point:
            forms += ["{x} * 1.0", "{x}.to(DT)"]
        else:
            forms += ["torch.where({x}, 0.0, -inf).to(DT)", "torch.where({x}, 0.0, -inf)", "{x} & True"]
            forms += ["torch.zeros({x}.shape, dtype=DT).masked_fill({x}.logical_not(), -inf)"]
            forms += ["torch.zeros({x}.shape, dtype=DT).masked_fill_(~{x}, -inf)"]
    code = b.pick(forms).format(x=mask, n=b.size(key, 2))
    return code if b.chance(50) else b.let("m", code) or code
