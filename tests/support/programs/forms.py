"""Attention as models write it, in functions and in a module, which programs call by name.

A program's source begins with the imports, and contains the definitions where it needs them. The reference takes the
place of each `attend_*`. Masks are bool, where `fill` replaces the scores of masked keys, or additive.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

sdpa, aten_sdpa = F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default
inf, nan = float("inf"), float("nan")
functional_call, grad, vmap = torch.func.functional_call, torch.func.grad, torch.vmap


def masked_weights(scores, mask, softcap, fill, p):
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, fill) if mask.dtype == torch.bool else scores + mask
    return F.dropout(scores.softmax(-1), p, training=False)


def attend_matmul(query, key, value, mask=None, scale=1.0, softcap=None, fill=-inf, p=0.0):
    scores = torch.matmul(query, key.transpose(-1, -2)) * scale
    return torch.matmul(masked_weights(scores, mask, softcap, fill, p).to(value.dtype), value)


def attend_divided(query, key, value, mask=None, scale=1.0, softcap=None, fill=-inf, p=0.0):
    scores = query @ key.mT / (1 / scale)
    return masked_weights(scores, mask, softcap, fill, p).to(value.dtype) @ value


def attend_scaled_query(query, key, value, mask=None, scale=1.0, softcap=None, fill=-inf, p=0.0):
    return masked_weights((query * scale) @ key.mT, mask, softcap, fill, p).to(value.dtype) @ value


def attend_einsum(query, key, value, mask=None, scale=1.0, softcap=None, fill=-inf, p=0.0):
    scores = torch.einsum("...qd,...kd->...qk", query, key).mul(scale)
    weights = masked_weights(scores, mask, softcap, fill, p).to(value.dtype)
    return torch.einsum("...qk,...kd->...qd", weights, value)


def attend_where(query, key, value, mask=None, scale=1.0, softcap=None, fill=-inf, p=0.0):
    scores = query @ key.mT * scale
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    if mask is not None:
        scores = torch.where(mask, scores, fill) if mask.dtype == torch.bool else torch.add(scores, mask)
    weights = F.softmax(scores, dim=-1, dtype=scores.dtype if scores.dtype == torch.float64 else torch.float32)
    return F.dropout(weights.to(value.dtype), p, False) @ value


def attend_grouped(query, key, value, mask=None, scale=1.0, softcap=None, fill=-inf, p=0.0):
    """The query heads of each kv head in a dim of their own."""
    query = query.unflatten(-3, (key.shape[-3], -1))
    if mask is not None and mask.dim() > 2:
        mask = mask.unsqueeze(-3) if mask.shape[-3] == 1 else mask.unflatten(-3, query.shape[-4:-2])
    scores = query @ key.unsqueeze(-3).mT * scale
    weights = masked_weights(scores, mask, softcap, fill, p).to(value.dtype)
    return (weights @ value.unsqueeze(-3)).flatten(-4, -3)


def attend_sdpa(query, key, value, mask=None, scale=1.0, softcap=None, fill=-inf, p=0.0):
    return sdpa(query, key, value, mask, 0.0, False, scale=scale)


def attend_with_scores(query, key, value, mask=None, scale=1.0, softcap=None, fill=-inf, p=0.0):
    """Also return the scores, as openai/whisper does."""
    scores = query @ key.mT * scale
    return masked_weights(scores, mask, softcap, fill, p).to(value.dtype) @ value, scores.detach()


def attend_flex(query, key, value, blocks=None, score=None, scale=None):
    return flex_attention(query, key, value, score, blocks, scale, enable_gqa=query.shape[1] != key.shape[1])


class Attend(torch.nn.Module):
    """A layer whose numbers are attributes. `gain` is what `functional_call` may replace."""

    def __init__(self, attend, scale=1.0, softcap=None, fill=-inf, p=0.0):
        super().__init__()
        self.attend, self.scale, self.softcap, self.fill = attend, scale, softcap, fill
        self.dropout = torch.nn.Dropout(p)
        self.register_buffer("gain", torch.ones(()))

    def forward(self, query, key, value, mask=None):
        p = self.dropout.p
        return self.attend(query, key, value, mask, self.scale, self.softcap, self.fill, p) * self.gain.to(query.dtype)


def listed(blocks, mask_mod):
    """The block mask again from its lists, with all listed blocks partial."""
    lists = blocks.kv_num_blocks, blocks.kv_indices, blocks.full_kv_num_blocks, blocks.full_kv_indices
    return BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=blocks.BLOCK_SIZE, mask_mod=mask_mod, seq_lengths=blocks.seq_lengths
    )


def causal_blocks(length):
    return create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, "cpu", BLOCK_SIZE=16)


def at_place(blocks, place, mask_mod, length):
    """One row of blocks, which a tensor may select: the lists have a dim less then."""
    cut = blocks[:, :, place]
    cut.mask_mod, cut.seq_lengths = mask_mod, (1, length)
    return cut
