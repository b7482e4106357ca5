"""Picks: the entries of `indices`, each of which names a key or a block of keys that a query attends to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tatten.ops.call import AttentionCall
from tatten.ops.picks_validation import check_indices
from tatten.ops.sizes import ceil_div
from tatten.ops.validation import check_tensors

MISSING_INDICES = "`index_block`, `rest_bias` and `distinct_indices` must come with `indices`, got None"


def without_duplicates(indices: Tensor, n: int) -> Tensor:
    """Return `indices` with -1 for entries outside `[0, n)`, and for those that an earlier entry of the row equals.

    It is plain PyTorch, for graphs too. It allocates `n + 1` numbers per row, and touches only those that `indices`
    names.
    """
    picks = indices.to(torch.int64)
    picks = torch.where((picks >= 0) & (picks < n), picks, n)
    places = torch.arange(picks.shape[-1], device=picks.device).expand_as(picks)
    first = picks.new_empty((*picks.shape[:-1], n + 1))
    first.scatter_reduce_(-1, picks, places, "amin", include_self=False)
    distinct = (picks < n) & (first.gather(-1, picks) == places)
    return torch.where(distinct, picks, -1).to(indices.dtype)


def with_first(indices: Tensor, n: int) -> Tensor:
    """Shift `indices` by `n` keys that are placed in front, and pick these too. Negative ones become -1. For graphs."""
    first = torch.arange(n, dtype=indices.dtype, device=indices.device).expand(*indices.shape[:-1], n)
    return torch.cat((first, torch.where(indices < 0, -1, indices + n)), dim=-1)


def counted_from(indices: Tensor, first: int, step: int = 1) -> Tensor:
    """Renumber `indices` for a part of the keys: key `first`, and every `step`-th key after it. For graphs.

    Indices of other keys become negative, or lie beyond the part.
    """
    offset = indices - first
    return offset if step == 1 else torch.where(offset % step == 0, offset // step, -1)


def distinct_picks(
    indices: Tensor, query: Tensor, key: Tensor, index_block: int, name: str = "indices", key_name: str = "key"
) -> Tensor:
    """Check a user's `indices` and remove duplicates. `name` and `key_name` are those of the arguments in errors."""
    check_indices(indices, query, key, index_block, (name, key_name))
    return without_duplicates(indices, ceil_div(key.shape[2], index_block))


def picks_options(
    indices: Tensor | None,
    query: Tensor,
    key: Tensor,
    index_block: int,
    distinct_indices: bool,
    rest_bias: float | None,
    key_name: str = "key",
) -> dict[str, Any]:
    """Return the op's arguments for a user's picks; none without picks, as the dispatcher spends time on each argument.

    Raises:
        TypeError, ValueError: `indices` are invalid, or an argument that belongs to them comes without them.
    """
    if indices is None:
        if index_block != 1 or rest_bias is not None or distinct_indices:
            raise ValueError(MISSING_INDICES)
        return {}
    check_tensors(indices=indices)
    if not distinct_indices:
        indices = distinct_picks(indices, query, key, index_block, key_name=key_name)
    return {"indices": indices, "index_block": index_block, "rest_bias": rest_bias}


def check_distinct(call: AttentionCall) -> None:
    """Raise ValueError if a row of `indices` has an entry twice. Reads the tensors: CPU only."""
    for i, stored in enumerate(call.segments):
        if stored.indices is None:
            continue
        n = ceil_div(stored.key.shape[2], call.index_block)
        inside = (stored.indices >= 0) & (stored.indices < n)
        picks = torch.where(inside, stored.indices, n).to(torch.int64)
        places = torch.arange(picks.shape[3]).expand_as(picks)
        last = picks.new_empty((*picks.shape[:3], n + 1)).scatter_(3, picks, places)
        repeated = inside & (last.gather(3, picks) != places)
        if repeated.any():
            at, name = tuple(repeated.nonzero()[0].tolist()), call.name_of("indices", i)
            raise ValueError(
                f"`{name}` must have each entry once in a row, got {picks[at].item()} at {at} and again: "
                f"`tatten.{call.op}` removes repeated entries unless `distinct_indices` is True"
            )


def key_indices(indices: Tensor, kv_len: int, index_block: int) -> Tensor:
    """Return the keys that the entries name, int64; negative or at least `kv_len` where an entry names none."""
    picks = indices.to(torch.int64)
    if index_block == 1:
        return picks
    picks = torch.where((picks >= 0) & (picks < ceil_div(kv_len, index_block)), picks, -1)
    each = torch.arange(index_block, device=picks.device)
    return (picks.unsqueeze(-1) * index_block + each).flatten(-2)


def picked_mask(indices: Tensor, kv_len: int, index_block: int, q_heads: int) -> Tensor:
    """Return the keys that each query picks: bool `[batch, q_heads, q_length, kv_length]`."""
    keys = key_indices(indices, kv_len, index_block)
    picked = torch.zeros((*keys.shape[:3], kv_len + 1), dtype=torch.bool, device=keys.device)
    picked = picked.scatter(3, torch.where((keys >= 0) & (keys < kv_len), keys, kv_len), True)
    return picked[..., :kv_len].repeat_interleave(q_heads // keys.shape[1], dim=1)
