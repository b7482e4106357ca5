"""Attention under `vmap`, `functional_call` and `grad`."""

from __future__ import annotations

from programs.builder import Builder
from programs.other_forms import form, numbers
from programs.views import more_heads


def functional(b: Builder, query: str, key: str, value: str, mask: str | None) -> str | None:
    """A module under `functional_call`, with its buffer or another one, maybe for each of several under `vmap`."""
    values = numbers(b)
    attend = b.pick(("attend_matmul", "attend_divided", "attend_einsum", "attend_where"))
    if values["softcap"] == "None" and b.chance(40):
        attend = "attend_sdpa"
    key, value = more_heads(b, [key, value], b.tensor(query).shape[1])
    layer = b.setting("layer", f"Attend({attend}, {', '.join(f'{k}={v}' for k, v in values.items())}).eval()")
    tensors = f"{query}, {key}, {value}, {mask}"
    if b.chance(30):
        gains = b.input("gains", "rand(3)")
        made = b.step(
            f"def run(gain, q, k, v, m):\n    return functional_call({layer}, {{'gain': gain}}, (q, k, v, m))\n"
            f"outs = vmap(run, in_dims=(0, None, None, None, None))({gains}, {tensors})"
        )
        return b.let("out", f"outs[{b.number(-1, 1)}]", keep=False) if made else None
    state = b.pick((f"{{'gain': {b.input('gain', 'rand(1)')}}}", f"dict({layer}.named_buffers())"))
    return b.let("out", f"functional_call({layer}, {state}, ({tensors}))", keep=False)


def gradient(b: Builder, query: str, key: str, value: str, mask: str | None) -> str | None:
    """The gradient of attention: no op of tatten has a derivative."""
    key, value = more_heads(b, [key, value], b.tensor(query).shape[1])
    name = b.pick(("attend_matmul", "attend_sdpa", "attend_divided"))
    return b.let("out", f"grad(lambda q: {name}(q, {key}, {value}, {mask}, 0.3).sum())({query})", keep=False)


def mapped(b: Builder, query: str, key: str, value: str, mask: str | None) -> str | None:
    """Attention under `vmap`: over the batch, the batch and the heads, or several keys and values for one query."""
    batch, heads = b.tensor(query).shape[:2]
    over = b.pick(("batch", "batch", "batch and heads", "several", "several and batch"))
    repeats = over == "batch" and b.tensor(key).shape[1] != heads  # inside
    if not repeats:
        key, value = more_heads(b, [key, value], heads)
    name, numbers_given = form(b, grouped=not repeats and over != "batch and heads")
    own = b.name("attend")
    parts = ["k", "v"]
    if repeats:
        repeat = b.pick(("{x}.repeat_interleave({n}, 0)", "{x}.repeat({n}, 1, 1)"))
        parts = [repeat.format(x=x, n=heads // b.tensor(key).shape[1]) for x in parts]
    first = "[0]" if name == "attend_with_scores" else ""
    lines = [f"def {own}(q, k, v, m):", f"    return {name}(q, {', '.join(parts)}, m{numbers_given}){first}"]
    if over.startswith("several"):
        lines.append(f"k2, v2 = torch.stack([{key}, {key}.flip(2)]), torch.stack([{value}, {value} * 0.5])")
        key, value = "k2", "v2"
    if over == "several":
        of_query = b.pick(("None", "0"))
        query = query if of_query == "None" else f"torch.stack([{query} * 0.5, {query}])"
        call = f"vmap({own}, ({of_query}, 0, 0, None))"
    else:
        mask, dims = _mask_dims(b, mask, (batch, heads) if over == "batch and heads" else (batch,))
        call = own if len(dims) == 1 else f"vmap({own}, (0, 0, 0, {dims[1]}))"
        if over == "batch" and b.chance(30):
            key, value, of_keys = f"{key}.movedim(0, 2)", f"{value}.movedim(0, 2)", 2
        else:
            of_keys = 0
        call = f"vmap({call}, (0, {of_keys}, {of_keys}, {dims[0]}))"
        call = f"vmap({call}, (None, 0, 0, None))" if over == "several and batch" else call
    out, taken = b.name("out"), f"[{b.number(-1, 1)}]" if over.startswith("several") else ""
    lines.append(f"{out} = {call}({query}, {key}, {value}, {mask}){taken}")
    return out if b.step("\n".join(lines)) else None


def _mask_dims(b: Builder, mask: str | None, sizes: tuple[int, ...]) -> tuple[str | None, list[int | None]]:
    """The mask without dims that are alike for all, and which of its dims each level of `vmap` goes over."""
    shape = () if mask is None else tuple(b.tensor(mask).shape)
    dims: list[int | None] = []
    for level, size in enumerate(sizes):
        has_dim = len(shape) == 4 - level
        dims.append(0 if has_dim and shape[0] == size else None)
        if has_dim and dims[-1] is None:
            mask = f"{mask}.squeeze({sum(x == 0 for x in dims)})"
        shape = shape[1:] if has_dim else shape
    return mask, dims
