"""The public function that finds the pages that sequences share, and its result."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import tatten.ops.library  # noqa: F401  (defines torch.ops.tatten)
from tatten.ops.argument_names import names_arguments
from tatten.ops.validation import check_tensors


@dataclass(frozen=True, eq=False)
class SharedPages:
    """The pages that sequences share: found once a step by `tatten.shared_pages`, and passed to each layer.

    Attributes:
        data: int32, on the device of the table. `tatten.ops.page_runs` describes its rows.
        max_pages: the number of columns of the table.
        page_size: the number of keys of a page.

    Examples:
        >>> import torch, tatten
        >>> table = torch.tensor([[3, 1, 4], [3, 1, 5]], dtype=torch.int32)
        >>> shared = tatten.shared_pages(table, torch.tensor([150, 129]), n_pages=10, page_size=64)
        >>> shared.max_pages, shared.page_size
        (3, 64)
    """

    data: Tensor
    max_pages: int
    page_size: int


@names_arguments
def shared_pages(
    block_table: Tensor, kv_lens: Tensor, *, n_pages: int, page_size: int, q_length: int = 1
) -> SharedPages:
    """Find the pages that several sequences have in the same places, so that attention reads them once.

    Call it once a step, and pass the result to `tatten.decode_attention` or `tatten.paged_attention` of every layer.
    Attention gives the same results without it, but reads a shared page for each sequence that has it. On a GPU the
    tables stay there: the host reads nothing, and a captured CUDA graph serves tables of any contents.

    Sequences share what lies before the first 128 keys, or the first page if that is larger, that differ. They may
    share it with one group of sequences, and what follows with another: a system prompt and a question, or a question
    and its samples.

    Args:
        block_table: int32 `[batch, max_pages]`, as `decode_attention` takes it.
        kv_lens: int32 or int64 `[batch]`, as `decode_attention` takes it. Entries beyond a length are ignored.
        n_pages: the number of pages of the pool. Entries outside `[0, n_pages)` are shared by no sequences.
        page_size: the number of keys of a page.
        q_length: the number of queries of each sequence. Its last `q_length - 1` keys are not shared, and more queries
            need longer runs of pages to gain from them.

    Returns:
        A `SharedPages` on the device of the table.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.

    Examples:
        >>> import torch, tatten
        >>> key, value = torch.randn(2, 10, 64, 2, 32)  # pools of 10 pages of 64 keys
        >>> table = torch.tensor([[3, 1, 4], [3, 1, 5]], dtype=torch.int32)
        >>> lens = torch.tensor([150, 129])
        >>> shared = tatten.shared_pages(table, lens, n_pages=10, page_size=64)
        >>> query = torch.randn(2, 8, 1, 32)
        >>> out = tatten.decode_attention(query, key, value, block_table=table, kv_lens=lens, shared_pages=shared)
        >>> without = tatten.decode_attention(query, key, value, block_table=table, kv_lens=lens)
        >>> torch.allclose(out, without, atol=1e-5)
        True
    """
    check_tensors(block_table=block_table, kv_lens=kv_lens)
    data = torch.ops.tatten.shared_pages.default(block_table, kv_lens, n_pages, page_size, q_length)
    return SharedPages(data, block_table.shape[1], page_size)


def data_of_pages(shared: object, block_table: Tensor | None, key: Tensor) -> Tensor:
    """Return the tensor of a user's `SharedPages`; raise unless it can belong to the table and the pool of keys."""
    if not isinstance(shared, SharedPages):
        raise TypeError(
            f"`shared_pages` must be a SharedPages, as tatten.shared_pages returns, got {type(shared).__name__}"
        )
    if block_table is None:
        raise ValueError("`shared_pages` must come with the `block_table` that it was made from, got None")
    if block_table.dim() == 2 and shared.max_pages != block_table.shape[1]:
        wanted = f"that of a table of {block_table.shape[1]} pages for each sequence, as `block_table`"
        raise ValueError(f"`shared_pages` must be {wanted}, got one of {shared.max_pages}")
    if key.dim() == 4 and shared.page_size != key.shape[1]:
        wanted = f"that of pages of {key.shape[1]} keys, as `key`"
        raise ValueError(f"`shared_pages` must be {wanted}, got one of {shared.page_size}")
    if shared.data.device != block_table.device:
        wanted = f"on the device of `block_table`, {block_table.device}"
        raise ValueError(f"`shared_pages` must be {wanted}, got {shared.data.device}")
    return shared.data
