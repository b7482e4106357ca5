"""Plan a launch of the kernel for Hopper that gathers picked latents of 512 + 64 for many heads."""

from __future__ import annotations

from tatten.ops.call import AttentionCall, KeyValue
from tatten.ops.cuda.combine import INTERPRETED
from tatten.ops.cuda.gpu import has_wgmma
from tatten.ops.cuda.heuristics import Tiles
from tatten.ops.cuda.kernels.latent_tile import RANK, ROPE
from tatten.ops.cuda.kernels.latent_visits import BLOCK_M, BLOCK_N
from tatten.ops.cuda.kernels.picked_sm90 import START_REGS, UNIT, _picked_sm90_kernel
from tatten.ops.cuda.launcher import Launch
from tatten.ops.cuda.sm90 import DTYPES, strides_in_units
from tatten.ops.cuda.tma import takes_tma
from tatten.ops.sizes import ceil_div

TILES = Tiles(BLOCK_M, BLOCK_N, 12, 2)


def takes_picked_sm90(call: AttentionCall, mask_strides: tuple[int, int, int, int, int]) -> bool:
    """Return True if the kernel can compute this call. cp.async needs the alignment that TMA needs, and no other."""
    query, query_rope, stored = call.query, call.query_rope, call.segments[0]
    latent, rope, mask = stored.key, stored.rope, stored.attn_mask
    return (
        call.latent
        and not INTERPRETED
        and has_wgmma(query.device)
        and stored.indices is not None
        and call.index_block == 1
        and (call.window, call.softcap, call.sinks) == (None, None, None)
        and call.score_scale > 0
        and query.shape[1] > 16
        and query.dtype == latent.dtype
        and latent.dtype in DTYPES
        and query_rope is not None
        and rope is not None
        and (latent.shape[3], rope.shape[3]) == (RANK, ROPE)
        and query.stride(3) == query_rope.stride(3) == 1
        and (mask is None or (mask.dtype.itemsize == 1 and mask_strides[2] == 0))
        and takes_tma(latent)
        and takes_tma(rope)
    )


def plan_gather(
    call: AttentionCall,
    stored: KeyValue,
    split: tuple[int, int],
    places: tuple[int, int],
    mask_strides: tuple[int, int, int, int, int],
) -> Launch:
    """Plan a launch that takes the tensors of `_picked_kernel`.

    `split`: the tiles of a split, and the splits. `places`: the number of splits before those of the segment, and that
    of all segments.
    """
    query, query_rope, latent, rope, indices = call.query, call.query_rope, stored.key, stored.rope, stored.indices
    assert query_rope is not None
    assert rope is not None
    assert indices is not None
    batch, heads, q_len, _ = query.shape
    head_blocks = ceil_div(heads, BLOCK_M)
    aligned, (of_query, of_rope) = strides_in_units(query, query_rope)
    index_b, _, index_l, index_s = indices.stride()
    mask_r, mask_b, _, mask_l, mask_s = mask_strides
    tiles, splits = split
    return Launch(
        _picked_sm90_kernel,
        (head_blocks * splits * batch * q_len,),
        {"num_warps": 4, "maxnreg": START_REGS, "launch_pdl": True},
        query_b=of_query[0],
        query_h=of_query[1],
        query_l=of_query[2],
        query_rope_b=of_rope[0],
        query_rope_h=of_rope[1],
        query_rope_l=of_rope[2],
        latent_b=latent.stride(0) // UNIT,
        latent_s=latent.stride(2) // UNIT,
        rope_b=rope.stride(0) // UNIT,
        rope_s=rope.stride(2) // UNIT,
        mask_r=mask_r,
        mask_b=mask_b,
        mask_l=mask_l,
        mask_s=mask_s,
        index_b=index_b,
        index_l=index_l,
        index_s=index_s,
        scale=call.score_scale,
        n_picks=indices.shape[3],
        kv_len=latent.shape[2],
        heads=heads,
        q_len=q_len,
        head_blocks=head_blocks,
        seqs_per_kv=batch // latent.shape[0],
        tiles=tiles,
        splits=splits,
        first_split=places[0],
        all_splits=places[1],
        ALIGNED=aligned,
        MAX_AND_SUM=places[1] > 1,
    )
