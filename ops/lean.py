"""Launching the lean kernel and the merge of its parts: tiles, grid, and the memory that partial states lie in."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tatten.ops.packing import squeeze_broadcast
from tatten.ops.sizes import ceil_div, power_of_2
from tatten.ops.states import accumulator_dtype
from tatten.ops.tma import takes_tma, tma_strides
from tatten.ops.triton_lean import ADDITIVE_MASK, BOOL_MASK, NO_MASK, _lean_kernel
from tatten.ops.triton_mask import mask_blocks_triton
from tatten.ops.triton_parts import _merge_segments_kernel
from tatten.ops.validate import BLOCK_KEYS

# bf16 dots are garbage in the interpreter (Triton 3.6 to 3.9).
INTERPRETED = not isinstance(_lean_kernel, triton.JITFunction)


@dataclass(frozen=True)
class Tiles:
    """What is compiled: packed query rows and keys of a tile, warps, pipeline stages; and programs on each SM.

    Where a mask is listed `block_n` is of its run of full blocks, at least one block; the others come one by one.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    per_sm: int = 1


@dataclass(frozen=True)
class Parts:
    """What a launch without merge leaves: the states of whole rows, partial ones, and how they were laid out."""

    out: Tensor
    lse: Tensor
    part_out: Tensor
    part_lse: Tensor
    kv_lens: Tensor | None
    blocks: Tensor | None
    groups: int
    rows: int
    kv_len: int
    kv_heads: int
    shared: int
    m_blocks: int
    programs: int
    block_m: int
    block_n: int
    window: int | None

    @property
    def split(self) -> bool:
        """Whether any row may have been done by several programs."""
        return self.groups > 1 or self.blocks is not None or self.rows % self.programs != 0

    @property
    def big(self) -> bool:
        """Whether places on the line, times programs, need 64 bits."""
        line = self.groups * self.rows * max(1, ceil_div(self.kv_len, self.block_n))
        return line * self.programs >= 1 << 31


