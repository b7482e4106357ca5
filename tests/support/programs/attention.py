"""A layer's attention, as models call it, and what becomes of its result."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from programs.builder import Builder
from programs.functorch import functional, gradient, mapped
from programs.other_forms import SCALES, flex, given, written_out

RESULTS: Sequence[str] = (
    "{x}.transpose(1, 2).reshape({x}.size(0), {x}.size(2), -1)",
    "{x}.transpose(1, 2).contiguous().view({x}.size(0), {x}.size(2), -1)",
    "{x}.transpose(1, 2).flatten(2)",
    "{x} * 0.5",
    "{x}.sum(-1)",
    "{x}.to(torch.float32)",
    "{x}[:, :, -1]",
    "{x}.contiguous()",
    "{x} @ {x}.mT",
)
OTHER_USES: Sequence[str] = ("{x}.sum(-1)", "{x} * 2", "{x}.clone()", "{x}[0]", "{x}.float().mean(-1)")


# How often attention is another than a call of SDPA, in percent.
OTHERS = {"": (("written_out", 8), ("flex", 2)), "dynamic": (("written_out", 45), ("flex", 10), ("mapped", 5))}
OTHERS["wrapped"] = (("mapped", 55), ("functional", 40), ("gradient", 5))
NEW = {"written_out": written_out, "mapped": mapped, "functional": functional, "gradient": gradient}


def attend(b: Builder, query: str, key: str, value: str, mask: str | None) -> str | None:
    """Attention in one of its forms; the name of its result."""
    drawn = b.number(1, 100)
    for name, percent in OTHERS[b.kind]:
        drawn -= percent
        if drawn > 0 or b.autocast:
            continue
        out = flex(b, query, key, value) if name == "flex" else NEW[name](b, query, key, value, _named(b, mask))
        if out is not None:
            b.forms.append(name)
            b.tensors.append(out)
            return out
    return call(b, query, key, value, mask)


def _named(b: Builder, mask: str | None) -> str | None:
    return b.let("m", mask) if mask is not None and not mask.isidentifier() else mask


def call(b: Builder, query: str, key: str, value: str, mask: str | None) -> str | None:
    """A call of SDPA, each argument by position or by name; the name of what it returns."""
    args = [query, key, value]
    named = b.chance(15)
    if named:
        args = [f"query={query}", f"key={key}", f"value={value}"]
    elif b.chance(10):
        args = [query, key, f"value={value}"]
        named = True
    if mask is not None:
        args.append(mask if not named and b.chance(50) else f"attn_mask={mask}")
        named |= "=" in args[-1][:10]
    if b.chance(10):
        positional = not named and mask is not None
        args.extend(["0.0", "False"] if positional and b.chance(50) else ["dropout_p=0.0", "is_causal=False"])
    elif mask is None and b.chance(8):
        args.append("is_causal=True")
    if b.chance(25):
        args.append(f"scale={given(b, 'scale', b.pick(SCALES)) if b.kind else b.pick((1.0, 0.3, 0.125, 0))}")
    if b.tensor(query).shape[1] != b.tensor(key).shape[1] or b.chance(10):
        args.append("enable_gqa=True")
    function = "aten_sdpa" if b.chance(5) else "sdpa"
    out = b.name("out")
    line = f"{out} = {function}({', '.join(args)})"
    if b.chance(8):
        dtype = b.pick(("bfloat16", "float16"))
        line = f'with torch.autocast("cpu", dtype=torch.{dtype}):\n    {line}'
    if not b.step(line):
        return None
    b.tensors.append(out)
    return out


def make_query(b: Builder, batch: int, heads: int, q_len: int, head_dim: int, last: str | None) -> str:
    """A query of its own for each layer, or one that the layer before had a part in."""
    if b.kind == "dynamic" and b.chance(60):  # numbers of heads and their sizes are the program's
        name = b.input("q", f"rand({batch}, {q_len}, {heads * head_dim})")
        made = b.let("t", f"{name}.view({batch}, {q_len}, {heads}, {head_dim}).transpose(1, 2)") or name
    elif b.chance(30):
        name = b.input("q", f"rand({batch}, {q_len}, {heads}, {head_dim})")
        made = b.let("t", f"{name}.transpose(1, 2)") or name
    else:
        made = b.input("q", f"rand({batch}, {heads}, {q_len}, {head_dim})")
    if last is not None and b.chance(60) and b.tensor(last).shape == b.tensor(made).shape:
        return b.let("q", f"({made} + {last}).to({made}.dtype)") or made
    return made


def use_result(b: Builder, out: str) -> list[str]:
    """Return the lines of a layer's results."""
    returned = [out]
    if b.chance(40):
        made = b.let("y", b.pick(RESULTS).format(x=out), keep=False)
        returned += [made] if made else []
    return returned


def use_elsewhere(b: Builder) -> list[str]:
    """Another user of a tensor on the way: it must still be there, and hold what it held then."""
    made = b.let("u", b.pick(OTHER_USES).format(x=b.pick(b.tensors[::-1])), keep=False)
    return [made] if made is not None and isinstance(b.tensor(made), torch.Tensor) else []
