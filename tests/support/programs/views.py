"""Ways to write what a tensor `[rows, heads, length, width]` becomes: for more sequences, more heads, as it is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from programs.builder import Builder

FOR_ALL: Sequence[str] = (
    "{x}.expand({n}, -1, -1, -1)",
    "{x}.expand({n}, {x}.size(1), {x}.size(2), {x}.size(3))",
    "{x}[:, None].expand(-1, {n}, -1, -1, -1).reshape({n}, *{x}.shape[1:])",
    "{x}[:1].squeeze(0).expand({n}, -1, -1, -1)",
    "{x}.expand({n}, -1, -1, -1).contiguous()",
    "{x}.repeat({n}, 1, 1, 1)",
    "torch.tile({x}, ({n}, 1, 1, 1))",
    "{x}.repeat_interleave({n}, dim=0)",
    "torch.broadcast_to({x}, ({n}, *{x}.shape[1:]))",
    "{x}.expand_as(torch.empty({n}, *{x}.shape[1:], dtype={x}.dtype))",
    "{x}.index_select(0, torch.zeros({n}, dtype=torch.int64))",
    "{x}[torch.zeros({n}, dtype=torch.int64)]",
    "{x}[[0] * {n}]",
    "torch.cat([{x}] * {n})",
    "torch.stack([{x}.squeeze(0)] * {n})",
    "torch.stack([{x}[0]] * {n}, dim=0)",
    "{x}.transpose(1, 2).expand({n}, -1, -1, -1).transpose(1, 2)",
    "{x}.permute(2, 0, 1, 3).repeat(1, {n}, 1, 1).permute(1, 2, 0, 3).clone()",
)
FOR_GROUPS: Sequence[str] = (
    "{x}.repeat_interleave({n}, dim=0)",
    "torch.repeat_interleave({x}, repeats={n}, dim=-4)",
    "{x}.unsqueeze(1).expand(-1, {n}, -1, -1, -1).flatten(0, 1)",
    "{x}[:, None].expand({x}.size(0), {n}, *{x}.shape[1:]).reshape(-1, *{x}.shape[1:])",
    "{x}.unsqueeze(1).repeat(1, {n}, 1, 1, 1).view(-1, *{x}.shape[1:])",
    "torch.stack([{x}] * {n}, dim=1).flatten(0, 1)",
    "{x}.transpose(0, 2).repeat_interleave({n}, dim=2).transpose(0, 2)",
    "{x}.repeat({n}, 1, 1, 1)",  # in another order: nothing that can be read off the row's number
    "torch.cat([{x}] * {n})",
    "{x}[torch.arange({x}.size(0)).repeat_interleave({n})]",
    "{x}.index_select(0, torch.arange({x}.size(0) * {n}) % {x}.size(0))",
    "{x}[torch.arange({x}.size(0) * {n}) // {n}]",
    "{x}[torch.arange({x}.size(0) * {n}) // {n} - {x}.size(0)]",
    "{x}.gather(0, (torch.arange({x}.size(0) * {n}) % {x}.size(0)).view(-1, 1, 1, 1).expand(-1, *{x}.shape[1:]))",
    "torch.take_along_dim({x}, torch.arange({x}.size(0) * {n})[:, None, None, None] // {n}, 0)",
    "F.embedding(torch.arange({x}.size(0) * {n}) % {x}.size(0), {x}.flatten(1)).view(-1, *{x}.shape[1:])",
    "{x}.repeat_interleave(torch.full(({x}.size(0),), {n}), dim=0, output_size={x}.size(0) * {n})",
    "{x}[torch.arange({x}.size(0)).flip(0)].repeat_interleave({n}, 0)",
    "{x}.repeat_interleave({n}, 0)[torch.arange({x}.size(0) * {n}).flip(0)]",
)
FOR_HEADS: Sequence[str] = (
    "{x}.repeat_interleave({n}, dim=1)",
    "{x}.repeat_interleave({n}, 1)",
    "torch.repeat_interleave({x}, {n}, -3)",
    "{x}[:, :, None, :, :].expand(-1, -1, {n}, -1, -1).flatten(1, 2)",
    "{x}[:, :, None].expand(*{x}.shape[:2], {n}, *{x}.shape[2:]).reshape({x}.size(0), -1, *{x}.shape[2:])",
    "{x}.unsqueeze(2).repeat(1, 1, {n}, 1, 1).flatten(1, 2)",
    "torch.stack([{x}] * {n}, dim=2).flatten(1, 2)",
    "{x}.transpose(1, 2).repeat_interleave({n}, 2).transpose(1, 2)",
    "{x}.unsqueeze(2).expand(-1, -1, {n}, -1, -1).flatten(1, 2).contiguous()",
    "torch.ops.aten.repeat_interleave.self_int({x}, {n}, 1)",
    "{x}.repeat(1, {n}, 1, 1)",  # in another order: query head h reads kv head h % kv_heads
    "torch.cat([{x}] * {n}, dim=1)",
    "torch.tile({x}, (1, {n}, 1, 1))",
    "{x}[:, None].expand(-1, {n}, -1, -1, -1).flatten(1, 2)",
)
SAME_VALUES: Sequence[str] = (
    "{x}.contiguous()",
    "{x}.clone()",
    "{x}.to(DT)",
    "{x}.detach()",
    "{x}[:]",
    "{x}[..., :]",
    "{x}.view({x}.shape)",
    "{x}.reshape(-1).view({x}.shape)",
    "{x}.view_as({x})",
    "{x}.expand_as({x})",
    "{x}.transpose(1, 2).transpose(1, 2)",
    "{x}.transpose(1, 2).contiguous().transpose(1, 2)",
    "{x}.permute(2, 0, 3, 1).permute(1, 3, 0, 2)",
    "{x}.swapaxes(-1, -2).clone().mT",
    "{x}.narrow(2, 0, {x}.size(2))",
    "{x}.flatten(0, 1).unflatten(0, {x}.shape[:2])",
    "{x}.unsqueeze(0).squeeze(0)",
    "{x}.unsqueeze(2)[:, :, 0]",
    "torch.stack([{x}])[0]",
    "torch.stack([{x}]).squeeze(0)",
    "torch.cat([{x}], 2)",
    "torch.cat([{x}[:, :, :1], {x}[:, :, 1:]], 2)",
    "torch.stack({x}.unbind(1), 1)",
    "{x}.index_select(0, torch.arange({x}.size(0)))",
    "torch.ops.aten.clone.default({x})",
    "torch.ops.aten.alias.default({x})",
    "torch.clone({x}, memory_format=torch.contiguous_format)",
    "{x}.to(torch.float64).to(DT)",
    "{x}.chunk(1, 0)[0]",
    "torch.cat(torch.split({x}, 1, 1), 1)",
    "torch.gather({x}, 3, torch.arange({x}.size(3)).expand({x}.shape))",
    "{x}.as_strided({x}.shape, {x}.stride(), {x}.storage_offset())",
)
OTHER_VALUES: Sequence[str] = (
    "{x} * 0.5",
    "{x}.flip(2)",
    "{x}.flip(0)",
    "{x}.roll(1, 2)",
    "{x}.to(torch.bfloat16).to(DT)",
    "{x}[torch.arange({x}.size(0)).flip(0)]",
    "{x}.index_select(2, torch.arange({x}.size(2)).flip(0))",
    "{x}[:, :1].expand(-1, {x}.size(1), -1, -1)",
    "{x}[:, :, :1].expand(-1, -1, {x}.size(2), -1)",
    "{x}[..., :1].expand({x}.shape)",
    "{x}[:, :, :1].repeat_interleave({x}.size(2), 2)",
    "{x}.transpose(0, 1).reshape({x}.shape)",
    "{x}.transpose(1, 2).reshape({x}.shape)",
    "{x}.repeat(1, 1, 2, 1)[:, :, : {x}.size(2)]",
    "torch.cat([{x}[:, :, -1:], {x}[:, :, :-1]], 2)",
    "custom_to({x}, 1.5)",
    "custom_clone({x})",
    "custom_contiguous({x})",
    "torch.ops.fuzz.to({x}, 0.5)",
    "torch.ops.fuzz.clone.default({x})",
    "alias({x})",
)
# Copies into a buffer that the program made: they write as well as give a value.
INTO_BUFFERS: Sequence[str] = (
    "torch.cat([{x}], 2, out={buffer})",
    "torch.cat([{x}[:, :, :1], {x}[:, :, 1:]], dim=2, out={buffer})",
    "torch.cat([{x}[:1], {x}[1:]], out={buffer})",
    "torch.stack([{x}[0], *{x}[1:]], out={buffer})",
    "torch.index_select({x}, 0, torch.arange({x}.size(0)), out={buffer})",
    "{buffer}.copy_({x})",
    "torch.mul({x}, 0.5, out={buffer})",
    "{buffer}.copy_({x}, non_blocking=True)",
    "{buffer}.index_copy_(2, torch.arange({x}.size(2)), {x})",
)
CATS: Sequence[str] = (
    "torch.cat([{parts}], 2)",
    "torch.cat(({parts}), dim=-2)",
    "torch.cat(tensors=[{parts}], dim=2)",
    "torch.concat([{parts}], axis=2)",
    "torch.concatenate([{parts}], 2)",
    "torch.cat([x.transpose(1, 2) for x in ({parts},)], 1).transpose(1, 2)",
    "torch.cat([x.permute(2, 0, 1, 3) for x in ({parts},)]).permute(1, 2, 0, 3)",
    "torch.cat([{parts}], 2).clone()",
)


def spread(b: Builder, pair: Sequence[str], n: int, templates: Sequence[str]) -> list[str]:
    """Keys and values written in one way, now and then each in its own."""
    template = b.pick(templates)
    made = []
    for x in pair:
        used = b.pick(templates) if b.chance(3) else template
        made.append(b.let("t", used.format(x=x, n=n)) or x)
    return made


def more_sequences(b: Builder, pair: Sequence[str], batch: int) -> list[str]:
    """Rows that sequences share, given to each of them."""
    rows = b.tensor(pair[0]).shape[0]
    return list(pair) if rows == batch else spread(b, pair, batch // rows, FOR_ALL if rows == 1 else FOR_GROUPS)


def more_heads(b: Builder, pair: Sequence[str], heads: int) -> list[str]:
    """Kv heads repeated for the query heads that share them."""
    have = b.tensor(pair[0]).shape[1]
    return spread(b, pair, heads // have, FOR_HEADS) if have != heads else list(pair)


def detour(b: Builder, pair: Sequence[str]) -> list[str]:
    """Something that keeps the shape, and mostly the values."""
    if not b.chance(15 if b.kind == "dynamic" else 45):
        return list(pair)
    kind = b.number(0, 9)
    if kind < 6:
        return spread(b, pair, 1, SAME_VALUES)
    if kind < 8:
        return spread(b, pair, 1, OTHER_VALUES)
    return [into_buffer(b, x, b.pick(INTO_BUFFERS)) for x in pair]


def into_buffer(b: Builder, x: str, template: str) -> str:
    maker = "torch.zeros({shape}, dtype=DT)" if not b.dynamic and b.chance(60) else ""
    shape = ", ".join(map(str, b.tensor(x).shape))
    buffer = b.input("buffer", maker.format(shape=shape)) if maker else b.let("buffer", f"torch.zeros_like({x})")
    assert buffer is not None
    return b.let("t", template.format(x=x, buffer=buffer)) or x


def joined(b: Builder, segments: Sequence[Sequence[str]]) -> list[str]:
    """Segments `[(key, value), ...]` as one key and one value."""
    if len(segments) == 1 and not b.chance(10):
        return list(segments[0])
    if b.chance(12):
        return [assembled(b, parts) for parts in zip(*segments, strict=True)]
    template = b.pick(CATS)
    let = partial(b.let, "t")
    pair = [let(template.format(parts=", ".join(parts))) for parts in zip(*segments, strict=True)]
    return [x or parts[0] for x, parts in zip(pair, zip(*segments, strict=True), strict=True)]


def assembled(b: Builder, parts: Sequence[str]) -> str:
    """`torch.cat` over the length, written as copies into slices."""
    total = " + ".join(f"{x}.size(2)" for x in parts)
    whole = b.let("t", f"{parts[0]}.new_empty(*{parts[0]}.shape[:2], {total}, {parts[0]}.size(3))")
    assert whole is not None
    begin = "0"
    for x in parts:
        place = f"{whole}[:, :, {begin} : {begin} + {x}.size(2)]"
        b.step(b.pick([f"{place} = {x}", f"{place}.copy_({x})", f"{whole}.narrow(2, {begin}, {x}.size(2)).copy_({x})"]))
        begin = f"{begin} + {x}.size(2)"
    return whole
