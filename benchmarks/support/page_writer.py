"""One launch that writes the keys and values of a decode step into pages, without reading lengths on the host."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _write_tokens_kernel(
    key_pages,
    value_pages,
    key,
    value,
    before,
    table,
    table_row,
    page_stride,
    slot_stride,
    key_row,
    key_head,
    value_row,
    value_head,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    at = tl.load(before + sequence)
    if at >= 0:
        page = tl.load(table + sequence * table_row + at // PAGE).to(tl.int64)
        to = page * page_stride + (at % PAGE) * slot_stride
        numbers = tl.arange(0, BLOCK)
        head, dim = numbers // DIM, numbers % DIM
        real = numbers < HEADS * DIM
        new_key = tl.load(key + sequence * key_row + head * key_head + dim, mask=real)
        new_value = tl.load(value + sequence * value_row + head * value_head + dim, mask=real)
        tl.store(key_pages + to + numbers, new_key, mask=real)
        tl.store(value_pages + to + numbers, new_value, mask=real)


def write_tokens(
    key_pages: Tensor, value_pages: Tensor, key: Tensor, value: Tensor, before: Tensor, block_table: Tensor
) -> None:
    """Write a token of each sequence behind the `before` tokens that it has; -1 is a row of padding.

    `key` and `value` are `[batch, 1, kv_heads, head_dim]`, and pages `[pages, page, kv_heads, head_dim]`.
    """
    batch, _, heads, dim = key.shape
    strides = key_pages.stride()
    assert strides == value_pages.stride()
    assert strides[2:] == (dim, 1)
    assert key.stride(3) == value.stride(3) == block_table.stride(1) == before.stride(0) == 1
    _write_tokens_kernel[batch,](
        *(key_pages, value_pages, key, value, before, block_table, block_table.stride(0), *strides[:2]),
        *(key.stride(0), key.stride(2), value.stride(0), value.stride(2)),
        PAGE=key_pages.shape[1],
        HEADS=heads,
        DIM=dim,
        BLOCK=triton.next_power_of_2(heads * dim),
    )
