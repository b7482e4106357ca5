"""Attention to keys and values that are projected from latents, written in all forms that the latent pass takes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

B, H, S, R, NOPE, ROPE, V = 3, 4, 16, 24, 12, 8, 16
LATENT = "tatten.latent_attention.default"
sdpa = F.scaled_dot_product_attention


def inputs(q_len: int = 1, rope: int = ROPE, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """A query, latents, their rope, the weight that expands them, and a mask that leaves each query a key."""
    torch.manual_seed(0)
    mask = torch.rand(B, 1, q_len, S) < 0.7
    mask[..., 0] = True
    shapes = (B, H, q_len, NOPE + rope), (B, 1, S, R), (B, 1, S, rope), (H * (NOPE + V), R)
    query, latent, key_rope, weight = (torch.randn(x, dtype=torch.float64) for x in shapes)
    return [*(x.to(dtype) for x in (query, latent, key_rope, weight * R**-0.5)), mask]


def heads(projected: Tensor, width: int = NOPE + V) -> Tensor:
    return projected.view(B, S, H, width).transpose(1, 2)


def expand(c: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    own, values = heads(F.linear(c, w)).split((NOPE, V), dim=-1)
    return own, values


def copied(own: Tensor, rope: Tensor) -> Tensor:
    """Keys as transformers makes them."""
    keys = own.new_empty(B, H, S, own.shape[-1] + rope.shape[-1])
    keys[..., : own.shape[-1]].copy_(own)
    keys[..., own.shape[-1] :].copy_(rope.expand(-1, H, -1, -1))
    return keys


def joined(own: Tensor, rope: Tensor) -> Tensor:
    return torch.cat((own, rope.expand(-1, H, -1, -1)), dim=-1)


def attend(q, c, rope, w, mask=None, join=copied, scale: float | None = 0.3):
    own, values = expand(c, w)
    return sdpa(q, join(own, rope), values, attn_mask=mask, scale=scale)


def rope_first(q, c, rope, w, mask):
    own, values = expand(c, w)
    keys = torch.cat((rope.expand(-1, H, -1, -1), own), dim=-1)
    return sdpa(torch.cat((q[..., NOPE:], q[..., :NOPE]), dim=-1), keys, values, mask)


def values_first(q, c, rope, w, mask):
    """Another order in the weight, with columns that nothing reads."""
    kv = heads(F.linear(c, w))
    return sdpa(q, joined(kv[..., 16 : 16 + NOPE], rope), kv.narrow(-1, 2, 10), mask)


def two_projections(q, c, rope, w, mask, w_values):
    return sdpa(q, joined(heads(F.linear(c, w), NOPE + V)[..., :NOPE], rope), heads(F.linear(c, w_values), 10), mask)


def split_before_transpose(q, c, rope, w, mask):
    own, values = (x.transpose(1, 2) for x in F.linear(c, w).reshape(B, S, H, -1).split((NOPE, V), dim=-1))
    return sdpa(q, copied(own, rope), values, mask)


def contiguous(q, c, rope, w, mask):
    own, values = expand(c, w)
    return sdpa(q, copied(own, rope).contiguous(), values.contiguous(), mask)


def product_copied(q, c, rope, w, mask):
    """The product is copied before its columns are split into heads."""
    own, values = heads(F.linear(c, w).contiguous().to(c.dtype)).split((NOPE, V), dim=-1)
    return sdpa(q, copied(own, rope), values, mask)


def narrowed(q, c, rope, w, mask):
    own, values = expand(c, w)
    keys = own.new_zeros(B, H, S, NOPE + ROPE)
    keys.narrow(3, NOPE, ROPE).copy_(rope.expand(-1, H, -1, -1))
    keys.narrow(3, 0, NOPE).copy_(own)
    return sdpa(q, keys, values, mask)


def assigned(own: Tensor, rope: Tensor) -> Tensor:
    """Keys as the code that DeepSeek published with its weights makes them; the assignment broadcasts."""
    keys = rope.new_empty(B, H, S, own.shape[-1] + rope.shape[-1])
    keys[:, :, :, : own.shape[-1]] = own
    keys[:, :, :, own.shape[-1] :] = rope
    return keys


def assigned_in_parts(own: Tensor, rope: Tensor) -> Tensor:
    """To one view of keys without all of their columns, to another without all dims, and to none of the columns."""
    keys = torch.empty(B, H, S, own.shape[-1] + rope.shape[-1], dtype=own.dtype)
    keys.narrow(-1, own.shape[-1], rope.shape[-1])[...] = rope
    keys[..., -8 - own.shape[-1] :][..., : own.shape[-1]] = own
    keys[..., 5:5] = rope[..., :0]
    return keys


def heads_last(q, c, rope, w, mask):
    """Keys are put together as `[batch, length, heads, head_dim]`."""
    own, values = F.linear(c.squeeze(1), w).unflatten(-1, (H, -1)).split((NOPE, V), dim=-1)
    keys = torch.cat((own, rope.transpose(1, 2).expand(-1, -1, H, -1)), dim=-1)
    return sdpa(q, keys.transpose(1, 2), values.transpose(1, 2), mask)


def assigned_with_heads_last(q, c, rope, w, mask):
    own, values = F.linear(c.squeeze(1), w).unflatten(-1, (H, -1)).split((NOPE, V), dim=-1)
    keys = own.new_empty(B, S, H, NOPE + ROPE)
    keys[..., :NOPE], keys[..., NOPE:] = own, rope.squeeze(1)[:, :, None]
    return sdpa(q, keys.permute(0, 2, 1, 3), values.permute(0, 2, 1, 3), mask)


def weight_of_columns(q, c, rope, w, mask):
    """The weight is stored as `[rank, columns]`."""
    own, values = torch.matmul(c, w.view(R, -1)).view(B, S, H, -1).transpose(1, 2).tensor_split((NOPE,), dim=-1)
    return sdpa(q, joined(own, rope), values, mask)


def weight_of_heads(q, c, rope, w, mask):
    """A view of the weight for each, by two kinds of products with three dims."""
    w_keys, w_values = w.view(H, NOPE + V, R).split((NOPE, V), dim=1)
    own = torch.einsum("bsr,hdr->bhsd", c.squeeze(1), w_keys)
    return sdpa(q, joined(own, rope), c @ w_values.mT, mask)


def einsum_of_columns(q, c, rope, w, mask):
    """Factors in the other order, and heads that are not the first dim of the weight."""
    kv = torch.einsum("rhd, bsr -> bshd", w.view(R, H, NOPE + V), c[:, 0])
    return sdpa(q, joined(kv[..., :NOPE].transpose(1, 2), rope), kv[..., NOPE:].transpose(1, 2), mask)


def in_chunks(q, c, rope, w, mask):
    """As many columns for values as for keys."""
    own, values = heads(F.linear(c, w[: H * 2 * NOPE]), 2 * NOPE).chunk(2, dim=-1)
    return sdpa(q, joined(own, rope), values, mask)


def slices_of_one_cache(q, c, rope, w, mask):
    """Latents are sliced twice, and their rope once."""
    cache = torch.cat((c, rope), dim=-1)
    own, values = (expand(cache[..., :R], w)[i] for i in range(2))
    return sdpa(q, joined(own, cache[..., R:]), values, mask)


def rows_of_weight(q, c, rope, w, mask):
    """The weight has all keys, then all values."""
    own, values = heads(F.linear(c, w[: H * NOPE]), NOPE), heads(F.linear(c, w[H * NOPE :]), V)
    return sdpa(q, joined(own, rope), values, mask)


def without_rope(q, c, rope, w, mask):
    """Keys are not in pieces."""
    own, values = expand(c, w)
    return sdpa(q[..., :NOPE], own, values, mask)


def lora(q, c, rope, w, mask):
    """As PEFT spells it, not merged, and a second one."""
    down, up = w[:3], w[:, 3:6]
    projected = F.linear(c, w) + F.linear(F.linear(F.dropout(c.to(c.dtype), 0.1, training=False), down), up) * 2.0
    projected = projected + 0.5 * (c @ down.mT @ up.mT)
    own, values = heads(projected.to(c.dtype)).split((NOPE, V), dim=-1)
    return sdpa(q, copied(own, rope), values, mask)


def lora_of_heads(q, c, rope, w, mask):
    """Beside products with three dims."""
    w = w.view(H, NOPE + V, R)
    kv = torch.einsum("bsr,hdr->bhsd", c[:, 0], w)
    kv = kv + torch.einsum("bsl,hdl->bhsd", c[:, 0] @ w[0, :3].T, w[..., 5:8])
    return sdpa(q, joined(kv[..., :NOPE], rope), kv[..., NOPE:], mask)


def caches_written(q, c, rope, w, mask):
    """Writes before latents are expanded, or after attention, stay."""
    c[:, :, 3:4].copy_(2 * c[:, :, 5:6])
    rope[:, :, 3:4].zero_()
    out = attend(q, c, rope, w, mask)
    rope.mul_(2)
    return out


ACCEPTED = {
    "copied": attend,
    "joined": lambda *x: attend(*x, join=joined),
    "no_scale": lambda *x: attend(*x, scale=None),
    "rope_first": rope_first,
    "values_first": values_first,
    "two_projections": two_projections,
    "split_before_transpose": split_before_transpose,
    "no_heads": lambda q, c, rope, w, mask: attend(q, c.squeeze(1), rope, w, mask),
    "repeated": lambda *x: attend(*x, join=lambda own, rope: torch.cat((own, rope.repeat_interleave(H, 1)), -1)),
    "contiguous": contiguous,
    "product_copied": product_copied,
    "narrowed": narrowed,
    "assigned": lambda *x: attend(*x, join=assigned),
    "assigned_in_parts": lambda *x: attend(*x, join=assigned_in_parts),
    "heads_last": heads_last,
    "assigned_with_heads_last": assigned_with_heads_last,
    "weight_of_columns": weight_of_columns,
    "weight_of_heads": weight_of_heads,
    "einsum_of_columns": einsum_of_columns,
    "in_chunks": in_chunks,
    "slices_of_one_cache": slices_of_one_cache,
    "rows_of_weight": rows_of_weight,
    "without_rope": without_rope,
    "caches_written": caches_written,
    "no_mask": lambda q, c, rope, w, mask: attend(q, c, rope, w),
    "additive": lambda q, c, rope, w, mask: attend(q, c, rope, w, torch.where(mask, 0.5, -torch.inf).to(q.dtype)),
    "per_head": lambda q, c, rope, w, mask: attend(q, c, rope, w, mask & (q[..., :1] > -9)),
}


def compiled(fn, args, **options):
    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(fn, backend="tatten", fullgraph=True, options={"inner": "eager"} | options)(*args)


def clones(args):
    return [x.clone() for x in args]


def arguments(name: str, *args, **kwargs) -> list[Tensor]:
    given = inputs(*args, **kwargs)
    return [*given, torch.randn(H * 10, R, dtype=given[0].dtype)] if name == "two_projections" else given


def parts_of_query(q, c, rope, w, mask, change=lambda *parts: (), whole=torch.cat):
    own, q_rope = q[..., :NOPE] + 1, q[..., NOPE:] - 1
    query = whole((own, q_rope), dim=-1)
    change(own, q_rope, query)
    return attend(query, c, rope, w, mask)
