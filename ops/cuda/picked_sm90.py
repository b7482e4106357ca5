"""Plan a launch of the kernel for Hopper that gathers picked latents of 512 + 64 for many heads."""

from __future__ import annotations

from tatten.ops.call import AttentionCall
from tatten.ops.cuda.kernels.latent_visits import BLOCK_M
from tatten.ops.cuda.kernels.picked_sm90 import START_REGS, UNIT, _picked_sm90_kernel
from tatten.ops.cuda.launcher import Launch
from tatten.ops.cuda.sm90 import strides_in_units
from tatten.ops.sizes import ceil_div


def plan_gather(call: AttentionCall, tiles: int, splits: int, mask_strides: tuple[int, int, int, int, int]) -> Launch:
    """Plan a launch that takes the tensors of `_picked_kernel`: `splits` splits of `tiles` tiles each."""
    query, query_rope, (stored,) = call.query, call.query_rope, call.segments
    latent, rope, indices = stored.key, stored.rope, stored.indices
    assert query_rope is not None
    assert rope is not None
    assert indices is not None
    batch, heads, q_len, _ = query.shape
    head_blocks = ceil_div(heads, BLOCK_M)
    aligned, (query_strides, rope_strides) = strides_in_units(query, query_rope)
    index_b, _, index_l, index_s = indices.stride()
    mask_r, mask_b, _, mask_l, mask_s = mask_strides
    return Launch(
        _picked_sm90_kernel,
        (head_blocks * splits * batch * q_len,),
        {"num_warps": 4, "maxnreg": START_REGS, "launch_pdl": True},
        query_b=query_strides[0],
        query_h=query_strides[1],
        query_l=query_strides[2],
        query_rope_b=rope_strides[0],
        query_rope_h=rope_strides[1],
        query_rope_l=rope_strides[2],
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
        ALIGNED=aligned,
        MAX_AND_SUM=splits > 1,
    )
