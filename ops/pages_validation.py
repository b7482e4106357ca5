"""Checks of keys and values in pages. Each message names the argument, the expected and the actual value."""

from __future__ import annotations

import torch
from torch import Tensor

from tatten.ops.call import AttentionCall
from tatten.ops.page_runs import LEVELS, ROWS
from tatten.ops.pages import LARGEST_PAGE, heads_first, is_page_size


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
    check_block_table(table, batch)
    key, value = (tuple(heads_first(x).shape) for x in (stored.key, stored.value))
    if len(key) != 4 or key[3] != head_dim or key[0] == 0 or (call.latent and key[2] != 1):
        wanted = f"[pages, page, {1 if call.latent else 'kv_heads'}, {head_dim}], at least one page"
        raise ValueError(f"`{name}` must be {wanted} with `block_table`, got shape {key}")
    page = key[1]
    if not is_page_size(page):
        raise ValueError(f"`{name}` must have pages of a power of two up to {LARGEST_PAGE} keys, got {page} in {key}")
    if len(value) != 4 or value[:3] != key[:3] or value[3] == 0:
        wanted = f"[{key[0]}, {page}, {key[2]}, head_dim] like `key`"
        raise ValueError(f"`value` must be {wanted}, got shape {value}")
    shared, shape = stored.shared_pages, (ROWS, LEVELS * batch + 1)
    if shared is not None and (shared.dtype != torch.int32 or shared.shape != shape):
        wanted = f"int32 of shape {shape} for {batch} sequences"
        raise ValueError(f"`shared_pages` must be {wanted}, got {shared.dtype} of shape {tuple(shared.shape)}")


def check_block_table(table: Tensor, batch: int | None = None) -> None:
    """Raise unless a table is int32 `[batch, max_pages]`; without `batch`, of any number of sequences but 0."""
    if table.dtype != torch.int32:
        raise TypeError(f"`block_table` must be int32, got {table.dtype}")
    if table.dim() != 2 or table.shape[0] == 0 or batch not in (None, table.shape[0]):
        wanted = "[batch, max_pages], at least one sequence" if batch is None else f"[{batch}, max_pages]"
        raise ValueError(f"`block_table` must be {wanted}, got shape {tuple(table.shape)}")


def check_without_picks(indices: Tensor | None) -> None:
    if indices is not None:
        raise ValueError(f"`indices` must be None with `block_table`, got shape {tuple(indices.shape)}")


def check_table_alone(block_table: Tensor, kv_lens: Tensor, n_pages: int, page_size: int, q_length: int) -> None:
    """Raise unless `tatten::shared_pages` supports the arguments. Reads no data."""
    check_block_table(block_table)
    if kv_lens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"`kv_lens` must be int32 or int64, got {kv_lens.dtype}")
    if tuple(kv_lens.shape) != (block_table.shape[0],):
        raise ValueError(f"`kv_lens` must have shape ({block_table.shape[0]},), got {tuple(kv_lens.shape)}")
    if kv_lens.device != block_table.device:
        wanted = f"on the device of `block_table`, {block_table.device}"
        raise ValueError(f"`kv_lens` must be {wanted}, got {kv_lens.device}")
    if n_pages < 1:
        raise ValueError(f"`n_pages` must be at least 1, got {n_pages}")
    if not is_page_size(page_size):
        raise ValueError(f"`page_size` must be a power of two up to {LARGEST_PAGE}, got {page_size}")
    if q_length < 1:
        raise ValueError(f"`q_length` must be at least 1, got {q_length}")
