"""Runs of pages that sequences share, found from a block table without a host sync, in plain PyTorch.

Tables are compared 128 keys at a time: a *unit* is 128 keys, or a page if that is larger. So no tile of a kernel has
keys that some sequences of a group attend to and others don't.

The *leader* of a sequence at a unit is the lowest sequence with the same pages there, which may be itself. A *run* is a
stretch of units with one leader. A sequence's first runs are shared as long as each is, up to `LEVELS` of them. All
that follows is its *own part*. Sequences whose runs have one leader and one start are a group, and read the leader's
pages. Each stops where its own run does, so sequences that leave a prefix at different depths stay in one group.

The prefixes need not form a tree: each entry of a run equals the leader's entry in the same place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.sizes import ceil_div, power_of_2

LEVELS = 2  # a system prompt and a question, or a question and its samples
UNIT_KEYS = 128  # the keys of the widest tile of kernels over shared pages
# The most sequences of a row group, in each grouping. With 4 query heads for each kv head, 32 sequences fill a tile of
# 128 packed queries. With one query head, 64 sequences fill a tile of 64.
GROUP_SIZES = (32, 64)
# A run of fewer keys for each query is not shared. Its float32 states, the leader's included, are written and read:
# 16 bytes for each column of a query head. A key and its value in 16 bits have 4 for each kv head, so 64 keys weigh as
# much as the states of 16 query heads.
LEAST_KEYS = 64

# The rows of a grouping; the result has those of one grouping after the other. With n = LEVELS * batch, entry `level *
# batch + b` is sequence b at a level. The first 4 are those of `tatten::row_groups` for n sequences, of which only
# entries with a run take part.
(
    LEADERS,  # [:n] the leader of each row group, [n] the number of row groups
    BEGINS,  # the position in ORDER where each row group begins, and from the last one on the number of entries in it
    ORDER,  # entries with a run, by level and leader, the longest first; then the others
    PLACES,  # for each entry: row group times its most sequences plus slot, or -1
    STARTS,  # the first key of each row group
    STOPS,  # one past the last key of its longest run
    ENTRY_STOPS,  # for each entry: one past the last key of its run, or 0
    OWN,  # [:batch] the first key of each sequence's own part
    TILE_ENDS,  # tiles of UNIT_KEYS keys in the row groups up to each, and from the last one on in all of them
) = range(9)
ROWS_OF_GROUPING = 9
ROWS = len(GROUP_SIZES) * ROWS_OF_GROUPING


def group_sizes(batch: int) -> list[int]:
    """Return the most sequences of a row group in each grouping, powers of two, for a batch of this size."""
    return [min(size, power_of_2(batch)) for size in GROUP_SIZES]


def first_row(batch: int, size: int) -> int:
    """Return the first row of the grouping with row groups of up to `size` sequences."""
    return ROWS_OF_GROUPING * group_sizes(batch).index(size)


def unit_pages(page_size: int) -> int:
    return max(1, UNIT_KEYS // page_size)


def least_units(page_size: int, q_length: int) -> int:
    """Return the smallest number of units in a run that is worth sharing."""
    return ceil_div(LEAST_KEYS * q_length, max(UNIT_KEYS, page_size))


def shared_pages_reference(block_table: Tensor, kv_lens: Tensor, n_pages: int, page_size: int, q_length: int) -> Tensor:
    """Compute `tatten::shared_pages` in plain PyTorch.

    Args:
        block_table, kv_lens, n_pages, page_size, q_length: as `tatten.shared_pages` takes them.

    Returns:
        int32 `[ROWS, LEVELS * batch + 1]`; entries that the comments on the rows don't describe are 0.
    """
    batch, columns = block_table.shape
    unit = unit_pages(page_size)
    keys, n_units = unit * page_size, columns // unit
    sequences = torch.arange(batch, device=block_table.device)
    unit_numbers = torch.arange(n_units, device=block_table.device)
    entries = block_table[:, : n_units * unit].to(torch.int64).unflatten(1, (n_units, unit))
    named = ((entries >= 0) & (entries < n_pages)).all(dim=2)
    seen = ((kv_lens.to(torch.int64) - q_length + 1).clamp(min=0) // keys).clamp(max=n_units)
    shareable = named & (unit_numbers < seen[:, None])

    # The owner of a page is the lowest sequence that has it at the end of any unit.
    last = torch.where(shareable, entries[..., -1], n_pages)
    owner = torch.full((n_pages + 1,), batch, device=sequences.device)
    owner = owner.scatter_reduce(0, last.flatten(), sequences[:, None].expand_as(last).flatten(), "amin")
    leader = owner[last].clamp(max=batch - 1)
    same = shareable & shareable[leader, unit_numbers] & (entries[leader, unit_numbers] == entries).all(dim=2)
    leader = torch.where(same, leader, sequences[:, None])
    leader = torch.cat((leader, sequences[:, None]), dim=1)  # one unit past the end, which no sequence shares
    unit_stops = torch.arange(n_units + 1, device=sequences.device)

    start, own_start, may_share = (
        torch.zeros_like(sequences),
        torch.zeros_like(sequences),
        torch.ones_like(sequences, dtype=torch.bool),
    )
    leaders: list[Tensor] = []
    starts: list[Tensor] = []
    stops: list[Tensor] = []
    for _ in range(LEVELS):
        run_leader = leader.gather(1, start[:, None])[:, 0]
        ends_here = (unit_stops >= start[:, None]) & (leader != run_leader[:, None])
        end = torch.where(ends_here, unit_stops, n_units).amin(dim=1).minimum(seen)
        worth_sharing = end - start >= least_units(page_size, q_length)
        follows = (
            may_share & worth_sharing & (run_leader != sequences) & may_share[run_leader] & (start == start[run_leader])
        )
        longest = torch.zeros_like(sequences).scatter_reduce(0, run_leader, torch.where(follows, end, 0), "amax")
        leads = may_share & (run_leader == sequences) & (longest > start)
        stop = torch.where(follows, end, torch.where(leads, longest, start))
        leaders.append(run_leader)
        starts.append(start)
        stops.append(stop)
        own_start = torch.where(stop > start, stop, own_start)
        may_share = (stop > start) & (stop == end)  # else keys between this run and the next would be left out
        start = end
    return _cut(torch.stack(leaders), torch.stack(starts), torch.stack(stops), own_start, n_units, keys)


def _cut(leaders: Tensor, starts: Tensor, stops: Tensor, own_start: Tensor, n_units: int, keys: int) -> Tensor:
    """Sort the entries of all levels into row groups. Leaders, starts and stops are `[LEVELS, batch]`, in units."""
    levels, batch = leaders.shape
    n = levels * batch
    group = (torch.arange(levels, device=own_start.device)[:, None] * batch + leaders).flatten()
    starts, stops, leaders = starts.flatten(), stops.flatten(), leaders.flatten()
    active = stops > starts
    group = torch.where(active, group, n)
    longest_first = torch.where(active, n_units - stops, 0)
    order = torch.argsort(group * (n_units + 1) + longest_first, stable=True)
    group, positions = group[order], torch.arange(n, device=own_start.device)
    opens = torch.cat((torch.ones_like(active[:1]), group[1:] != group[:-1]))
    rank = positions - torch.where(opens, positions, 0).cummax(dim=0).values
    zero, n_entries = own_start.new_zeros(1), active.sum()[None]

    def grouping(size: int) -> Tensor:
        begins = (rank % size == 0) & (group < n)
        number = begins.cumsum(0) - 1
        target = torch.where(begins, number, n)  # entries that begin no row group write to a column that is cut off

        def by_row_group(x: Tensor, fill: Tensor, last: Tensor) -> Tensor:
            return torch.cat((fill.expand(n + 1).index_copy(0, target, x)[:n], last))

        place = torch.where(group < n, number * size + rank % size, -1)
        tiles = torch.where(begins, (stops - starts)[order] * keys // UNIT_KEYS, 0).cumsum(0)
        rows = {
            LEADERS: by_row_group(leaders[order], zero, begins.sum()[None]),
            BEGINS: by_row_group(positions, n_entries, n_entries),
            ORDER: torch.cat((order, zero)),
            PLACES: torch.cat((torch.empty_like(positions).index_copy(0, order, place), zero)),
            STARTS: by_row_group(starts[order] * keys, zero, zero),
            STOPS: by_row_group(stops[order] * keys, zero, zero),
            ENTRY_STOPS: torch.cat((torch.where(active, stops * keys, 0), zero)),
            OWN: torch.cat((own_start * keys, own_start.new_zeros(n + 1 - batch))),
            TILE_ENDS: by_row_group(tiles, tiles[-1:], tiles[-1:]),
        }
        return torch.stack([rows[row] for row in range(ROWS_OF_GROUPING)]).to(torch.int32)

    return torch.cat([grouping(size) for size in group_sizes(batch)])
