"""Plan the launches that find the pages that sequences share, once per step for all layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tatten.ops.cuda.allocation import Dense, allocate
from tatten.ops.cuda.combine import INTERPRETED
from tatten.ops.cuda.gpu import has_early_launches
from tatten.ops.cuda.kernels.shared_pages import _cut_runs_kernel, _free_pages_kernel, _own_pages_kernel, _runs_kernel
from tatten.ops.cuda.launcher import Launch
from tatten.ops.page_runs import (
    GROUP_SIZES,
    LEVELS,
    ROWS,
    ROWS_OF_GROUPING,
    UNIT_KEYS,
    group_sizes,
    least_units,
    shared_pages_reference,
    unit_pages,
)
from tatten.ops.sizes import ceil_div, power_of_2

MOST_SORTED = 1024  # sequences that one program sorts
BLOCK = 1024  # pages whose owners a program clears
MOST_UNITS = 256  # units that a program compares at once


@dataclass(frozen=True)
class FindSharedPages:
    """Computes `tatten.ops.page_runs.shared_pages_reference` for tables of the layout that it was planned for."""

    free_pages: Launch
    find_owners: Launch
    find_runs: Launch
    cut_runs: Launch
    writes: tuple[Dense, Dense, Dense]  # owners, runs, and the result

    def __call__(self, block_table: Tensor, kv_lens: Tensor) -> Tensor:
        owners, runs, shared = allocate(block_table, *self.writes)
        kv_lens = kv_lens.contiguous()
        self.free_pages(owners)
        self.find_owners(block_table, kv_lens, owners)
        self.find_runs(block_table, kv_lens, owners, runs)
        self.cut_runs(runs, shared)
        return shared


def plan_shared_pages(
    block_table: Tensor, n_pages: int, page_size: int, q_length: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """Plan for checked arguments, those of `tatten.shared_pages`."""
    batch, columns = block_table.shape
    unit = unit_pages(page_size)
    n_units = columns // unit
    if batch > MOST_SORTED or n_units == 0:
        return lambda table, lens: shared_pages_reference(table, lens, n_pages, page_size, q_length)
    pdl = not INTERPRETED and has_early_launches(block_table.device)
    block = min(MOST_UNITS, max(16, power_of_2(n_units)))
    strides, tile = tuple(block_table.stride()), {"UNIT": unit, "PAGE": page_size, "BLOCK": block}
    entries, groupings = max(16, power_of_2(LEVELS * batch)), len(GROUP_SIZES)

    def options(lanes: int) -> dict[str, object]:
        return {"num_warps": min(8, max(1, lanes // 128)), "launch_pdl": pdl}

    return FindSharedPages(
        Launch(_free_pages_kernel, (ceil_div(n_pages, BLOCK),), options(BLOCK), n_pages=n_pages, BLOCK=BLOCK, PDL=pdl),
        Launch(
            _own_pages_kernel,
            (batch * ceil_div(n_units, block),),
            options(block),
            table_strides=strides,
            n_pages=n_pages,
            n_units=n_units,
            q_length=q_length,
            PDL=pdl,
            **tile,
        ),
        Launch(
            _runs_kernel,
            (batch,),
            options(block),
            table_strides=strides,
            n_pages=n_pages,
            n_units=n_units,
            batch=batch,
            q_length=q_length,
            LEVELS=LEVELS,
            GROUPINGS=groupings,
            PDL=pdl,
            **tile,
        ),
        Launch(
            _cut_runs_kernel,
            (groupings,),
            options(entries),
            n_units=n_units,
            batch=batch,
            least=least_units(page_size, q_length),
            LEVELS=LEVELS,
            KEYS=unit * page_size,
            GROUP_SIZES=tuple(group_sizes(batch)),
            ROWS=ROWS_OF_GROUPING,
            TILE=UNIT_KEYS,
            SEQUENCES=max(16, power_of_2(batch)),
            ENTRIES=entries,
            PDL=pdl,
        ),
        (
            Dense.of((n_pages,), torch.int32),
            Dense.of((2 * LEVELS + groupings * (LEVELS + 1), batch), torch.int32),
            Dense.of((ROWS, LEVELS * batch + 1), torch.int32),
        ),
    )
