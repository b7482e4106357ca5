"""The kernel that writes the keys and values of new tokens to the slots of a pool, in place."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _write_tokens_kernel(
    key_pool,  # [slots, heads, dim], contiguous
    value_pool,
    key,  # [tokens, heads, dim], any strides
    value,
    slots,  # [tokens]
    key_strides,
    value_strides,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, BLOCK)
    ok = numbers < HEADS * DIM
    head, dim = numbers // DIM, numbers % DIM
    to = tl.load(slots + token).to(tl.int64) * (HEADS * DIM) + numbers
    new_key = tl.load(key + token * key_strides[0] + head * key_strides[1] + dim * key_strides[2], mask=ok)
    new_value = tl.load(value + token * value_strides[0] + head * value_strides[1] + dim * value_strides[2], mask=ok)
    tl.store(key_pool + to, new_key, mask=ok)
    tl.store(value_pool + to, new_value, mask=ok)
