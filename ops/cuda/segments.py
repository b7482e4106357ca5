"""Plan attention to segments: a launch for each, or one for several levels of a tree, and their combine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tatten.ops.call import AttentionCall
from tatten.ops.cuda.combine import Combine, plan_combine
from tatten.ops.cuda.segment_launches import AnyLaunch, plan_invariant_launches, plan_launches
from tatten.ops.states import State


@dataclass(frozen=True)
class Segments:
    """Computes `tatten::bifurcated_attention` for calls of the layout that it was planned for.

    Attributes:
        launches: the launches, in the order that they start in.
        segments_by_launch: the numbers of the segments of each launch.
        split: for each combine, the launches whose partial states it takes: two or fewer.
        unsplit: the other launches.
        combines: the combines; the last one also takes whole states, those of earlier combines included.
    """

    launches: tuple[AnyLaunch, ...]
    segments_by_launch: tuple[tuple[int, ...], ...]
    split: tuple[tuple[int, ...], ...]
    unsplit: tuple[int, ...]
    combines: tuple[Combine, ...]

    def __call__(self, call: AttentionCall) -> State:
        partials = [
            launch(call, *[call.segments[i] for i in numbers])
            for launch, numbers in zip(self.launches, self.segments_by_launch, strict=True)
        ]
        wholes = [partials[i] for i in self.unsplit]
        *earlier, last = zip(self.combines, self.split, strict=True)
        wholes += [combine(*[partials[i] for i in split]) for combine, split in earlier]
        combine, split = last
        state = combine(*[partials[i] for i in split], wholes=wholes)
        return state.out, state.lse


def plan_segments(call: AttentionCall) -> Segments:
    """Plan the launches for a checked call. Segments have been narrowed to the window, if there is one.

    With `batch_invariant` the last segment has each sequence's own keys, and the block lists of the others list every
    block.
    """
    query, segments = call.query, call.segments
    max_and_sum = any(x.attn_mask is not None and x.attn_mask.dtype != torch.bool for x in segments)
    plan = plan_invariant_launches if call.batch_invariant else plan_launches
    segments_by_launch, launches = zip(*plan(call, max_and_sum), strict=True)
    spaces = [launch.tile_space for launch in launches]
    single = len(spaces) == 1
    # A combine of two launches supports chunks in the first one only.
    at_once = 1 if call.batch_invariant else 2
    split_launches = [i for i, space in enumerate(spaces) if space.split or single or call.batch_invariant]
    split = tuple(tuple(split_launches[i : i + at_once]) for i in range(0, len(split_launches), at_once)) or ((),)
    unsplit = tuple(i for i in range(len(spaces)) if i not in split_launches)
    combines = []
    for number, numbers in enumerate(split):
        final = number == len(split) - 1
        wholes = [spaces[i].max_and_sum for i in unsplit] + [max_and_sum] * (len(split) - 1) if final else []
        combines.append(
            plan_combine(
                query,
                segments[0].value.shape[3],
                *[spaces[i] for i in numbers],
                wholes=wholes,
                dtype=query.dtype if final else None,
                max_and_sum=max_and_sum and not final,
            )
        )
    return Segments(launches, segments_by_launch, split, unsplit, tuple(combines))
