"""Masks of keys that a top-k selects, in each form that is read by indices, and in forms that are not."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

B, H, KV, L, S, D, K = 3, 4, 2, 2, 128, 16, 7
BLOCK = 4

Form = Callable[[Tensor, Tensor], Tensor]  # the mask, of scores `[B, L, S]` and the keys that count, `[B, L, S]`


def inputs(seed: int = 0) -> tuple[Tensor, ...]:
    """Query, key, value, the scores of an indexer, and which keys count: fewer than K for one query."""
    torch.manual_seed(seed)
    query = torch.randn(B, H, L, D, dtype=torch.float64)
    key, value = torch.randn(2, B, KV, S, D, dtype=torch.float64)
    lengths = torch.tensor([[4, 5], [98, 99], [128, 128]])
    return query, key, value, torch.randn(B, L, S), torch.arange(S) < lengths[..., None]


def attend(form: Form) -> Callable[..., Tensor]:
    """A program that attends with the mask that `form` makes."""

    def fn(query: Tensor, key: Tensor, value: Tensor, scores: Tensor, base: Tensor) -> Tensor:
        key, value = (x.repeat_interleave(H // KV, dim=1) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, form(scores, base))

    return fn


def lowest() -> float:
    return torch.finfo(torch.float64).min


def keys(scores: Tensor) -> int:
    return scores.shape[-1]


def top(scores: Tensor, base: Tensor, k: int = K) -> Tensor:
    return scores.masked_fill(~base, -torch.inf).topk(k, -1).indices


def but(indices: Tensor, scores: Tensor) -> Tensor:
    """As DeepSeek-V3.2 does: True but at the indices."""
    unnamed = indices.new_ones((B, L, keys(scores)), dtype=torch.bool)
    return unnamed.scatter(-1, indices.to(torch.int32).long(), False).unsqueeze(1)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


def and_not(scores, base):
    return base[:, None] & ~but(top(scores, base), scores)


def zeros_and_true(scores, base):
    return (
        torch.zeros(B, L, keys(scores), dtype=torch.bool).scatter(-1, top(scores, base), True)[:, None] & base[:, None]
    )


def in_three_dims(scores, base):
    return (base & torch.zeros_like(base).scatter(-1, top(scores, base), True)).unsqueeze(1)


def picks_alone(scores, base):
    return ~but(scores.topk(K, -1)[1], scores)


def in_floats(scores, base):
    kept = torch.zeros(B, L, keys(scores)).scatter(-1, top(scores, base), 1.0)
    return (kept > 0.5).logical_and(base).unsqueeze(1)


def inverted_floats(scores, base):
    kept = zeros(B, L, keys(scores)).scatter(-1, top(scores, base), 1.0)[:, None]
    return ((1.0 - kept) * lowest()).masked_fill(~base[:, None], lowest())


def bias_of_infinity(scores, base):
    picks = torch.full((B, L, keys(scores)), -torch.inf, dtype=torch.float64).scatter(-1, top(scores, base), 0)
    return picks[:, None] + zeros(B, 1, L, keys(scores)).masked_fill(~base[:, None], -torch.inf)


def bias_of_lowest(scores, base):
    return (
        zeros(B, 1, L, keys(scores))
        .masked_fill(~base[:, None], lowest())
        .masked_fill(but(top(scores, base), scores), lowest())
    )


def lowest_of_both(scores, base):
    return zeros(B, 1, L, keys(scores)).masked_fill(~(~but(top(scores, base), scores) & base[:, None]), lowest())


def chosen_by_where(scores, base):
    least = torch.finfo(torch.float32).min
    return torch.where(~but(top(scores, base), scores) & base[:, None], 0.0, least).double()


def biases_of_their_own(scores, base):
    """As Doge: the picks keep numbers, each kv head has picks of its own, and heads are repeated."""
    bias = torch.stack((scores, -scores), dim=1).double().masked_fill(~base[:, None], lowest())
    active = torch.zeros_like(bias).scatter(-1, bias.topk(K, -1, sorted=False).indices, 1.0)
    bias = bias.masked_fill(active == 0.0, lowest())
    return bias[:, :, None].expand(B, KV, H // KV, L, keys(scores)).reshape(B, H, L, keys(scores))


def rows_without_keys(scores, base):
    """The first query has no key at all: it gets the mean of all values."""
    none = base.clone()
    none[:, 0] = False
    bias = zeros(B, 1, L, keys(scores)).masked_fill(~none[:, None], lowest())
    return bias.masked_fill(but(top(scores, none), scores), lowest())


def bool_rows_without_keys(scores, base):
    none = base.clone()
    none[:, 0] = False
    return none[:, None] & ~but(top(scores, none), scores)


def sentinel(scores, base):
    """-1 goes to a column that is cut off."""
    picks = top(scores, base, 30)
    picks = picks.masked_fill(~base.gather(-1, picks), -1)
    places = torch.where(picks >= 0, picks, torch.full_like(picks, keys(scores)))
    return (
        torch.zeros(B, L, keys(scores) + 1, dtype=torch.bool)
        .scatter(-1, places, True)[..., : keys(scores)]
        .unsqueeze(1)
    )


def clamped(scores, base):
    """As GLM 5: -1 is clamped to 0, which may be picked as well, and counts tell."""
    picks = top(scores, base, 30)
    picks = picks.masked_fill(~base.gather(-1, picks), -1)
    counts = torch.zeros(B, L, keys(scores), dtype=torch.int32)
    counts.scatter_add_(-1, picks.clamp(0, keys(scores) - 1), (picks >= 0).to(torch.int32))
    return counts.ne(0).unsqueeze(1)


def counted(scores, base):
    picks = top(scores, base)
    counts = torch.zeros(B, L, keys(scores), dtype=torch.int64).scatter_add(-1, picks, torch.ones_like(picks))
    return base[:, None] & counts.bool()[:, None]


def duplicates(scores, base):
    picks = top(scores, base)
    return ~but(torch.cat((picks, picks), -1), scores)


def any_integers(scores, base):
    return ~but((scores[..., :20] * 1e4).long().abs() % keys(scores), scores)


def or_of_others(scores, base):
    return ~(~base[:, None] | but(top(scores, base), scores))


def a_part_of_them(scores, base):
    return base[:, None] & ~but(top(scores, base)[..., :3], scores)


def broadcast_over_queries(scores, base):
    picks = top(scores, base)[:, :1].expand(B, L, K)
    return base[:, None] & ~but(picks, scores)


def in_blocks(scores, base):
    """As MiniMax M3: blocks of keys for each kv head, a sentinel, writes in place, and an additive mask."""
    blocks = torch.stack((scores, -scores), dim=1).masked_fill(~base[:, None], -torch.inf)
    blocks = blocks.unflatten(-1, (keys(scores) // BLOCK, BLOCK)).amax(-1)
    best, picks = blocks.topk(K, -1)
    picks = picks.masked_fill(best.eq(-torch.inf), -1)
    places = picks.masked_fill(picks.lt(0), keys(scores) // BLOCK)
    bias = torch.full((B, KV, L, keys(scores) // BLOCK + 1), -torch.inf)
    bias.scatter_(-1, places, 0.0)
    kept = (bias[..., : keys(scores) // BLOCK].eq(0)).repeat_interleave(BLOCK, dim=-1)[..., : keys(scores)]
    kept = kept.repeat_interleave(H // KV, dim=1) & base[:, None]
    return zeros(B, H, L, keys(scores)).masked_fill(~kept, lowest())


def behind_a_window(scores, base):
    """As DeepSeek V4: all keys of a window, and of the compressed ones behind them those that were picked."""
    window, rest = base[..., :9], base[..., 9:]
    picks = top(scores[..., 9:], rest)
    picks = torch.where(rest.gather(-1, picks), picks, torch.full_like(picks, -1))
    picks = torch.where(picks >= 0, picks, torch.full_like(picks, rest.shape[-1]))
    bias = torch.full((B, L, rest.shape[-1] + 1), -torch.inf, dtype=torch.float64)
    bias.scatter_(-1, picks, 0.0)
    window = zeros(B, L, 9).masked_fill(~window, -torch.inf)
    return torch.cat((window, bias[..., : rest.shape[-1]]), dim=-1).unsqueeze(1)


def every_key(scores, base):
    return base[:, None] & ~but(top(scores, base, keys(scores)), scores)


TAKEN = {
    x.__name__: x
    for x in (
        *(and_not, zeros_and_true, in_three_dims, picks_alone, in_floats, inverted_floats, bias_of_infinity),
        *(bias_of_lowest, lowest_of_both, chosen_by_where, biases_of_their_own, rows_without_keys),
        *(bool_rows_without_keys, sentinel, clamped, counted, duplicates, any_integers, or_of_others),
        *(a_part_of_them, broadcast_over_queries, in_blocks, behind_a_window),
    )
}
SENTINELS = {
    "sentinel",
    "in_blocks",
    "behind_a_window",
}  # of a number that is known to be out of range if the number of keys is
WITH_DUPLICATES = {"clamped", "duplicates", "any_integers"}


READ_BEFORE_A_WRITE = {"base_written_between", "indices_written_between"}


def union(scores, base):
    return base[:, None] & (~but(top(scores, base), scores) | (torch.arange(keys(scores)) > keys(scores) - 4))


def all_but_the_picks(scores, base):
    return base[:, None] & but(top(scores, base), scores)


def half_filled(scores, base):
    return torch.full((B, L, keys(scores)), -2.0, dtype=torch.float64).scatter(-1, top(scores, base), 0)[:, None]


def mild(scores, base):
    return zeros(B, 1, L, keys(scores)).masked_fill(but(top(scores, base), scores), -50.0)


def another_dim(scores, base):
    rows = torch.ones(B, L, keys(scores), dtype=torch.bool).scatter(1, top(scores, base)[:, :, :1] % L, False)
    return base[:, None] & rows[:, None]


def fewer_rows(scores, base):
    """The indices of the first query alone: the rows of others stay as they are, and leave no key."""
    picks = torch.zeros(B, L, keys(scores), dtype=torch.bool).scatter(-1, top(scores, base)[:, :1], True)
    return (picks | (torch.arange(L)[:, None] > 0))[:, None] & base[:, None]


def fewer_rows_alone(scores, base):
    return torch.zeros(B, L, keys(scores), dtype=torch.bool).scatter(-1, top(scores, base)[:, :1], True)[:, None]


def written_after(scores, base):
    mask = base[:, None] & ~but(top(scores, base), scores)
    mask[..., 5] = True
    return mask


def written_through_a_view(scores, base):
    kept = torch.zeros(B, L, keys(scores), dtype=torch.bool)
    view = kept[:, :, 5]
    kept.scatter_(-1, top(scores, base), True)
    view.fill_(True)
    return kept[:, None]


def read_before_the_write(scores, base):
    """The comparison sees a tensor that nothing was scattered into yet."""
    bias = torch.zeros(B, L, keys(scores))
    kept = bias == 0
    bias.scatter_(-1, top(scores, base), 1.0)
    return kept[:, None] & base[:, None]


def scattered_twice(scores, base):
    kept = torch.zeros(B, L, keys(scores), dtype=torch.bool)
    kept.scatter_(-1, top(scores, base), True)
    kept.scatter_(-1, top(-scores, base), True)
    return kept[:, None]


def base_written_between(scores, base):
    base = base.clone()[:, None]
    mask = base & ~but(top(scores, base[:, 0]), scores)
    base[..., :2] = False
    return mask


def indices_written_between(scores, base):
    picks = top(scores, base)
    mask = torch.zeros(B, L, keys(scores), dtype=torch.bool).scatter(-1, picks, True)
    picks[..., 0] = 0
    return mask[:, None]


def into_the_mask(scores, base):
    return (~(~base).scatter(-1, top(scores, base), False))[:, None]  # `base | picks`


def picks_for_each_query_head(scores, base):
    each = torch.stack([scores * (i + 1) % 1 for i in range(H)], dim=1)
    return torch.zeros(B, H, L, keys(scores), dtype=torch.bool).scatter(-1, each.topk(K, -1)[1], True)


def the_rest_is_not_one_number(scores, base):
    """A bias that is added to `finfo.min` may overflow, and the row without keys then leaves out some."""
    picks = zeros(B, 1, L, keys(scores)).masked_fill(but(top(scores, base), scores), lowest())
    return picks + zeros(B, 1, L, keys(scores)).masked_fill(~base[:, None], lowest())


def counts_of_one(scores, base):
    picks = top(scores, base)
    counts = torch.zeros(B, L, keys(scores), dtype=torch.int64)
    counts = counts.scatter_add(-1, torch.cat((picks, picks[..., :2]), -1), torch.ones(B, L, K + 2, dtype=torch.int64))
    return (counts == 1)[:, None]


def rows_swapped(scores, base):
    """Each query reads the picks of the other."""
    return base[:, None] & ~but(top(scores, base), scores).flip(2)


LEFT = {
    x.__name__: x
    for x in (
        *(union, all_but_the_picks, half_filled, mild, another_dim, fewer_rows, fewer_rows_alone, written_after),
        *(written_through_a_view, read_before_the_write, scattered_twice, base_written_between),
        *(indices_written_between, into_the_mask, picks_for_each_query_head, the_rest_is_not_one_number),
        *(counts_of_one, rows_swapped),
    )
}
