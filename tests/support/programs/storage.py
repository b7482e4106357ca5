"""Where keys and values are stored: caches of many layouts, whole or cut out of larger tensors."""

from __future__ import annotations

from programs.builder import Builder

# How a cache [R, H, n, D] comes in, and what the program makes of it. `{n}` is a length by name, as inputs see it.
SEPARATE = (
    ("rand({R}, {H}, {n}, {D})", "{c}"),
    ("rand({R}, {n}, {H}, {D})", "{c}.transpose(1, 2)"),
    ("rand({n}, {R}, {H}, {D})", "{c}.permute(1, 2, 0, 3)"),
    ("rand({R}, {n}, {H}, {D}).transpose(1, 2)", "{c}"),
    ("rand({H}, {R}, {n}, {D}).transpose(0, 1)", "{c}"),
    ("rand({R}, {H}, {D}, {n}).mT", "{c}"),
    ("rand({R}, {H}, {D}, {n})", "{c}.mT"),
    ("rand({R} + 1, {H}, {n} + 3, {D})", "{c}[1:, :, 2:-1]"),
    ("rand({R}, {H}, {n} + 3, {D})", "{c}.narrow(2, 1, {c}.size(2) - 3)"),
    ("rand({R}, {H}, {n} + 2, {D})[:, :, 2:]", "{c}"),
    ("rand({R}, {H}, {n}, 2 * {D})[..., ::2]", "{c}"),
    ("rand({R} * {H}, {n}, {D})", "{c}.view(-1, {H}, *{c}.shape[1:])"),
    ("rand({R} * {H} * {n} * {D})", "{c}.view({R}, {H}, -1, {D})"),
    ("rand({R}, {n}, {H} * {D})", "{c}.view({R}, -1, {H}, {D}).transpose(1, 2)"),
    ("rand({R}, {n}, {H} * {D})", "{c}.unflatten(-1, ({H}, {D})).transpose(1, 2)"),
)
FUSED = (
    ("rand(2, {R}, {H}, {n}, {D})", "{c}[0]", "{c}[1]"),
    ("rand(2, {R}, {H}, {n}, {D})", "{c}.unbind(0)[0]", "{c}.unbind(0)[1]"),
    ("rand(2, {R}, {n}, {H}, {D})", "{c}[0].transpose(1, 2)", "{c}[1].transpose(1, 2)"),
    ("rand({R}, 2, {H}, {n}, {D})", "{c}[:, 0]", "{c}.select(1, 1)"),
    ("rand({R}, {n}, {H}, 2 * {D})", "{c}.transpose(1, 2).chunk(2, -1)[0]", "{c}.transpose(1, 2).chunk(2, -1)[1]"),
    ("rand({R}, 2 * {H}, {n}, {D})", "{c}[:, :{H}]", "{c}[:, {H}:]"),
    ("rand({R}, {H}, {n}, {D})", "{c}", "{c}"),
    ("rand({n}, 2, {R}, {H}, {D})", "{c}[:, 0].permute(1, 2, 0, 3)", "{c}[:, 1].permute(1, 2, 0, 3)"),
)


def cache(b: Builder, rows: int, heads: int, length: str, widths: tuple[int, int]) -> list[str]:
    """Key and value `[rows, heads, length, width]` of one segment, as views of what is stored."""
    sizes = {"R": rows, "H": heads, "n": length}
    if widths[0] == widths[1] and b.chance(40):
        code, *views = b.pick(FUSED)
        base = b.input("cache", code.format(**sizes, D=widths[0]))
        if b.chance(30):  # the program is given views, and the tensor that they are views of
            return [b.input("part", view.format(c=base, **sizes, D=widths[0])) for view in views]
        return [b.let("k", view.format(c=base, **sizes, D=widths[0])) or base for view in views]
    code, view = b.pick(SEPARATE)
    made = []
    for width in widths:
        if rows == 1 and b.chance(8):  # expanded before the program gets it
            code, view = f"rand(1, {{H}}, {{n}}, {{D}}).expand({b.number(2, 4)}, -1, -1, -1)", "{c}[:1]"
        name = b.input("cache", code.format(**sizes, D=width))
        shown = view.format(c=name, **sizes, D=width)
        made.append(name if shown == name else b.let("k", shown) or name)
    return made


def segment(b: Builder, rows: int, heads: int, length: str, widths: tuple[int, int], item: bool) -> list[str]:
    """Key and value of one segment, which may be cut out of longer ones by a length that a tensor holds."""
    if not item:
        return cache(b, rows, heads, length, widths)
    pair = cache(b, rows, heads, f"({length} + 2)", widths)
    used, number = b.input("used", f"torch.tensor({length})"), b.name("length")
    b.step(f"{number} = {used}.item()\ntorch._check({number} > 1)")
    made = []
    for x in pair:
        b.step(f"torch._check({number} <= {x}.size(2))")
        made.append(b.let("t", b.pick(["{x}[:, :, :{n}]", "{x}.narrow(2, 0, {n})"]).format(x=x, n=number)) or x)
    return made
