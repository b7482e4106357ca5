"""Runs of pages that sequences share, found from a block table without a host sync, in plain PyTorch.

Tables are compared 128 keys at a time: a *unit* is 128 keys, or a page if that is larger. So no tile of a kernel has
keys that some sequences of a group attend to and others don't.

The *leader* of a sequence at a unit is the lowest sequence with the same pages there, which may be itself. A *run* is a
stretch of units with one leader. A sequence's first runs are shared as long as each is, up to `LEVELS` of them. All
that follows is its *own part*. Sequences whose runs have one leader and one start are a group, and read the leader's
pages. Each stops where its own run does, so exits from a prefix at different depths are lengths, and no more groups.

Nothing has to be a tree: entries of a run are equal to the leader's, one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.sizes import ceil_div, power_of_2

LEVELS = 2  # a system prompt and a question, or a question and its samples
UNIT_KEYS = 128  # the keys of the widest tile of kernels over shared pages
GROUP_SIZE = (
    32  # sequences of a row group at most: with 4 query heads for each kv head they fill a tile of 128 packed queries
)
# A run of fewer keys for each query is not shared. Its float32 states, the leader's included, are written and read:
# 16 bytes for each column of a query head. A key and its value in 16 bits have 4 for each kv head, so 64 keys weigh as
# much as the states of 16 query heads.
LEAST_KEYS = 64

# The rows of the result. With n = LEVELS * batch, entry `level * batch + b` is sequence b at a level. The first 4 are
# those of `tatten::row_groups` for n sequences, of which only entries with a run take part.
(
    LEADERS,  # [:n] the leader of each row group, [n] the number of row groups
    BEGINS,  # the position in ORDER where each row group begins, and from the last one on the number of entries in it
    ORDER,  # entries with a run, by level and leader, the longest first; then the others
    PLACES,  # of each entry: row group times `most_members` plus slot, or -1
    STARTS,  # the first key of each row group
    STOPS,  # one past the last key of its longest run
    ENTRY_STOPS,  # of each entry: one past the last key of its run, or 0
    OWN,  # [:batch] the first key of each sequence's own part
    TILE_ENDS,  # tiles of UNIT_KEYS keys in the row groups up to each, and from the last one on in all of them
) = range(9)
ROWS = 9


def most_members(batch: int) -> int:
    """Return the most sequences of a row group, a power of two, for a batch of this size."""
    return min(GROUP_SIZE, power_of_2(batch))


def unit_pages(page_size: int) -> int:
    return max(1, UNIT_KEYS // page_size)


def least_units(page_size: int, q_length: int) -> int:
    """Return the least units of a run that is worth sharing."""
    return ceil_div(LEAST_KEYS * q_length, max(UNIT_KEYS, page_size))


def shared_pages_reference(block_table: Tensor, kv_lens: Tensor, n_pages: int, page_size: int, q_length: int) -> Tensor:
    """Compute `tatten::shared_pages` in plain PyTorch.

    Args:
        block_table, kv_lens, n_pages, page_size, q_length: as `tatten.shared_pages` takes them.

    Returns:
        int32 `[ROWS, LEVELS * batch + 1]`; other entries than those described are 0.
    """
    batch, columns = block_table.shape
    unit = unit_pages(page_size)
    keys, n_units = unit * page_size, columns // unit
    each = torch.arange(batch, device=block_table.device)
    at = torch.arange(n_units, device=block_table.device)
    entries = block_table[:, : n_units * unit].to(torch.int64).unflatten(1, (n_units, unit))
    named = ((entries >= 0) & (entries < n_pages)).all(dim=2)
    seen = ((kv_lens.to(torch.int64) - q_length + 1).clamp(min=0) // keys).clamp(max=n_units)
    shareable = named & (at < seen[:, None])

    # The owner of a page is the lowest sequence that has it at the end of a unit, whichever unit that is.
    last = torch.where(shareable, entries[..., -1], n_pages)
    owner = torch.full((n_pages + 1,), batch, device=each.device)
    owner = owner.scatter_reduce(0, last.flatten(), each[:, None].expand_as(last).flatten(), "amin")
    leader = owner[last].clamp(max=batch - 1)
    same = shareable & shareable[leader, at] & (entries[leader, at] == entries).all(dim=2)
    leader = torch.where(same, leader, each[:, None])
    leader = torch.cat((leader, each[:, None]), dim=1)  # a unit that nobody has
    places = torch.arange(n_units + 1, device=each.device)

    start, own, reading = torch.zeros_like(each), torch.zeros_like(each), torch.ones_like(each, dtype=torch.bool)
    leaders: list[Tensor] = []
    starts: list[Tensor] = []
    stops: list[Tensor] = []
    for _ in range(LEVELS):
        of = leader.gather(1, start[:, None])[:, 0]
        ends_here = (places >= start[:, None]) & (leader != of[:, None])
        end = torch.where(ends_here, places, n_units).amin(dim=1).minimum(seen)
        long = end - start >= least_units(page_size, q_length)
        follows = reading & long & (of != each) & reading[of] & (start == start[of])
        longest = torch.zeros_like(each).scatter_reduce(0, of, torch.where(follows, end, 0), "amax")
        leads = reading & (of == each) & (longest > start)
        stop = torch.where(follows, end, torch.where(leads, longest, start))
        leaders.append(of)
        starts.append(start)
        stops.append(stop)
        own = torch.where(stop > start, stop, own)
        reading = (stop > start) & (stop == end)  # or else keys between this run and the next would be left out
        start = end
    return _cut(torch.stack(leaders), torch.stack(starts), torch.stack(stops), own, n_units, keys)


def _cut(leaders: Tensor, starts: Tensor, stops: Tensor, own: Tensor, n_units: int, keys: int) -> Tensor:
    """Sort the entries of all levels into row groups; arguments are `[LEVELS, batch]`, in units of `keys`."""
    levels, batch = leaders.shape
    n, size = levels * batch, most_members(batch)
    group = (torch.arange(levels, device=own.device)[:, None] * batch + leaders).flatten()
    starts, stops, leaders = starts.flatten(), stops.flatten(), leaders.flatten()
    active = stops > starts
    group = torch.where(active, group, n)
    longest_first = torch.where(active, n_units - stops, 0)
    order = torch.argsort(group * (n_units + 1) + longest_first, stable=True)
    group, each = group[order], torch.arange(n, device=own.device)
    opens = torch.cat((torch.ones_like(active[:1]), group[1:] != group[:-1]))
    rank = each - torch.where(opens, each, 0).cummax(dim=0).values
    begins = (rank % size == 0) & (group < n)
    number = begins.cumsum(0) - 1
    to = torch.where(begins, number, n)  # entries that begin no row group write to a column that is cut off
    none, entries = own.new_zeros(1), active.sum()[None]

    def of_groups(x: Tensor, rest: Tensor, last: Tensor) -> Tensor:
        return torch.cat((rest.expand(n + 1).index_copy(0, to, x)[:n], last))

    place = torch.where(group < n, number * size + rank % size, -1)
    tiles = torch.where(begins, (stops - starts)[order] * keys // UNIT_KEYS, 0).cumsum(0)
    rows = {
        LEADERS: of_groups(leaders[order], none, begins.sum()[None]),
        BEGINS: of_groups(each, entries, entries),
        ORDER: torch.cat((order, none)),
        PLACES: torch.cat((torch.empty_like(each).index_copy(0, order, place), none)),
        STARTS: of_groups(starts[order] * keys, none, none),
        STOPS: of_groups(stops[order] * keys, none, none),
        ENTRY_STOPS: torch.cat((torch.where(active, stops * keys, 0), none)),
        OWN: torch.cat((own * keys, own.new_zeros(n + 1 - batch))),
        TILE_ENDS: of_groups(tiles, tiles[-1:], tiles[-1:]),
    }
    return torch.stack([rows[row] for row in range(ROWS)]).to(torch.int32)
