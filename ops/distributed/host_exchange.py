"""Exchange of strings between ranks on the host, in bounded time, through the store of their process group."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch.distributed as dist

from tatten.ops.distributed.collectives import group_store, group_timeout


class MissingError(RuntimeError):
    """Participants did not arrive in time; `missing` holds their places."""

    def __init__(self, missing: list[int]):
        super().__init__(f"nothing came from {missing}")
        self.missing = missing


def exchange(store: dist.Store, key: str, place: int, size: int, value: str, timeout: datetime.timedelta) -> list[str]:
    """Return the strings of all `size` participants. This one is number `place`; `key` names this exchange only.

    Raises:
        MissingError: a participant did not arrive within the timeout.
    """
    keys = [f"{key}/{i}" for i in range(size)]
    store.set(keys[place], value)
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        raise MissingError([i for i, x in enumerate(keys) if not store.check([x])]) from error
    values = [store.get(x).decode() for x in keys]
    # The last reader deletes the keys: a later group of the same name may get the same store.
    if store.add(f"{key}/read", 1) == size:
        for x in (*keys, f"{key}/read"):
            store.delete_key(x)
    return values


# The key is the default group: after it is destroyed, another may have the same ranks.
_exchanges: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()


def exchange_among(ranks: Sequence[int], topic: str, value: str) -> list[str]:
    """Return the strings of these global ranks, in that order; this rank is one of them. A collective on the host.

    Raises:
        RuntimeError: a rank did not arrive within the timeout of the default group; the message names it and the topic.
    """
    world = dist.group.WORLD
    assert world is not None
    counts = _exchanges.setdefault(world, Counter())
    key = f"tatten/{','.join(map(str, ranks))}/{counts[tuple(ranks)]}"
    counts[tuple(ranks)] += 1
    timeout = group_timeout(world)
    try:
        return exchange(group_store(world), key, ranks.index(dist.get_rank()), len(ranks), value, timeout)
    except MissingError as error:
        missing = " and ".join(str(ranks[place]) for place in error.missing) or "unknown"
        raise RuntimeError(
            f"{topic}: rank {missing} of ranks {list(ranks)} did not arrive within {timeout.total_seconds():g} s "
            f"(this is rank {dist.get_rank()})"
        ) from error
