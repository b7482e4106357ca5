"""Keys and values in the pages of a pool; a block table lists the pages of each sequence in order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tatten.ops.call import AttentionCall, KeyValue
from tatten.ops.reach import narrow_mask

LARGEST_PAGE = 256


def is_page_size(keys: int) -> bool:
    """Return True if a page may hold this number of keys."""
    return 1 <= keys <= LARGEST_PAGE and keys & (keys - 1) == 0


def heads_first(x: Tensor) -> Tensor:
    """View a pool `[pages, page, kv_heads, ...]` as `[pages, kv_heads, page, ...]`, and such a view as the pool.

    Tensors of fewer dims are left to the checks.
    """
    return x.transpose(1, 2) if x.dim() >= 3 else x


def named_pages(entries: Tensor, n_pages: int) -> tuple[Tensor, Tensor]:
    """Return the pages that entries of a block table name, int64, and which of the entries name one.

    Page 0 stands for an entry that names none.
    """
    named = (entries >= 0) & (entries < n_pages)
    return torch.where(named, entries, 0).to(torch.int64), named


def as_fillable(x: Tensor) -> Tensor:
    """View float8 as int8, in which 0 has the same bits: PyTorch can't fill float8."""
    return x.view(torch.int8) if x.dtype == torch.float8_e4m3fn else x


def sharing(call: AttentionCall) -> Tensor | None:
    """Return the shared pages of a call, or None if the call can't use them.

    A window lets entries before it be anything, a mask may exclude keys of some sequences, and with `batch_invariant`
    no sum may depend on the other sequences.
    """
    (stored,) = call.segments
    unshareable = call.window is not None or stored.attn_mask is not None or call.batch_invariant
    return None if unshareable else stored.shared_pages


def gather_pages(call: AttentionCall) -> AttentionCall:
    """Return the call over a copy of all pages of each sequence, in order. For graphs too.

    Keys beyond the lengths, and keys of entries that name no page, are 0 in the copy. A mask excludes the latter.
    """
    (stored,) = call.segments
    assert stored.block_table is not None
    # Indexing by a transposed table transposes the result. PyTorch's tracing does not, and views would not fit.
    table, kv_lens = stored.block_table.clone(memory_format=torch.contiguous_format), stored.kv_lens
    pages, named = named_pages(table, stored.key.shape[0])
    named = used = named.repeat_interleave(stored.key.shape[2], dim=1)
    if kv_lens is not None:
        used = named & (torch.arange(stored.kv_len, device=table.device) < kv_lens[:, None])
    unused = ~used

    def gathered(x: Tensor) -> Tensor:
        copy = as_fillable(heads_first(x)[pages].flatten(1, 2))
        blank = unused.view(*unused.shape, *(1,) * (copy.dim() - 2))
        copy = heads_first(torch.where(blank, copy.new_zeros(()), copy).view(x.dtype))
        # With strides in another order, PyTorch (2.11 to 2.13) asks whether a narrowed scale has one key.
        return copy.clone(memory_format=torch.contiguous_format) if x.dim() == 3 else copy

    mask = narrow_mask(stored.attn_mask, named[:, None, None])
    return call._replace(segments=(in_order(stored, gathered)._replace(attn_mask=mask),))


def in_order(stored: KeyValue, copied: Callable[[Tensor], Tensor]) -> KeyValue:
    """Replace each tensor that is in pages by its copy in order, which `copied` makes.

    The mask stays as it is. The block mask no longer holds, and becomes None.
    """

    def copy_of(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.dim() == 1 else copied(x)  # scales may be those of heads

    key = copied(stored.key)
    return stored._replace(
        key=key,
        value=key if stored.value is stored.key else copied(stored.value),
        key_scale=copy_of(stored.key_scale),
        value_scale=copy_of(stored.value_scale),
        rope=copy_of(stored.rope),
        block_mask=None,
        block_table=None,
        shared_pages=None,
    )
