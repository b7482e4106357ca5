"""Plan attention to segments: a launch for each, or one for several levels of a tree, and their combine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tatten.ops.cuda.combine import Combine, Partials, plan_combine
from tatten.ops.cuda.levels import LevelsLaunch
from tatten.ops.cuda.segment_launches import AnyLaunch, Inputs, plan_invariant_launches, plan_launches
from tatten.ops.states import State
from tatten.ops.variant import PLAIN, AttentionVariant


@dataclass(frozen=True)
class Segments:
    """Computes `tatten::bifurcated_attention` for tensors of the layout that it was planned for.

    Attributes:
        launches: the launches, in the order that they start in.
        takes: the segments of each launch.
        split: the launches that leave partial states, for each combine: two or fewer.
        whole: the other launches.
        combines: the combines; the last one also takes whole states, those of earlier combines included.
        with_sinks: the one segment that counts the sinks, if there are any.
    """

    launches: tuple[AnyLaunch, ...]
    takes: tuple[tuple[int, ...], ...]
    split: tuple[tuple[int, ...], ...]
    whole: tuple[int, ...]
    combines: tuple[Combine, ...]
    with_sinks: int

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
        inputs = _inputs(keys, values, attn_masks, block_masks, row_groups, variant.sinks, self.with_sinks)
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
    *,
    batch_invariant: bool = False,
) -> Segments:
    """Plan the launches for checked inputs. Segments have been narrowed to the window, if there is one.

    With `batch_invariant` the last segment has each sequence's own keys, and the block lists of the others have every
    block.
    """
    # The sinks go to a segment that the fewest sequences share. With `batch_invariant` this must not depend on sharing.
    with_sinks = len(keys) - 1 if batch_invariant else max(range(len(keys)), key=lambda i: keys[i].shape[0])
    inputs = _inputs(keys, values, attn_masks, block_masks, row_groups, variant.sinks, with_sinks)
    max_and_sum = any(x.attn_mask is not None and x.attn_mask.dtype != torch.bool for x in inputs)
    plan = plan_invariant_launches if batch_invariant else plan_launches
    takes, launches = zip(*plan(query, inputs, scale, variant.softcap, max_and_sum), strict=True)
    spaces = [launch.tile_space for launch in launches]
    alone = len(spaces) == 1
    # A combine of two segments knows chunks of the first one only.
    at_once = 1 if batch_invariant else 2
    uneven = [i for i, space in enumerate(spaces) if space.split or alone or batch_invariant]
    split = tuple(tuple(uneven[i : i + at_once]) for i in range(0, len(uneven), at_once)) or ((),)
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
    return Segments(launches, takes, split, whole, tuple(combines), with_sinks)


def _inputs(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    attn_masks: Sequence[Tensor | None],
    block_masks: Sequence[Tensor | None],
    row_groups: Sequence[Tensor | None] | None,
    sinks: Tensor | None,
    with_sinks: int,
) -> list[Inputs]:
    of_segments = zip(keys, values, attn_masks, block_masks, row_groups or [None] * len(keys), strict=True)
    return [Inputs(*x, sinks if i == with_sinks else None) for i, x in enumerate(of_segments)]


def _start(launch: AnyLaunch, query: Tensor, own: Sequence[Inputs]) -> Partials:
    if isinstance(launch, LevelsLaunch):
        return launch(query, [x.key for x in own], [x.value for x in own])
    (x,) = own
    variant = AttentionVariant(sinks=x.sinks)
    return launch(query, x.key, x.value, x.attn_mask, None, x.block_mask, variant, row_groups=x.row_groups)
