"""Attention that is not one call of SDPA: written out, in modules, in flex calls."""

from __future__ import annotations

from collections.abc import Sequence

from programs.builder import Builder
from programs.views import more_heads

WRITTEN_OUT: Sequence[str] = (
    *("attend_matmul", "attend_divided", "attend_einsum", "attend_where", "attend_with_scores", "attend_grouped"),
    "attend_scaled_query",  # not in low precision, where it rounds the query
)
SCALES: Sequence[str] = ("0.3", "0.125", "0.2 + 0.01 * n0", "(4 + n0) ** -0.5")
SOFT_CAPS: Sequence[str] = ("None", "None", "None", "5.0", "3.0 + 0.1 * n0")
FILLS: Sequence[str] = ("-inf", "-inf", "torch.finfo(DT).min", "-1e4", "-1e9")
MASK_MODS: Sequence[str] = (
    "i + {n} - {q_len} >= j",
    "(i + {n} - {q_len} >= j) & (j > i)",
    "j < {n} - b",
    "(j - i) % 3 != 1",
    "(j % 2 == h % 2) | (j == 0)",
    "{table}[b, j] > -0.5",
    "{table}[b][j] > -0.5",
    "j < {place} + 1",
    "i + {place} >= j",
)
BLOCK_SIZES: Sequence[str] = ("", ", BLOCK_SIZE=16", ", BLOCK_SIZE=(1, 4)", ", BLOCK_SIZE=(2, 32)")
SCORE_MODS: Sequence[str] = ("None", "None", "None", "5 * torch.tanh(s / 5)", "{cap} * torch.tanh(s / {cap})", "s + h")


def numbers(b: Builder, softcap: bool = True) -> dict[str, str]:
    """Scale, soft cap, fill value and the p of a dropout that is off, each as an expression of the input's sizes."""
    return {
        "scale": b.pick(SCALES),
        "softcap": b.pick(SOFT_CAPS) if softcap and b.chance(40) else "None",
        "fill": b.pick(FILLS),
        "p": b.pick(("0.0", "0.1", "1 / (2 + n0)")),
    }


def given(b: Builder, name: str, code: str) -> str:
    """A number as an argument of the program, or as it stands where it is always the same."""
    if code in ("None", "-inf") or ("n0" not in code and b.chance(40)):
        return code
    return b.setting(name, code)


def form(b: Builder, softcap: bool = True, grouped: bool = True) -> tuple[str, str]:
    """A function's or a module's name, and its arguments after query, key, value and mask: as a program has them."""
    exact = b.dtype in ("float32", "float64")
    names = [x for x in WRITTEN_OUT if (exact or x != "attend_scaled_query") and (grouped or x != "attend_grouped")]
    name = "attend_sdpa" if b.chance(30) else b.pick(names)
    values = numbers(b, softcap and name != "attend_sdpa")
    if b.chance(40) and name != "attend_with_scores":
        arguments = ", ".join(f"{key}={value}" for key, value in values.items())
        return b.setting("layer", f"Attend({name}, {arguments}).eval()"), ""
    return name, "".join(f", {key}={given(b, key, value)}" for key, value in values.items())


def written_out(b: Builder, query: str, key: str, value: str, mask: str | None) -> str | None:
    """Attention by a function or a module; the name of the result."""
    repeats = b.chance(80)
    name, numbers_given = form(b, grouped=not repeats)
    if repeats or "grouped" not in dict(b.settings).get(name, name):
        key, value = more_heads(b, [key, value], b.tensor(query).shape[1])
    call = f"{name}({query}, {key}, {value}, {mask}{numbers_given})"
    if name == "attend_with_scores":
        out, scores = b.name("out"), b.name("scores")
        if not b.step(f"{out}, {scores} = {call}"):
            return None
        if b.chance(20):
            b.returned.append(scores)
        return out
    return b.let("out", call, keep=False)


def flex(b: Builder, query: str, key: str, value: str) -> str | None:
    """A flex call with a block mask: of the whole, for each sequence or head, from lists, one row of a longer one."""
    batch, heads, q_len, _ = b.tensor(query).shape
    n, kv_heads = f"{key}.size(2)", b.tensor(key).shape[1]
    if heads % kv_heads:
        return None
    cap = given(b, "cap", "4.0 + 0.1 * n0")
    score = b.pick(SCORE_MODS).format(cap=cap)
    score = "None" if score == "None" else f"lambda s, b, h, i, j: {score}"
    scale = b.pick(("None", given(b, "scale", b.pick(SCALES))))
    total = str(b.length)
    mod = b.pick(MASK_MODS)
    table = b.input("table", f"torch.randn({batch}, {total})") if "table" in mod else ""
    place = b.input("place", "torch.tensor(2)") if "place" in mod else ""
    mask_mod = f"lambda b, h, i, j: {mod.format(n=n, q_len=q_len, table=table, place=place)}"
    size = b.pick(BLOCK_SIZES)
    ahead = f"lambda b, h, i, j: {mod.format(n=f'({total})', q_len=q_len, table=table, place=place)}"
    extent = f"{b.pick(('None', str(batch)))}, {b.pick(('None', str(heads)))}, {q_len}"
    made = f"create_block_mask({{mod}}, {extent}, {{n}}, 'cpu'{size})"
    where = b.pick(("before", "inside", "listed", "row", "none"))
    if where == "before" and not (table or place):
        blocks = b.setting("blocks", made.format(mod=ahead, n=total))
    elif where == "row":
        spot = place or b.input("place", "torch.tensor(2)")
        full = b.setting("blocks", f"causal_blocks({total})")
        blocks = f"at_place({full}, {b.pick((spot, f'{spot} // 16'))}, lambda b, h, i, j: i + {spot} >= j, {n})"
    elif where == "none":
        blocks = "None"
    else:
        blocks = made.format(mod=mask_mod, n=n)
        blocks = f"listed({blocks}, {mask_mod})" if where == "listed" else blocks
    return b.let("out", f"attend_flex({query}, {key}, {value}, {blocks}, {score}, {scale})", keep=False)
