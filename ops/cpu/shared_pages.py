"""Shared pages on a CPU: plain PyTorch finds them, and a group's queries attend to one copy of its pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tatten.ops.call import Attend, AttentionCall, KeyValue
from tatten.ops.cpu import thresholds
from tatten.ops.cpu.page_copies import keys_between
from tatten.ops.layout import fold_sequences, unfold_sequences
from tatten.ops.page_runs import BEGINS, ENTRY_STOPS, LEADERS, LEVELS, ORDER, STARTS, shared_pages_reference
from tatten.ops.pages_validation import check_table_alone
from tatten.ops.states import State, accumulator_dtype, combine_partials


def shared_pages(block_table: Tensor, kv_lens: Tensor, n_pages: int, page_size: int, q_length: int = 1) -> Tensor:
    """Compute `tatten::shared_pages` on a CPU."""
    check_table_alone(block_table, kv_lens, n_pages, page_size, q_length)
    return shared_pages_reference(block_table, kv_lens, n_pages, page_size, q_length)


@dataclass(frozen=True)
class Group:
    """Sequences that share keys of a leader's, from `start` on. The leader need not be a member.

    Attributes:
        stops: for each member, one past the last key that it shares.
    """

    level: int
    leader: int
    start: int
    stops: dict[int, int]

    @property
    def stop(self) -> int:
        return max(self.stops.values())

    def parts(self) -> Iterator[tuple[int, int, list[int]]]:
        """Yield start, stop and members of each stretch of keys that the same members share."""
        start = self.start
        for stop in sorted(set(self.stops.values())):
            yield start, stop, [b for b, end in self.stops.items() if end >= stop]
            start = stop


def groups_of(data: Tensor, lens: list[int], kv_len: int) -> list[Group]:
    """Join the row groups of `tatten::shared_pages` that read the same keys, by level; no key is beyond `kv_len`.

    A sequence of length 0 is no member, but may be the leader: its pages are read.
    """
    leaders, begins, order, starts, entry_stops = (
        data[row].tolist() for row in (LEADERS, BEGINS, ORDER, STARTS, ENTRY_STOPS)
    )
    n_entries = data.shape[1] - 1
    batch = n_entries // LEVELS
    groups: list[Group] = []
    for i in range(leaders[n_entries]):
        entries = order[begins[i] : begins[i + 1]]
        level, last = entries[0] // batch, groups[-1] if groups else None
        if last is None or (last.level, last.leader) != (level, leaders[i]):
            last = Group(level, leaders[i], starts[i], {})
            groups.append(last)
        last.stops.update({e % batch: min(entry_stops[e], kv_len) for e in entries if lens[e % batch] > 0})
    return groups


def choose_groups(data: Tensor, lens: list[int], stored: KeyValue) -> tuple[list[Group], list[int]]:
    """Return the groups whose keys are worth reading once, and the first key of each sequence's own part.

    Args:
        data: the result of `tatten::shared_pages`.
        lens: the number of keys of each sequence.
        stored: the keys, in pages.
    """
    own_starts, chosen = [0] * len(lens), []
    for group in groups_of(data, lens, stored.kv_len):
        # A sequence that reads its first run itself reads the second one, too: its own part has no gaps.
        joined = replace(group, stops={b: stop for b, stop in group.stops.items() if own_starts[b] == group.start})
        if _is_worth_sharing(joined, stored):
            chosen.append(joined)
            for b, stop in joined.stops.items():
                own_starts[b] = stop
    return chosen, own_starts


def _is_worth_sharing(group: Group, stored: KeyValue) -> bool:
    """Return True if reading the keys once saves more time than the calls over them and the merges take."""
    _, kv_heads, _, head_dim = stored.key.shape
    key_bytes = kv_heads * (head_dim + stored.value.shape[3]) * stored.key.element_size()
    saved = cost = 0
    for start, stop, members in group.parts():
        saved += (len(members) - 1) * (stop - start) * key_bytes
        cost += (len(members) + 4) * thresholds.CPU.shared_bytes
    return saved > cost


def merge_groups(
    call: AttentionCall, out: Tensor, lse: Tensor, groups: Iterable[tuple[Group, KeyValue]], attend: Attend
) -> State:
    """Return the states of all sequences, merged with those over the keys that they share, without sinks.

    Keys between two stops are read only by the members that share them: NaN beyond a member's stop doesn't reach it.

    Args:
        out, lse: the states over each sequence's own part.
        groups: each group with its keys. They come one after the other, each in the memory of the one before.
        attend: computes a call over keys in order.
    """
    dtype, call = out.dtype, call._replace(sinks=None)
    out = out.to(accumulator_dtype(dtype))
    for group, keys in groups:
        for start, stop, sequences in group.parts():
            members = torch.tensor(sequences)
            part = keys_between(keys, start - group.start, stop - group.start)
            query = fold_sequences(call.query.index_select(0, members), 1)
            state = attend(call._replace(query=query, segments=(part,)))
            shared_out, shared_lse = (unfold_sequences(x, len(members)) for x in state)
            out[members], lse[members] = combine_partials((out[members], shared_out), (lse[members], shared_lse))
    return out.to(dtype), lse
