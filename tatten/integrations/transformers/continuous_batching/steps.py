"""The tables of a step on the device, computed from the tables that the host has written. CUDA graphs can capture this.

`tables.py` describes the formats. Nothing here reads the contents of a tensor on the host. All sizes follow from shapes
and from numbers that transformers keeps constant for a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tatten.integrations.transformers.continuous_batching.tables import STATE, LayerGroup
from tatten.ops.shared_pages import SharedPages, shared_pages
from tatten.ops.sizes import ceil_div


@dataclass(frozen=True)
class DecodeStep:
    """One token for each request.

    Attributes:
        slots: int64 `[batch]`: the slot of the pool that each new token is written to.
        table: int32 `[batch, columns]`: the pages of each request.
        lens: int32 `[batch]`: the number of keys of each request, the new one included; 0 for padding.
        shared: the pages that requests share, or None if they can't share any.
        window: the number of keys that a ring holds; None for layers of full attention.
    """

    slots: Tensor
    table: Tensor
    lens: Tensor
    shared: SharedPages | None
    window: int | None


@dataclass(frozen=True)
class ChunkStep:
    """Any number of tokens for each request, in layers that see all keys of the pages.

    Attributes:
        slots: int64 `[tokens]`, as in `DecodeStep`.
        starts: int32 `[batch + 1]`: where the tokens of each request begin.
        table, lens, window: as in `DecodeStep`.
        shared: as in `DecodeStep`; None if all keys are new.
    """

    slots: Tensor
    starts: Tensor
    table: Tensor
    lens: Tensor
    shared: SharedPages | None
    window: int | None


@dataclass(frozen=True)
class RingStep:
    """Any number of tokens for each request, in layers with a sliding window.

    New keys overwrite keys that earlier tokens of the chunk still attend to. So two states are merged: over the keys
    that the ring holds before the step, and over the new keys.

    Attributes:
        slots, starts: as in `ChunkStep`.
        window: the number of keys that a token attends to.
        new_table, new_lens: the new keys of each request, as a pool of `tokens` pages of one key.
        old_table, old_lens: the keys that the ring holds, the newest first, as pages of one key; None if it is empty.
        backwards: int64 `[tokens]`: the tokens of each request in reverse, or None if each request has one token.
            Reversed queries are causal over reversed keys: each attends to one key more than the query before it.
    """

    slots: Tensor
    starts: Tensor
    window: int
    new_table: Tensor
    new_lens: Tensor
    old_table: Tensor | None
    old_lens: Tensor | None
    backwards: Tensor | None


Step = DecodeStep | ChunkStep | RingStep


def decode_step(rows: Tensor, group: LayerGroup) -> DecodeStep:
    """Make the step of a layer group from its rows of the block table, `[batch, columns + STATE]`."""
    past, slots = rows[:, -2], rows[:, -1]  # both -1 in rows that pad the batch
    blocks, lens = rows[:, :-STATE], past + 1
    if group.window is not None:
        blocks, lens = blocks[:, : ceil_div(group.window, group.page_size)], lens.clamp(max=group.window)
    table = blocks * group.stride
    slots = torch.where(slots < 0, group.trash, slots).to(torch.int64)
    return DecodeStep(slots, table, lens, _shared(table, lens, group), group.window)


def chunk_step(
    reads: Tensor, slots: Tensor, starts: Tensor, key_starts: Tensor, longest: int, group: LayerGroup
) -> Step:
    """Make the step of a batch in which requests have any number of tokens.

    Args:
        reads: the group's read index; empty if no request has keys from earlier steps.
        slots: int64 `[tokens]`: the slot of the pool that each new token is written to.
        starts, key_starts: int32 `[batch + 1]`: where the tokens and the keys of each request begin.
        longest: an upper bound of the keys of a request.
        group: the layers.
    """
    lens = key_starts[1:] - key_starts[:-1]
    columns = torch.arange(ceil_div(longest, group.page_size), device=slots.device)
    if not reads.numel():  # all keys are new, so the slot of the first token in a page names the page
        tokens = starts[:-1, None] + columns * group.page_size
        table = slots[tokens.clamp(max=slots.shape[0] - 1)] // group.page_size
        return ChunkStep(slots, starts, table.to(torch.int32), lens, None, group.window)
    entries = _first_blocks(lens, group)[:, None] + columns
    table = (reads[entries.clamp(max=reads.shape[0] - 1)] * group.stride).to(torch.int32)
    return ChunkStep(slots, starts, table, lens, _shared(table, lens, group), group.window)


def _shared(table: Tensor, lens: Tensor, group: LayerGroup) -> SharedPages | None:
    """Find the pages that requests share, or return None if they can't share any."""
    if not group.shares or table.shape[0] == 1:
        return None
    return shared_pages(table, lens, n_pages=group.n_pages, page_size=group.page_size)


