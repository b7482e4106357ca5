"""Checks of keys and values in pages. Each message names the argument, the expected and the actual value."""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.call import AttentionCall
from tatten.ops.pages import LARGEST_PAGE, heads_first


def check_pages(call: AttentionCall) -> None:
    """Raise unless a block table, lengths and the shapes of pools fit the queries. Reads no data.

    Dtypes, and the shapes of lengths, masks, scales and ropes, are left to the checks of the op.
    """
    stored, name, batch, head_dim = call.segments[0], call.name_of("key"), call.query.shape[0], call.query.shape[3]
    table = stored.block_table
    assert table is not None
    check_without_picks(stored.indices)
    if stored.kv_lens is None and stored.block_mask is None:
        raise ValueError("`kv_lens` must come with `block_table`: it counts the keys of each sequence, got None")
    if table.dtype != torch.int32:
        raise TypeError(f"`block_table` must be int32, got {table.dtype}")
    if table.dim() != 2 or table.shape[0] != batch:
        raise ValueError(f"`block_table` must be [{batch}, max_pages], got shape {tuple(table.shape)}")
    key, value = (tuple(heads_first(x).shape) for x in (stored.key, stored.value))
    if len(key) != 4 or key[3] != head_dim or key[0] == 0 or (call.latent and key[2] != 1):
        wanted = f"[pages, page, {1 if call.latent else 'kv_heads'}, {head_dim}], at least one page"
        raise ValueError(f"`{name}` must be {wanted} with `block_table`, got shape {key}")
    page = key[1]
    if not (1 <= page <= LARGEST_PAGE and page & (page - 1) == 0):
        raise ValueError(f"`{name}` must have pages of a power of two up to {LARGEST_PAGE} keys, got {page} in {key}")
    if len(value) != 4 or value[:3] != key[:3] or value[3] == 0:
        wanted = f"[{key[0]}, {page}, {key[2]}, head_dim] like `key`"
        raise ValueError(f"`value` must be {wanted}, got shape {value}")


def check_without_picks(indices: Tensor | None) -> None:
    if indices is not None:
        raise ValueError(f"`indices` must be None with `block_table`, got shape {tuple(indices.shape)}")
