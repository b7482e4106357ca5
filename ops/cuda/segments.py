"""Planning attention to segments: a launch for each, or one for several levels of a tree, and their combine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tatten.ops.cuda.combine import Combine, Partials, TileSpace, plan_combine
from tatten.ops.cuda.decode import Segment, plan_segment
from tatten.ops.cuda.heuristics import (
    Tiles,
    capability,
    multiprocessors,
    packed_q_rows,
    programs_for,
    seqs_and_rows,
    splitting_pays,
    tiles_for,
    whole_programs,
)
from tatten.ops.cuda.levels import LevelsLaunch, choose_levels, plan_levels
from tatten.ops.cuda.recording import may_take_gluon
from tatten.ops.cuda.tma import takes_tma
from tatten.ops.sizes import ceil_div
from tatten.ops.states import State
from tatten.ops.variant import PLAIN, AttentionVariant

# Short kv_rows beside the prefix kernel: several small programs are under way on an SM.
SHORT_ROWS = Tiles(16, 64, 2, 2, 4)
# Measured on an H200: the prefix kernel's time for 128 packed queries by 128 keys of head_dim 128, and what an SM
# reads beside it.
PREFIX_TILE_US, SM_BYTES_PER_US = 2.2, 40e3


@dataclass(frozen=True)
class PrefixSegment:
    """A launch of the prefix kernel, for plain shared keys and many packed queries."""

    tile_space: TileSpace
    attend: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *_: object, row_groups: Tensor | None = None
    ) -> Partials:
        if row_groups is not None:
            row_groups = row_groups.contiguous()
        return Partials(*self.attend(query, key, value, row_groups), row_groups=row_groups)


AnyLaunch = Segment | PrefixSegment | LevelsLaunch


class Inputs(NamedTuple):
    """The tensors of one segment."""

    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    block_mask: Tensor | None
    row_groups: Tensor | None
    sinks: Tensor | None


@dataclass(frozen=True)
class Segments:
    """Computes `tatten::bifurcated_attention` for tensors of the layout that it was planned for.

    Attributes:
        launches: in the order that they start in.
        takes: the segments of each launch.
        split: the launches that leave partial states, as each combine takes them: two or fewer.
        whole: the other launches.
        combines: the last one takes whole states as well, those that the combines before it make included.
    """

    launches: tuple[AnyLaunch, ...]
    takes: tuple[tuple[int, ...], ...]
    split: tuple[tuple[int, ...], ...]
    whole: tuple[int, ...]
    combines: tuple[Combine, ...]

    def __call__(
        self,
        query: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        attn_masks: Sequence[Tensor | None],
        block_masks: Sequence[Tensor | None],
        row_groups: Sequence[Tensor | None] | None = None,
        variant: AttentionVariant = PLAIN,
    ) -> State:
        inputs = _inputs(keys, values, attn_masks, block_masks, row_groups, _once(variant.sinks, keys))
        left = [
            _start(launch, query, [inputs[i] for i in own])
            for launch, own in zip(self.launches, self.takes, strict=True)
        ]
        wholes = [left[i] for i in self.whole]
        *before, last = zip(self.combines, self.split, strict=True)
        wholes += [combine(*[left[i] for i in split]) for combine, split in before]
        combine, split = last
        state = combine(*[left[i] for i in split], wholes=wholes)
        return state.out, state.lse


def plan_segments(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    attn_masks: Sequence[Tensor | None],
    block_masks: Sequence[Tensor | None],
    scale: float,
    row_groups: Sequence[Tensor | None] | None = None,
    variant: AttentionVariant = PLAIN,
) -> Segments:
    """Plan the launches for checked inputs, whose segments have been narrowed to the window, if there is one."""
    inputs = _inputs(keys, values, attn_masks, block_masks, row_groups, _once(variant.sinks, keys))
    max_and_sum = any(x.attn_mask is not None and x.attn_mask.dtype != torch.bool for x in inputs)
    takes, launches = zip(*_plan_launches(query, inputs, scale, variant.softcap, max_and_sum), strict=True)
    spaces = [launch.tile_space for launch in launches]
    alone = len(spaces) == 1
    uneven = [i for i, space in enumerate(spaces) if space.split or alone]
    split = tuple(tuple(uneven[i : i + 2]) for i in range(0, len(uneven), 2)) or ((),)
    whole = tuple(i for i in range(len(spaces)) if i not in uneven)
    combines = []
    for number, own in enumerate(split):
        final = number == len(split) - 1
        wholes = [spaces[i].max_and_sum for i in whole] + [max_and_sum] * (len(split) - 1) if final else []
        combines.append(
            plan_combine(
                query,
                values[0].shape[3],
                *[spaces[i] for i in own],
                wholes=wholes,
                dtype=query.dtype if final else None,
                max_and_sum=max_and_sum and not final,
            )
        )
    return Segments(launches, takes, split, whole, tuple(combines))


def _inputs(*of_segments: Sequence[Tensor | None] | None) -> list[Inputs]:
    given = [[None] * len(of_segments[0] or ()) if x is None else x for x in of_segments]
    return [Inputs(*x) for x in zip(*given, strict=True)]  # type: ignore[arg-type]


def _once(sinks: Tensor | None, keys: Sequence[Tensor]) -> list[Tensor | None]:
    """The sinks for each segment: one has them, so that they count once. It is one that the fewest sequences share."""
    own = max(range(len(keys)), key=lambda i: keys[i].shape[0])
    return [sinks if i == own else None for i in range(len(keys))]


def _start(launch: AnyLaunch, query: Tensor, own: Sequence[Inputs]) -> Partials:
    if isinstance(launch, LevelsLaunch):
        return launch(query, [x.key for x in own], [x.value for x in own])
    (x,) = own
    variant = AttentionVariant(sinks=x.sinks)
    return launch(query, x.key, x.value, x.attn_mask, None, x.block_mask, variant, row_groups=x.row_groups)


def _plan_launches(
    query: Tensor, inputs: Sequence[Inputs], scale: float, softcap: float | None, max_and_sum: bool
) -> Iterator[tuple[tuple[int, ...], AnyLaunch]]:
    """Plan launches in order, with their segments. The prefix kernel waits for what came before, so it comes first."""
    plain = {i: x for i, x in enumerate(inputs) if softcap is None and x.sinks is None}  # not the decode kernel's alone
    levels = choose_levels(query, {i: x.key for i, x in plain.items() if _takes_levels_kernel(query, x, scale)})
    together = levels.segments if levels else ()
    alone = [i for i in range(len(inputs)) if i not in together]
    shared = [i for i in alone if i in plain] if len(inputs) > 1 else []
    wide = [i for i in shared if _takes_prefix_kernel(query, inputs[i], scale)]
    narrow = [i for i in alone if i not in wide]
    programs: int | None = None
    beside: dict[str, Any] = {}
    if len(inputs) == 2 and len(wide) == 1:
        prefix, other = inputs[wide[0]], inputs[narrow[0]]
        sms, sms_left = multiprocessors(query.device), _sms_beside_prefix(query, prefix, other)
        if sms_left:
            programs = sms - sms_left
            tiles = SHORT_ROWS if other.key.shape[2] <= 512 else tiles_for(1, other.key.shape[3], 2)
            beside = {"tiles": tiles, "programs": sms_left * tiles.per_sm}
    for i in wide:
        x = inputs[i]
        yield (i,), plan_prefix_segment(query, x.key, x.value, scale, programs, x.row_groups)
    if levels:
        whole = len(together) == len(inputs)
        keys, values = ([getattr(inputs[i], name) for i in together] for name in ("key", "value"))
        yield (
            together,
            plan_levels(
                query, keys, values, scale, levels.tile, whole=whole, max_and_sum=max_and_sum, follows=bool(wide)
            ),
        )
    for i in narrow:
        x = inputs[i]
        yield (
            (i,),
            plan_segment(
                *(query, x.key, x.value, x.attn_mask, None, scale, x.block_mask),
                AttentionVariant(softcap=softcap, sinks=x.sinks),
                row_groups=x.row_groups,
                whole=len(inputs) == 1,
                max_and_sum=max_and_sum,
                follows=i != narrow[0] or bool(wide or together),
                **beside,
            ),
        )


def _takes_levels_kernel(query: Tensor, x: Inputs, scale: float) -> bool:
    """Whether the levels kernel can compute this."""
    return (
        x.attn_mask is None
        and x.row_groups is None
        and x.key.shape[2] > 0
        and max(y.stride(3) * y.shape[3] for y in (query, x.key, x.value)) < 1 << 31
        and max(query.shape[3], x.value.shape[3]) <= 128
        and query.element_size() == 2
        and scale > 0
    )


def _takes_prefix_kernel(query: Tensor, x: Inputs, scale: float) -> bool:
    """Whether the prefix kernel can compute this, and is faster: with many keys even half empty."""
    dim = query.shape[3]
    packed = packed_q_rows(query, x.key, x.row_groups is not None)
    return (
        x.attn_mask is None
        and packed > 32
        and x.key.shape[2] > (64 if packed > 64 else 2048)
        and dim == x.value.shape[3]
        and dim in (64, 128)
        and query.is_cuda
        and capability(query.device) == (9, 0)
        and query.stride(3) == 1
        and scale > 0
        and takes_tma(x.key)
        and takes_tma(x.value)
        and may_take_gluon("prefix_sm90")
    )


def _sms_beside_prefix(query: Tensor, prefix: Inputs, beside: Inputs) -> int:
    """The number of SMs to leave to the segment `beside` the one of the prefix kernel, or 0 to run one after the other.

    The prefix kernel is bound by arithmetic and fills an SM; the other segment is bound by memory. On an H200 they take
    125 us side by side and 144 us one after the other (256 sequences, 32/8 heads, 8192 and 256 keys). A few SMs are not
    worth the partials that they leave.
    """
    _, kv_heads, kv_len, head_dim = prefix.key.shape
    if beside.attn_mask is not None or beside.row_groups is not None or packed_q_rows(query, beside.key) > 16:
        return 0
    if beside.key.shape[2] <= 64:
        return 0  # bound by latency rather than by memory
    has_row_groups = prefix.row_groups is not None
    seqs, kv_rows = seqs_and_rows(query, prefix.key, has_row_groups)
    if has_row_groups:  # about how many there are, where `kv_rows` is how many there can be
        kv_rows = max(prefix.key.shape[0], ceil_div(query.shape[0], seqs))
    q_blocks = ceil_div(packed_q_rows(query, prefix.key, has_row_groups), 128)
    tiles = q_blocks * kv_rows * kv_heads * ceil_div(kv_len, 128)
    prefix_us = tiles * head_dim / 128 * PREFIX_TILE_US
    beside_us = 2 * beside.key.numel() * beside.key.element_size() / SM_BYTES_PER_US
    sms = multiprocessors(query.device)
    sms_left = round(sms * beside_us / (prefix_us + beside_us))
    return min(sms_left, sms - 1) if sms_left >= sms // 5 else 0


def plan_prefix_segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    programs: int | None = None,
    row_groups: Tensor | None = None,
) -> PrefixSegment:
    """Plan a segment as `plan_segment` does, for plain shared keys that the prefix kernel takes."""
    from tatten.ops.cuda.prefix_sm90 import BLOCK_M, BLOCK_N, plan_prefix_attention

    _, kv_heads, kv_len, _ = key.shape
    has_row_groups = row_groups is not None
    seqs_per_kv, kv_rows = seqs_and_rows(query, key, has_row_groups)
    q_blocks = ceil_div(packed_q_rows(query, key, has_row_groups), BLOCK_M)
    work_tiles = (1 if has_row_groups else kv_rows) * kv_heads * q_blocks
    if programs is None:
        most, n_tiles = multiprocessors(query.device), ceil_div(kv_len, BLOCK_N)
        n_states = query.shape[0] * query.shape[1] * query.shape[2]
        if has_row_groups:
            programs = most
        elif splitting_pays(work_tiles, n_tiles, PREFIX_TILE_US, n_states, most):
            programs = programs_for(work_tiles, n_tiles, most)
        else:
            programs = whole_programs(work_tiles, n_tiles, most)
    sizes = 1, work_tiles, kv_len, kv_heads, seqs_per_kv, q_blocks, programs, BLOCK_M, BLOCK_N
    space = TileSpace(*sizes, has_row_groups=has_row_groups)
    return PrefixSegment(
        space, plan_prefix_attention(query, key, value, scale, programs, row_groups, split=space.split)
    )
