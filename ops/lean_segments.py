"""Attention to segments: a launch of the lean or the wide kernel for each, and one merge for every two."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tatten.ops.lean import (
    Parts,
    Tiles,
    capability,
    launch,
    merge_parts,
    multiprocessors,
    packed_rows,
    programs_for,
    tiles_for,
)
from tatten.ops.sizes import ceil_div
from tatten.ops.tma import takes_tma
from tatten.ops.triton_merge import merge_parts_triton

# Short rows of K and V beside the wide kernel: several are under way on an SM, each in a small program.
SHORT_ROWS = Tiles(16, 64, 2, 2, 4)
# On an H200: 128 packed rows by 128 keys of head_dim 128 in the wide kernel, and what an SM reads beside it.
WIDE_TILE_US, SM_BYTES_PER_US = 2.2, 40e3


def lean_segments(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    attn_masks: Sequence[Tensor | None],
    blocks: Sequence[Tensor | None],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`tatten::bifurcated_attention` of checked inputs: a launch for each segment, and one merge for every two."""
    dtype = query.dtype
    states: list[tuple[Tensor, Tensor]] = []
    pending: Parts | None = None
    sms_left = 0  # by a wide launch, to the segment after it
    for i, (key, value, mask, block) in enumerate(zip(keys, values, attn_masks, blocks, strict=True)):
        last = i == len(keys) - 1
        if mask is None and not last and pending is None and _takes_wide(query, key, value, scale):
            sms_left = _sms_beside_wide(query, key, keys[i + 1], attn_masks[i + 1])
            parts = launch_wide(
                query, key, value, scale, multiprocessors(query.device) - sms_left if sms_left else None
            )
        else:
            tiles: Tiles | None = None
            if sms_left:
                tiles = SHORT_ROWS if key.shape[2] <= 512 else tiles_for(1, key.shape[3], 2)
            parts = launch(
                query,
                key,
                value,
                mask,
                None,
                scale,
                block,
                whole=len(keys) == 1,
                follows=pending is not None,
                tiles=tiles,
                programs=sms_left * tiles.per_sm if tiles is not None else None,
            )
            sms_left = 0
        if pending is not None or last:
            final = dtype if len(keys) <= 2 else None
            states.append(merge_parts(pending or parts, parts if pending else None, final))
            pending = None
        else:
            pending = parts
    if len(states) == 1:
        return states[0]
    outs, lses = zip(*states, strict=True)
    return merge_parts_triton(outs, lses, (*query.shape[:3], values[0].shape[3]), dtype)


def _takes_wide(query: Tensor, key: Tensor, value: Tensor, scale: float) -> bool:
    """Whether Hopper's warp-specialised kernel computes this, and is faster: half of its 128 rows may be empty."""
    dim = query.shape[3]
    return (
        packed_rows(query, key) > 32
        and dim == value.shape[3]
        and dim in (64, 128)
        and query.is_cuda
        and capability(query.device) == (9, 0)
        and query.stride(3) == 1
        and scale > 0
        and takes_tma(key)
        and takes_tma(value)
    )


def _sms_beside_wide(query: Tensor, key: Tensor, next_key: Tensor, next_mask: Tensor | None) -> int:
    """How many SMs to leave to the next segment while the wide kernel is at `key`, or 0 to run one after the other.

    The wide kernel is bound by arithmetic and fills an SM, the next one by memory. Side by side they take 125 us where
    one after the other takes 144 (256 sequences, 32/8 heads, 8192 and 256 keys); a few SMs are not worth their merges.
    """
    kv_batch, kv_heads, kv_len, head_dim = key.shape
    if next_mask is not None or packed_rows(query, next_key) > 16:
        return 0
    wide = (
        ceil_div(packed_rows(query, key), 128)
        * kv_batch
        * kv_heads
        * ceil_div(kv_len, 128)
        * head_dim
        / 128
        * WIDE_TILE_US
    )
    beside = 2 * next_key.numel() * next_key.element_size() / SM_BYTES_PER_US
    sms = multiprocessors(query.device)
    sms_left = round(sms * beside / (wide + beside))
    return min(sms_left, sms - 1) if sms_left >= sms // 5 else 0


def launch_wide(query: Tensor, key: Tensor, value: Tensor, scale: float, programs: int | None = None) -> Parts:
    """`launch` of the kernel in Gluon, on plain shared keys and many packed queries."""
    from tatten.ops.gluon_wide import BLOCK_M, BLOCK_N, wide_attention_gluon

    kv_batch, kv_heads, kv_len, _ = key.shape
    m_blocks = ceil_div(packed_rows(query, key), BLOCK_M)
    rows = kv_batch * kv_heads * m_blocks
    programs = programs or programs_for(rows, ceil_div(kv_len, BLOCK_N), multiprocessors(query.device))
    return Parts(
        *wide_attention_gluon(query, key, value, scale, programs),
        kv_lens=None,
        blocks=None,
        groups=1,
        rows=rows,
        kv_len=kv_len,
        kv_heads=kv_heads,
        shared=query.shape[0] // kv_batch,
        m_blocks=m_blocks,
        programs=programs,
        block_m=BLOCK_M,
        block_n=BLOCK_N,
        window=None,
    )