def tiles_for(rows: int, dim: int, element_size: int, listed: bool = False, masked: bool = False) -> Tiles:
    """The tiles for `rows` packed queries and a padded head_dim: as measured on an H200, and without spills.

    `listed`: the blocks of a mask are listed; `masked`: the mask itself is read, or places are computed for a window.
    """
    at_most = max(16, power_of_2(rows))
    if element_size == 4:
        return Tiles(min(at_most, 64, max(16, 2048 // dim)), 32, 8, 2)
    if dim > 128:
        return Tiles(min(at_most, 8192 // dim), 64 if dim <= 256 else 32, 8, 2)
    if rows <= 16:
        return Tiles(16, 64, 4, 2, 2) if masked and not listed else Tiles(16, 128, 4, 2, 2)
    if masked and not listed:
        return Tiles(min(at_most, 64), 64, 8, 2)
    if rows <= 64:
        return Tiles(64, 64, 8, 3) if listed and rows > 32 else Tiles(min(at_most, 64), 64, 4, 3, 2)
    return Tiles(128, 64, 8, 3)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability; from (9, 0) on programs overlap and TMA fetches tiles, so also where we only compile."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def packed_rows(query: Tensor, key: Tensor) -> int:
    """The queries that read one row and kv head of `key`: heads of its group, sequences that share it, positions."""
    batch, q_heads, q_len, _ = query.shape
    return q_heads // key.shape[1] * (batch // key.shape[0]) * q_len


def programs_for(rows: int, tiles: int, most: int) -> int:
    """How many of at most `most` programs: rather a few less than leave each row to be merged from one part more."""
    if rows >= most:
        even = ceil_div(rows, ceil_div(rows, most))  # as many whole rows for each, if they divide
        return even if even > 0.9 * most else most
    even = rows * min(most // rows, tiles)
    return even if even > 0.9 * most or tiles * rows < most else most


def _constant_stride(x: Tensor) -> int:
    """The stride of the length if it is known when the kernel is compiled, which saves registers; else 0.

    Where it goes with the batch, as for `[length, batch, heads, head_dim]`, each would be compiled anew.
    """
    return x.stride(2) if x.stride(2) < 1 << 14 else 0


def _descriptor(x: Tensor, block_n: int) -> TensorDescriptor:
    block = [1, 1, block_n, max(16, power_of_2(x.shape[3]))]
    return TensorDescriptor(x, list(x.shape), tma_strides(x), block)


def launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    kv_lens: Tensor | None,
    scale: float,
    blocks: Tensor | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    whole: bool = True,
    follows: bool = False,
    tiles: Tiles | None = None,
    programs: int | None = None,
    overlap: bool = True,
) -> Parts:
    """One launch of the kernel on checked inputs. `whole`: these are all segments, so whole rows are final.

    `follows`: nothing that this launch reads was written by the one just before, which it then runs beside; nor, on the
    same stream, anything since.
    """
    batch, q_heads, q_len, head_dim = query.shape
    kv_batch, kv_heads, kv_len, value_dim = *key.shape[:3], value.shape[3]
    group, shared = q_heads // kv_heads, batch // kv_batch
    packed = packed_rows(query, key)

    # The kernels read these as they lie; a copy is a launch to be waited for.
    kv_lens, sinks = (None if x is None else x.contiguous() for x in (kv_lens, sinks))
    if blocks is not None and not blocks.is_contiguous():
        blocks, follows = blocks.contiguous(), False
    window = None if window is None else min(window, kv_len + q_len)  # more is the same, and could overflow

    mask_kind, mask, mask_strides = NO_MASK, query, (0, 0, 0, 0, 0)
    if attn_mask is not None and kv_len:
        mask = squeeze_broadcast(attn_mask)
        if blocks is None:
            blocks = mask_blocks_triton(mask, batch, kv_batch, q_len, kv_len, kv_lens, window)
            follows = False
        if mask.dtype != torch.bool:
            mask_kind = ADDITIVE_MASK
        elif mask.shape[1] != 1 or mask.shape[2] != 1 or (shared > 1 and mask.shape[0] == batch):
            mask_kind, mask = BOOL_MASK, mask.view(torch.uint8)
        if mask_kind != NO_MASK:
            b, h, n, s = mask.expand(mask.shape[0], q_heads, q_len, kv_len).stride()
            if mask.shape[0] == 1:
                mask_strides = (0, 0, h, n, s)
            elif mask.shape[0] == kv_batch:
                mask_strides = (b, 0, h, n, s)
            else:  # one for each sequence
                mask_strides = (0, b, h, n, s)

    block_d, block_dv = (max(16, power_of_2(dim)) for dim in (head_dim, value_dim))
    listed = blocks is not None
    masked = mask_kind != NO_MASK or window is not None
    tiles = tiles or tiles_for(packed, max(block_d, block_dv), query.element_size(), listed, masked)
    block_n = BLOCK_KEYS if listed else tiles.block_n
    m_blocks = ceil_div(packed, tiles.block_m)
    groups = blocks.shape[0] if blocks is not None else 1 if kv_lens is None else kv_batch
    rows = kv_batch // groups * kv_heads * m_blocks  # of each group
    if programs is None:
        most = tiles.per_sm * multiprocessors(query.device)
        n_tiles = max(1, ceil_div(kv_len, block_n))
        # Rows of any length have no even shares; those of a mask often are equally long.
        programs = most if kv_lens is not None else programs_for(groups * rows, n_tiles, most)
    # The copy engine reads whole tiles, so only where every key counts, or of a mask the run of full blocks.
    every_key = listed or (kv_lens is None and window is None)
    hopper = not INTERPRETED and capability(query.device) >= (9, 0)
    tma = hopper and every_key and takes_tma(key) and takes_tma(value)
    run_n = max(tiles.block_n, block_n)
    key_tiles, value_tiles = (_descriptor(x, run_n) for x in (key, value)) if tma else (key, value)

    acc_dtype = accumulator_dtype(query.dtype)
    out = query.new_empty((batch, q_heads, q_len, value_dim), dtype=query.dtype if whole else acc_dtype)
    lse = query.new_empty((batch, q_heads, q_len), dtype=acc_dtype)
    part_out = query.new_empty((2 * programs, tiles.block_m, value_dim), dtype=acc_dtype)
    part_lse = query.new_empty((2 * programs, tiles.block_m), dtype=acc_dtype)
    parts = Parts(
        out,
        lse,
        part_out,
        part_lse,
        kv_lens=kv_lens if not listed else None,
        blocks=blocks,
        groups=groups,
        rows=rows,
        kv_len=kv_len,
        kv_heads=kv_heads,
        shared=shared,
        m_blocks=m_blocks,
        programs=programs,
        block_m=tiles.block_m,
        block_n=block_n,
        window=window if not listed else None,
    )
    overlap = overlap and hopper
    _lean_kernel[(programs,)](
        query,
        key,
        value,
        key_tiles,
        value_tiles,
        mask,
        kv_lens if kv_lens is not None else query,
        blocks if blocks is not None else query,
        sinks if sinks is not None else query,
        out,
        lse,
        part_out,
        part_lse,
        *query.stride(),
        *key.stride(),
        *value.stride(),
        *mask_strides,
        blocks.stride(0) if blocks is not None else 0,
        scale,
        softcap or 0.0,
        window or 0,
        kv_len,
        groups,
        rows,
        shared,
        kv_heads,
        group,
        q_len,
        m_blocks,
        programs,
        KEY_S=_constant_stride(key),
        VALUE_S=_constant_stride(value),
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        BLOCK_M=tiles.block_m,
        BLOCK_N=block_n,
        RUN_N=run_n,
        GROUPS=power_of_2(groups),
        MASK=mask_kind,
        HAS_LENS=kv_lens is not None,
        LISTED=listed,
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        POSITIVE=scale > 0,
        WIDE=max(x.stride(3) * x.shape[3] for x in (query, key, value)) >= 1 << 31,
        BIG=parts.big,
        TMA=tma,
        OVERLAP=overlap,
        WAIT_LAST=follows,
        UPCAST=INTERPRETED,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        launch_pdl=overlap,
    )
    return parts


def _merge_warps(parts: int, dim: int) -> int:
    if dim > 128:  # what a thread holds
        return min(8, max(1, parts * dim // 1024))
    return 1 if parts <= 8 else 2


def merge_parts(
    first: Parts, second: Parts | None = None, dtype: torch.dtype | None = None, overlap: bool = True
) -> tuple[Tensor, Tensor]:
    """The states that one or two launches add up to; of two, in `dtype` (default: that of their states)."""
    _, q_heads, q_len, value_dim = first.out.shape
    if second is None and not first.split:
        return first.out, first.lse
    out, lse = first.out, first.lse
    if second is not None:
        out, lse = first.out.new_empty(first.out.shape, dtype=dtype), torch.empty_like(first.lse)
    block_dv = max(16, power_of_2(value_dim))
    overlap = overlap and not INTERPRETED and capability(out.device) >= (9, 0)
    a, b = first, second or first
    # Of a ragged batch one row may have all parts.
    most = max(32 if x.groups > 1 else x.programs // x.rows + 2 for x in (a, b))
    parts = min(64, power_of_2(most))

    def pointers(x: Parts) -> tuple[object, ...]:
        kv_lens, blocks = (x.out if y is None else y for y in (x.kv_lens, x.blocks))
        stride = 0 if x.blocks is None else x.blocks.stride(0)
        sizes = stride, x.groups, x.rows, x.kv_len, x.kv_heads, x.shared, x.m_blocks, x.programs
        return x.out, x.lse, x.part_out, x.part_lse, kv_lens, blocks, *sizes

    _merge_segments_kernel[(lse.numel(),)](
        out,
        lse,
        q_heads,
        q_len,
        *pointers(a),
        *pointers(b),
        a.window or 0,
        VALUE_DIM=value_dim,
        BLOCK_DV=block_dv,
        BLOCK_M_A=a.block_m,
        BLOCK_N_A=a.block_n,
        GROUPS_A=power_of_2(a.groups),
        HAS_LENS_A=a.kv_lens is not None,
        LISTED_A=a.blocks is not None,
        BLOCK_M_B=b.block_m,
        BLOCK_N_B=b.block_n,
        GROUPS_B=power_of_2(b.groups),
        HAS_LENS_B=b.kv_lens is not None,
        LISTED_B=b.blocks is not None,
        WINDOW=a.window is not None,
        BIG=a.big or b.big,
        TWO=second is not None,
        PARTS=parts,
        OVERLAP=overlap,
        num_warps=_merge_warps(parts, block_dv),
        launch_pdl=overlap,
    )
    return out, lse


def lean_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    kv_lens: Tensor | None,
    scale: float,
    blocks: Tensor | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tiles: Tiles | None = None,
    programs: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`tatten::decode_attention` of checked inputs."""
    parts = launch(
        query,
        key,
        value,
        attn_mask,
        kv_lens,
        scale,
        blocks,
        window=window,
        softcap=softcap,
        sinks=sinks,
        tiles=tiles,
        programs=programs,
    )
    return merge_parts(parts)
