"""Plan the combine of the partials that launches of the decode, prefix or levels kernel leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tatten.ops.cuda.allocation import Dense, allocate
from tatten.ops.cuda.gpu import has_early_launches, multiprocessors
from tatten.ops.cuda.kernels.combine import SIZES, _combine_kernel
from tatten.ops.cuda.launcher import Launch
from tatten.ops.cuda.tile_space import TileSpace
from tatten.ops.cuda.tuning import gpu_rates
from tatten.ops.sizes import ceil_div, power_of_2
from tatten.ops.states import accumulator_dtype

# With shared pages, the states for each SM up to which a program has one. On an H200, 2048 states take as long in
# pairs, and 2560 take less long.
MOST_SINGLE_STATES = 16
WIDE = 256  # the most columns of a state for one program; with more, programs share it and have few partials

INTERPRETED = not isinstance(_combine_kernel, triton.JITFunction)


class Partials(NamedTuple):
    """The states of whole work tiles, the partial states of the others, and the tensors that tell which are which."""

    out: Tensor
    lse: Tensor
    partial_out: Tensor
    partial_lse: Tensor
    kv_lens: Tensor | None = None
    block_list: Tensor | None = None
    row_groups: Tensor | None = None
    shared_pages: Tensor | None = None


_NO_LAUNCH = TileSpace(1, 1, 0, 1, 1, 1, 1, 16, 16)  # without keys


@dataclass(frozen=True)
class Combine:
    """Combines the partials of up to two launches with whole states of others.

    Attributes:
        launch: None if there is nothing to combine.
        writes: the out and lse of several launches; None for one launch, whose whole states are in place.
    """

    launch: Launch | None
    writes: tuple[Dense, Dense] | None

    def __call__(self, *partials: Partials, wholes: Sequence[Partials] = ()) -> Partials:
        """Combine the partials of the planned launches with whole states, the `out` and `lse` of `wholes`."""
        states = (*partials, *wholes)[0]
        if self.launch is None:
            return states
        out, lse = (states.out, states.lse) if self.writes is None else allocate(states.out, *self.writes)
        first, second = (*[tuple(x) for x in partials], (), ())[:2]
        self.launch(out, lse, first, second, tuple([x.out for x in wholes]), tuple([x.lse for x in wholes]))
        return states if out is states.out else states._replace(out=out, lse=lse)


def _sizes(x: TileSpace, suffix: str) -> dict[str, int]:
    return {f"{name}_{suffix}": getattr(x, "groups" if name == "n_groups" else name) for name in SIZES}


def combine_block(partials: int, states: int, dim: int) -> tuple[int, int]:
    """Choose the columns and the warps of a program. `dim` is a power of two."""
    if states > 1:
        return dim, max(1, states * dim // 256)
    if dim <= 128:
        return dim, 1 if partials <= 8 else 2
    if dim <= WIDE:  # limits the numbers that a thread holds
        return dim, min(8, max(1, partials * dim // 1024))
    # A thread then holds up to 64 numbers, and all partials of its columns if there are up to 16.
    columns = min(dim, max(64, 4096 // partials))
    return columns, 1 if partials == 1 else max(2, columns // 128)


def plan_combine(
    query: Tensor,
    value_dim: int,
    *spaces: TileSpace,
    wholes: Sequence[bool] = (),
    dtype: torch.dtype | None = None,
    max_and_sum: bool = False,
    shared_row: int | None = None,
    pdl: bool = True,
) -> Combine:
    """Plan the combine of launches on `spaces`, two at most, and of whole states, for values of head_dim `value_dim`.

    `wholes` has an entry for each set of whole states: True if it has maximum and sum instead of the lse. `dtype`
    defaults to that of the partials. `shared_row`: if the second launch is over pages that sequences of the first one
    share, the first row of its grouping in the result of `tatten::shared_pages`.
    """
    batch, q_heads, q_len, _ = query.shape
    writes = None
    if len(spaces) + len(wholes) > 1:
        acc_dtype, pair = accumulator_dtype(query.dtype), (2,) if max_and_sum else ()
        out = Dense.of((batch, q_heads, q_len, value_dim), dtype or acc_dtype)
        writes = out, Dense.of((batch, q_heads, q_len, *pair), acc_dtype)
    elif not (spaces and spaces[0].split):
        return Combine(None, None)
    n_states = batch * q_heads * q_len
    a, b = (*spaces, _NO_LAUNCH, _NO_LAUNCH)[:2]
    pdl = pdl and not INTERPRETED and has_early_launches(query.device)
    dim = max(16, power_of_2(value_dim))
    partials = min(64, power_of_2(max([x.most_partials(batch, dim > WIDE) for x in spaces] or [1])))
    shared = shared_row is not None
    if shared:  # few states have more partials, and room for them costs more than another pass
        partials = min(partials, 8)
    few = n_states < gpu_rates(query.device).many_states
    states = 1 if spaces or few else max(1, 1024 // dim)  # whole states of a program
    if shared and dim <= 128 and n_states > MOST_SINGLE_STATES * multiprocessors(query.device):
        # Finding slots takes most instructions of a program, so two states share them. 256 x 256 own keys after 8192
        # shared ones, of 32 heads, take 175 us instead of 179 (H200).
        states, partials = 2, min(partials, 4)
    block_dv, warps = combine_block(partials, states, dim)
    launch = Launch(
        _combine_kernel,
        (ceil_div(n_states, states) * ceil_div(value_dim, block_dv),),
        {"num_warps": warps, "launch_pdl": pdl},
        q_heads=q_heads,
        q_len=q_len,
        n_states=n_states,
        **_sizes(a, "a"),
        **_sizes(b, "b"),
        window=a.window or 0,
        batch=batch,
        VALUE_DIM=value_dim,
        BLOCK_DV=block_dv,
        # The kernel is compiled for chunks of the first segment only.
        SPACES=tuple([replace(x, chunk=0 if i else x.chunk).constants for i, x in enumerate(spaces)]),
        WINDOW=a.window is not None,
        INT64_TILES=a.int64_tiles(batch) or b.int64_tiles(batch),
        WHOLES=tuple(wholes),
        MAX_AND_SUM_OUT=max_and_sum,
        PARTIALS=partials,
        BLOCK_STATES=states,
        SHARED=shared,
        FIRST_ROW=shared_row or 0,
        PDL=pdl,
    )
    return Combine(launch, writes)