def ring_step(
    reads: Tensor, slots: Tensor, starts: Tensor, key_starts: Tensor, most_new: int, longest: int, group: LayerGroup
) -> RingStep:
    """Make the step of a batch in which requests have any number of tokens, in layers with a sliding window.

    Args:
        reads, slots, starts, key_starts, longest, group: as in `chunk_step`.
        most_new: an upper bound of the new tokens of a request.
    """
    assert group.window is not None
    new_lens = starts[1:] - starts[:-1]
    new_table = starts[:-1, None] + torch.arange(most_new, device=slots.device, dtype=torch.int32)
    backwards = _backwards(starts, slots.shape[0]) if most_new > 1 else None
    columns = min(group.window, longest) - 1
    if columns < 1 or not reads.numel():
        return RingStep(slots, starts, group.window, new_table, new_lens, None, None, backwards)
    all_lens = key_starts[1:] - key_starts[:-1]
    held = all_lens - new_lens
    old_table = _newest_first(reads, all_lens, held, columns, group)
    # The first token attends to all `held` keys, and each later token to one fewer as soon as they fill the window.
    old_lens = torch.where(held > 0, (all_lens - 1).clamp(max=group.window - 1), 0)
    return RingStep(slots, starts, group.window, new_table, new_lens, old_table, old_lens, backwards)


def _first_blocks(lens: Tensor, group: LayerGroup) -> Tensor:
    """Return where in the read index the blocks of each request begin; `lens` are its keys, new ones included."""
    header = 0 if group.window is None else 1  # a ring's blocks follow the number of earlier tokens
    stored_lens = lens if group.window is None else lens.clamp(max=group.window)
    entries = (stored_lens + group.page_size - 1) // group.page_size + header
    return entries.cumsum(0, dtype=torch.int32) - entries + header


def _newest_first(reads: Tensor, lens: Tensor, held: Tensor, columns: int, group: LayerGroup) -> Tensor:
    """Return the slots of the keys that each ring holds, int32 `[batch, columns]`, the newest first."""
    window, page = group.window, group.page_size
    assert window is not None
    reads = reads.to(torch.int32)  # halves the memory of the table below
    first = _first_blocks(lens, group)
    last = reads.shape[0] - 1
    past = reads[(first - 1).clamp(max=last)]
    age = torch.arange(columns, device=reads.device, dtype=torch.int32)
    place = (past[:, None] - 1 - age) % window
    blocks = reads[(first[:, None] + place // page).clamp(max=last)]
    slots = blocks * (group.stride * page) + place % page
    return torch.where(age < held[:, None], slots, -1)


def _backwards(starts: Tensor, n_tokens: int) -> Tensor:
    """Return the permutation that reverses the tokens of each request. Padding keeps its place."""
    tokens = torch.arange(n_tokens, device=starts.device, dtype=torch.int32)
    sequence = torch.searchsorted(starts[1:].contiguous(), tokens, right=True)  # past the last one for padding
    sequence = sequence.clamp(max=starts.shape[0] - 2)
    reversed_tokens = starts[sequence] + starts[sequence + 1] - 1 - tokens
    return torch.where(tokens < starts[-1], reversed_tokens, tokens).to(torch.int64)
