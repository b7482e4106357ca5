"""Shared pages on a CPU: plain PyTorch finds them, and a group's queries attend to one copy of its pages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tatten.ops.call import Attend, AttentionCall, KeyValue
from tatten.ops.cpu import thresholds
from tatten.ops.cpu.page_copies import keys_between
from tatten.ops.layout import fold_sequences, unfold_sequences
from tatten.ops.page_runs import BEGINS, ENTRY_STOPS, LEADERS, LEVELS, ORDER, STARTS, STOPS, shared_pages_reference
from tatten.ops.pages_validation import check_table_alone
from tatten.ops.states import State, accumulator_dtype, combine_partials


def shared_pages(block_table: Tensor, kv_lens: Tensor, n_pages: int, page_size: int, q_length: int = 1) -> Tensor:
    """Compute `tatten::shared_pages` on a CPU."""
    check_table_alone(block_table, kv_lens, n_pages, page_size, q_length)
    return shared_pages_reference(block_table, kv_lens, n_pages, page_size, q_length)


@dataclass
class Group:
    """Sequences that share keys `start` to `stop - 1` of the leader's, each up to its own stop, the longest first."""

    level: int
    leader: int
    start: int
    stop: int
    members: list[int]
    stops: list[int]


def groups_of(data: Tensor, lens: list[int], kv_len: int) -> list[Group]:
    """Join the row groups of `tatten::shared_pages` that read the same keys; no key is beyond `kv_len`.

    Sequences without keys are left out, but may be leaders.
    """
    leaders, begins, order, starts, stops, entry_stops = (
        data[row].tolist() for row in (LEADERS, BEGINS, ORDER, STARTS, STOPS, ENTRY_STOPS)
    )
    n_entries = data.shape[1] - 1
    batch = n_entries // LEVELS
    groups: list[Group] = []
    for i in range(leaders[n_entries]):
        entries = order[begins[i] : begins[i + 1]]
        level, last = entries[0] // batch, groups[-1] if groups else None
        if last is None or (last.level, last.leader) != (level, leaders[i]):
            last = Group(level, leaders[i], starts[i], min(stops[i], kv_len), [], [])
            groups.append(last)
        with_keys = [entry for entry in entries if lens[entry % batch] > 0]
        last.members += [entry % batch for entry in with_keys]
        last.stops += [min(entry_stops[entry], kv_len) for entry in with_keys]
    return [group for group in groups if group.members]


def worth_sharing(groups: Iterable[Group], stored: KeyValue) -> bool:
    """Return True if reading shared keys once saves more time than the calls over them and the merges take."""
    _, kv_heads, _, head_dim = stored.key.shape
    key_bytes = kv_heads * (head_dim + stored.value.shape[3]) * stored.key.element_size()
    saved = cost = 0
    for group in groups:
        start = group.start
        for stop in sorted(set(group.stops)):
            members = sum(end >= stop for end in group.stops)
            saved += (members - 1) * (stop - start) * key_bytes
            cost += (members + 4) * thresholds.CPU.shared_bytes
            start = stop
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
        start = group.start
        for stop in sorted(set(group.stops)):
            members = torch.tensor([b for b, end in zip(group.members, group.stops, strict=True) if end >= stop])
            part = keys_between(keys, start - group.start, stop - group.start)
            query = fold_sequences(call.query.index_select(0, members), 1)
            state = attend(call._replace(query=query, segments=(part,)))
            shared_out, shared_lse = (unfold_sequences(x, len(members)) for x in state)
            merged = combine_partials((out[members], shared_out), (lse[members], shared_lse))
            out[members], lse[members] = merged
            start = stop
    return out.to(dtype), lse
