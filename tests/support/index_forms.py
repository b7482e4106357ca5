"""The scores of an indexer in each form that becomes one op, and forms that don't."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

B, L, H, S, D = 2, 3, 4, 128, 16
C = 0.25

Form = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # scores, of queries, keys, weights and the keys that count


def inputs(dtype: torch.dtype = torch.bfloat16, seed: int = 0, length: int = L) -> tuple[Tensor, ...]:
    """Queries, keys, weights and which keys count: for one query none."""
    torch.manual_seed(seed)
    query, key = torch.randn(B, length, H, D).to(dtype), torch.randn(B, S, D).to(dtype)
    lengths = torch.randint(1, S + 1, (B, length, 1))
    lengths[0, 0] = 0
    return query, key, torch.randn(B, length, H), torch.arange(S) < lengths


def exact(query: Tensor, key: Tensor, weights: Tensor, mask: Tensor | None, scale: float = C) -> Tensor:
    """The scores in float64."""
    products = torch.einsum("blhd,bsd->blhs", query.double(), key.double()) * scale
    scores = torch.einsum("blhs,blh->bls", products.relu(), weights.double())
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def products(query: Tensor, key: Tensor) -> Tensor:
    return torch.matmul(query.float(), key.transpose(-1, -2).float().unsqueeze(1))


def weighted(weights: Tensor, scores: Tensor) -> Tensor:
    return torch.matmul(weights.float().unsqueeze(-2), scores).squeeze(-2)


def left(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~mask, float("-inf"))


def deepseek_v32(q, k, w, m):
    return left(weighted(w, F.relu(products(q, k) * C)), m)


def hy_v4(q, k, w, m):
    return left(weighted(w * C, F.relu(products(q, k))), m)


def deepseek_v4(q, k, w, m):
    scores = F.relu(products(q, k)) * C
    return (scores * w.float().unsqueeze(-1)).sum(dim=2).masked_fill(m.logical_not(), float("-inf"))


def glm5_next(q, k, w, m):
    scores = weighted(w, F.relu(products(q, k) * C))
    return scores.masked_fill(~m, torch.finfo(scores.dtype).min)


def additive(q, k, w, m):
    return weighted(w, F.relu(products(q, k) * C)) + torch.zeros(B, q.shape[1], S).masked_fill(~m, -torch.inf)


def narrow_bias(q, k, w, m):
    bias = torch.zeros(m.shape, dtype=torch.bfloat16).masked_fill(~m, -torch.inf)
    return bias + weighted(w, F.relu(products(q, k) * C))


def einsums(q, k, w, m):
    scores = torch.einsum("blhd,bsd->blhs", q.float(), k.float()).mul(C).relu()
    return torch.where(m, torch.einsum("blhs,blh->bls", scores, w), -torch.inf)


def einsum_of_heads_first(q, k, w, m):
    scores = torch.einsum("blhd,bsd->bhls", q.float(), k.float()) * C
    return left(torch.einsum("blh,bhls->bls", w, scores.relu()), m)


def heads_first(q, k, w, m):
    scores = ((q.float().transpose(1, 2) @ k.float()[:, None].mT) * C).clamp(min=0)
    return torch.where(~m, -torch.inf, (scores * w.transpose(1, 2)[..., None]).sum(1))


def keepdim(q, k, w, m):
    scores = torch.relu(products(q, k)) / 4
    return left((w[..., None] * scores).sum(-2, keepdim=True)[:, :, 0], m)


def all_after_the_sum(q, k, w, m):
    return left(weighted(w, F.relu(products(q, k))) * C, m)


def in_place(q, k, w, m):
    scores = products(q, k)
    scores *= C
    return weighted(w, scores.relu_()).masked_fill_(~m, float("-inf"))


def narrow_weights(q, k, w, m):
    w = w.to(torch.bfloat16).float()
    return left(weighted(w, F.relu(products(q, k) * C)), m)


def copies(q, k, w, m):
    q, k = q.contiguous().float(), k.transpose(1, 2).contiguous().float()
    return left(weighted(w, F.relu((q @ k[:, None].clone()) * C)), m)


def repeated(q, k, w, m):
    """The keys of each query are the same."""
    keys = k.float()[:, None].expand(B, q.shape[1], S, D)
    return left(weighted(w, F.relu((q.float() @ keys.mT) * C)), m)


def columns(q, k, w, m):
    """A mask of four dims."""
    mask = m[:, None].expand(B, 1, q.shape[1], S)
    return left(weighted(w, F.relu(products(q, k) * C)), mask[:, 0])


def later(q, k, w, m):
    """True for keys that are left out, as where positions are compared."""
    return weighted(w, F.relu(products(q, k) * C)).masked_fill(m == 0, float("-inf"))


TAKEN: dict[str, Form] = {
    x.__name__: x
    for x in (
        *(deepseek_v32, hy_v4, deepseek_v4, glm5_next, additive, narrow_bias, einsums, einsum_of_heads_first),
        *(heads_first, keepdim, all_after_the_sum, in_place, narrow_weights, copies, repeated, columns, later),
    )
}
UNMASKED = {"glm5_next"}  # the mask stays beside the op


def products_read(q, k, w, m):
    scores = F.relu(products(q, k) * C)
    return left(weighted(w, scores), m) + scores.amax(2)


def products_returned(q, k, w, m):
    scores = products(q, k)
    return left(weighted(w, F.relu(scores * C)), m), scores


def relu_kept_in_place(q, k, w, m):
    """The products are read by their name from before relu."""
    scores = products(q, k)
    positive = scores.relu_()
    return left(weighted(w, positive * C), m) + scores[:, :, 0]


def negative(q, k, w, m):
    return left(weighted(w, F.relu(products(q, k)) * -C), m)


def temperatures(q, k, w, m):
    return left(weighted(w, F.relu(products(q, k) * w.abs().amax())), m)


def narrow_products(q, k, w, m):
    scores = torch.matmul(q, k.mT[:, None]).relu() * C
    return left(weighted(w, scores.float()), m)


def rounded(q, k, w, m):
    scores = F.relu(products(q, k) * C).to(torch.bfloat16)
    return left(weighted(w.to(torch.bfloat16).to(scores.dtype), scores.float()), m)


def keys_of_heads(q, k, w, m):
    keys = torch.stack([k * (i + 1) for i in range(H)], 1).float()
    scores = F.relu(q.float().transpose(1, 2) @ keys.mT * C)
    return left((scores * w.transpose(1, 2)[..., None]).sum(1), m)


def weights_of_all(q, k, w, m):
    """One weight for each head, whatever the query."""
    return left((F.relu(products(q, k) * C) * w[:1, :1, :, None]).sum(2), m)


def keys_written(q, k, w, m):
    keys = k.clone()
    scores = products(q, keys)
    keys[:, 0] = 0
    return left(weighted(w, F.relu(scores * C)), m)


def copies_written(q, k, w, m):
    wide = k.mT.float()
    wide[..., 0] = 0
    return left(weighted(w, F.relu(torch.matmul(q.float(), wide[:, None]) * C)), m)


def mask_written(q, k, w, m):
    mask = m.clone()
    removed = ~mask
    mask[..., 0] = True
    return weighted(w, F.relu(products(q, k) * C)).masked_fill(removed, float("-inf"))


def into_a_buffer(q, k, w, m):
    buffer = torch.zeros(B, q.shape[1], H, S)
    return left(weighted(w, torch.mul(products(q, k).relu(), C, out=buffer)), m), buffer


def integer_weights(q, k, w, m):
    return left((F.relu(products(q, k) * C) * (w > 0).long()[..., None]).sum(2), m)


def beyond_float32(q, k, w, m):
    """All products are 0, which times infinity would be NaN."""
    return left(weighted(w, F.relu(products(q * 1e-30, k * 1e-30) * 1e30) * 1e30), m)


LEFT: dict[str, tuple[Form, str, str]] = {
    "products_read": (products_read, "index_used", "uses `scores`"),
    "products_returned": (products_returned, "index_used", "uses `scores`"),
    "relu_kept_in_place": (relu_kept_in_place, "index_used", "uses `scores`"),
    "negative": (negative, "index_scores", "multiplies them by -0.25 after relu"),
    "temperatures": (temperatures, "index_scores", "by something else than a number"),
    "narrow_products": (narrow_products, "index_scores", "in torch.bfloat16"),
    "rounded": (rounded, "index_scores", "casts them to torch.bfloat16"),
    "keys_of_heads": (keys_of_heads, "index_scores", "keys are [2, 4, 16, 128]"),
    "weights_of_all": (weights_of_all, "index_scores", "weights are [1, 1, 4, 1]"),
    "keys_written": (keys_written, "written_between", "`setitem` writes"),
    "copies_written": (copies_written, "written_between", "`setitem` writes"),
    "mask_written": (mask_written, "written_between", "`setitem` writes"),
    "integer_weights": (integer_weights, "index_scores", "weights are [2, 3, 4, 1] in torch.int64"),
    "beyond_float32": (beyond_float32, "index_scores", "multiplied by 1e+60"),
    "into_a_buffer": (into_a_buffer, "index_used", "writes to `buffer`"),
}


def without_relu(q, k, w, m):
    return left(weighted(w, products(q, k) * C), m)


def another_function(q, k, w, m):
    return left(weighted(w, F.gelu(products(q, k) * C)), m)


def biased(q, k, w, m):
    return left(weighted(w, F.relu(products(q, k) * C - 0.5)), m)


def leaky(q, k, w, m):
    return left(weighted(w, products(q, k).clamp(min=-1)), m)


def between_bounds(q, k, w, m):
    return left(weighted(w, products(q, k).clamp(0, 1)), m)


def overwritten(q, k, w, m):
    """The sum is of other products, which take the memory of relu's."""
    scores = F.relu(products(q, k))
    return left(torch.mul(products(q, -k), w[..., None], out=scores).sum(2), m)


def sum_over_keys(q, k, w, m):
    return F.relu(products(q, k)).sum(-1)


def unweighted(q, k, w, m):
    return left(F.relu(products(q, k)).sum(2), m)


def of_a_layer(q, k, w, m):
    return left(weighted(w, F.relu(F.linear(q.float(), torch.ones(S, D)))), m)


OTHERS: dict[str, Form] = {
    x.__name__: x
    for x in (
        *(without_relu, another_function, biased, leaky, between_bounds, overwritten),
        *(sum_over_keys, unweighted, of_a_layer),
    )
}
