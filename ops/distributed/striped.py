"""Causal attention over a prompt whose tokens are dealt out to ranks in turn (Striped Attention, arXiv 2311.09431).

Rank r of n has the tokens r, r + n, r + 2n, ... Query i of rank r is token `r + n * i`. It sees key i' of rank j if
`i' <= i` for j <= r, and if `i' < i` for j > r. Both are square causal problems, the second one without the first query
and the last key. So each rank has the same work in each hop of the ring, except for one row, and needs no mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tatten.ops.many_queries import attend_many
from tatten.ops.states import State, combine_partials


@dataclass(frozen=True)
class Ring:
    """The ranks of a ring in order, and the place of this rank.

    Attributes:
        ranks: the global ranks.
        rank: this rank's place among them.
        group: a process group with all of them; None for the default group.
    """

    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None = None

    def travel(self, *tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yield `(place, tensors)` of each rank, this rank's own first.

        It is a collective: all ranks pass tensors of the same shapes and dtypes. Each pair is passed on while the
        caller computes on it, and may be overwritten once the caller asks for the next one. A rank holds at most the
        tensors of two other ranks, and sends `len(ranks) - 1` times the bytes of its own.

        Raises:
            RuntimeError: a neighbour is gone or did not arrive within the timeout of the group; the message names both.
                On NCCL, the watchdog ends the process instead.
        """
        size = len(self.ranks)
        current = tensors if size == 1 else tuple(tensor.contiguous() for tensor in tensors)
        spare = [tuple(map(torch.empty_like, current)) for _ in range(min(2, size - 1))]
        for hop in range(size):
            last = hop == size - 1
            works = [] if last else self._pass_on(current, spare[hop % 2])
            yield (self.rank - hop) % size, current
            if not last:
                self._wait(works)
                current = spare[hop % 2]

    def _pass_on(self, outgoing: tuple[Tensor, ...], incoming: tuple[Tensor, ...]) -> list[dist.Work]:
        ops = [dist.P2POp(dist.isend, tensor, self._neighbour(1), self.group) for tensor in outgoing]
        ops += [dist.P2POp(dist.irecv, tensor, self._neighbour(-1), self.group) for tensor in incoming]
        try:
            works: list[dist.Work] = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise self._broken(error) from error
        return works

    def _wait(self, works: list[dist.Work]) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self._broken(error) from error

    def _broken(self, error: RuntimeError) -> RuntimeError:
        return RuntimeError(
            f"rank {self.ranks[self.rank]} waited in vain for keys and values from rank {self._neighbour(-1)}, or for "
            f"rank {self._neighbour(1)} to take some, of the ring of ranks {list(self.ranks)}: {error}"
        )

    def _neighbour(self, step: int) -> int:
        return self.ranks[(self.rank + step) % len(self.ranks)]


def striped_attention(query: Tensor, key: Tensor, value: Tensor, ring: Ring, scale: float | None) -> Tensor:
    """Compute attention of this rank's queries to the keys of all ranks, in the dtype of `query`.

    It is a collective: all ranks call it with the same shapes. Padding at the end can make shapes equal: no token sees
    later tokens.

    Args:
        query: `[batch, q_heads, q_len, head_dim]`, the queries of this rank's last q_len tokens.
        key, value: `[batch, kv_heads, kv_len, head_dim]`, the keys and values of all of its tokens so far.

    Raises:
        NotImplementedError: see `attend_many`.
        RuntimeError: see `Ring.travel`.
    """
    q_len, earlier = query.shape[2], key.shape[2] - query.shape[2]
    state: State | None = None
    for source, (keys, values) in ring.travel(key, value):
        skipped = int(source > ring.rank)
        if skipped < q_len:
            visible = slice(earlier, key.shape[2] - skipped)
            part = attend_many(query[:, :, skipped:], keys[:, :, visible], values[:, :, visible], True, scale)
            state = _merged(state, part, skipped)
        if earlier:
            part = attend_many(query, keys[:, :, :earlier], values[:, :, :earlier], False, scale)
            state = _merged(state, part, 0)
    assert state is not None  # this rank's own keys come first
    return state[0].to(query.dtype)


def _merged(state: State | None, part: State, skipped: int) -> State:
    """Merge a state of the queries from `skipped` on, in the precision of the lse."""
    if state is None:
        return part
    out, lse = state[0].to(state[1].dtype), state[1]
    if not skipped:
        return combine_partials([out, part[0]], [lse, part[1]])
    rows = out[:, :, skipped:], lse[:, :, skipped:]
    for target, new in zip(rows, combine_partials([rows[0], part[0]], [rows[1], part[1]]), strict=True):
        target.copy_(new)
    return out, lse
