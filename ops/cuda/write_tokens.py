"""Keys and values of new tokens, written to the slots of a pool by one launch."""

from __future__ import annotations

from torch import Tensor

from tatten.ops.sizes import power_of_2

NUMBERS_PER_THREAD = 8


def write_tokens_on_cuda_(key_pool: Tensor, value_pool: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Write the keys and values of tokens to slots, as `pool.index_copy_(0, slots, new)` does for each pool.

    Args:
        key_pool, value_pool: `[slots, kv_heads, head_dim]`, contiguous.
        key, value: `[tokens, kv_heads, head_dim]` in the dtype of the pools, with any strides.
        slots: int64 `[tokens]`, contiguous. Tokens with the same slot leave a mix of their numbers there.

    Raises:
        ValueError: a new key or value has another dtype than its pool.
    """
    for name, pool, new in (("key", key_pool, key), ("value", value_pool, value)):
        if new.dtype != pool.dtype:
            raise ValueError(f"`{name}` must be {pool.dtype}, the dtype of its pool, got {new.dtype}")
    from tatten.ops.cuda.kernels.write_tokens import _write_tokens_kernel

    tokens, heads, dim = key.shape
    if not tokens:
        return
    block = power_of_2(heads * dim)
    _write_tokens_kernel[(tokens,)](
        key_pool,
        value_pool,
        key,
        value,
        slots,
        key.stride(),
        value.stride(),
        HEADS=heads,
        DIM=dim,
        BLOCK=block,
        num_warps=min(8, max(1, block // (32 * NUMBERS_PER_THREAD))),
    )
