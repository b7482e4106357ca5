"""One attention state from PyTorch's flash kernel for CPUs, with workarounds where it is wrong or leaves cores idle.

The kernel returns the lse. This file handles calls without keys, queries without any key, strides, head_dims that
differ, few heads for many cores, and many heads at once in low precision, which the kernel packs slowly.
"""

from __future__ import annotations

import functools
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from tatten.ops.cpu import thresholds
from tatten.ops.moved import moved
from tatten.ops.sizes import ceil_div
from tatten.ops.states import NEG_INF, State, accumulator_dtype, combine_partials

# Combining partials with a larger lse may lose more precision than float32 has lost in each score. Scores alone, and
# biases of ordinary size, stay far below. Sequences above it are computed twice.
COARSE_LSE = 4096.0


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a 4-D mask to the form that the flash kernel takes: additive, and dense in its last dimension."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, NEG_INF).to(accumulator_dtype(dtype))  # `where` gives the default dtype
    if dtype == torch.float64:  # the kernel takes float32 masks with lower precision, but misreads them with float64
        mask = mask.double()
    return mask if mask.stride(3) == 1 else mask.contiguous()


def empty_state(q_rows: Tensor, value_dim: int) -> State:
    """Return the state of packed queries `[b, kv_heads, q_rows, d]` over no keys."""
    shape = q_rows.shape[:3]
    return q_rows.new_zeros(*shape, value_dim), q_rows.new_full(shape, NEG_INF, dtype=accumulator_dtype(q_rows.dtype))


def attend(q_rows: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, some_empty: bool) -> State:
    """Return the state of packed queries `[b, kv_heads, q_rows, d]` over all keys, with an additive mask."""
    batch, kv_heads, n_q_rows, _ = q_rows.shape
    value_dim = value.shape[3]
    if key.shape[2] == 0:  # the flash kernel would divide by zero, and the process would die
        return empty_state(q_rows, value_dim)
    q_rows, key, value = _operands_of_flash(q_rows, key, value)
    splits = splits_of(key, value)
    if splits > 1:
        out, lse = _attend_in_splits(q_rows, key, value, mask, scale, splits)
        if mask is not None:
            for b in coarse_sequences(lse):
                at = slice(b, b + 1)
                sequence_mask = mask[at] if mask.shape[0] > 1 else mask
                out[at], lse[at] = _flash(q_rows[at], key[at], value[at], sequence_mask, scale)
    elif (
        q_rows.element_size() == 2
        and n_q_rows >= thresholds.CPU.packed_rows
        and batch * kv_heads > torch.get_num_threads()
    ):
        out, lse = _attend_in_groups(q_rows, key, value, mask, scale, some_empty)
    else:
        out, lse = _flash(q_rows, key, value, mask, scale, some_empty)
    return (out if out.shape[3] == value_dim else out[..., :value_dim]), lse


def attend_in_one_call(
    q_rows: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, some_empty: bool
) -> State:
    """Like `attend`, for at least one key, but independent of the cores: every machine traces the same graph."""
    out, lse = _flash(*_operands_of_flash(q_rows, key, value), mask, scale, some_empty)
    return (out if out.shape[3] == value.shape[3] else out[..., : value.shape[3]]), lse


def _operands_of_flash(q_rows: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values with one head_dim, that of `value` or more, and dense in it."""
    head_dim, value_dim = key.shape[3], value.shape[3]
    if head_dim != value_dim:  # the kernel takes a single head_dim; zeros change neither scores nor the columns kept
        q_rows, key = (F.pad(x, (0, max(0, value_dim - head_dim))) for x in (q_rows, key))
        value = F.pad(value, (0, max(0, head_dim - value_dim)))
    if q_rows.stride(3) != 1 or key.stride(3) != 1 or value.stride(3) != 1:
        # The kernel assumes stride 1 in the last dimension, whatever the strides of the tensor.
        q_rows, key, value = q_rows.contiguous(), key.contiguous(), value.contiguous()
    return q_rows, key, value


def coarse_sequences(lse: Tensor) -> list[int]:
    """Find the sequences with a query whose keys all have a bias so large that the lse of partials can't weigh them.

    `bias + log(n)` is off by up to `2^-24 * abs(bias)` in float32, so that at -1e9, as some models write padding, 3
    keys weigh as much as 1000. A single call of the kernel keeps the maximum and the sum apart, and is not affected.
    """
    if lse.abs().amax() <= COARSE_LSE:
        return []
    coarse = (lse.abs() > COARSE_LSE) & lse.isfinite()
    sequences: list[int] = coarse.flatten(1).any(dim=1).nonzero().flatten().tolist()
    return sequences


@functools.cache
def flash_problem() -> str | None:
    """Return the reason why PyTorch's flash kernel for CPUs can't be called; None if it can."""
    try:
        schema = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default._schema
        names = [x.name for x in schema.arguments]
        if names != ["query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale"]:
            raise TypeError(f"it takes {', '.join(names)}")
    except Exception as error:
        name = "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu"
        return moved(name, error, "attention on a CPU writes its scores to memory")
    return None


def attend_by_products(
    q_rows: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    some_empty: bool = True,
    softcap: float | None = None,
) -> State:
    """Like `attend`, by matrix products that write all scores to memory. PyTorch's kernel has no `softcap`.

    `some_empty` is unused: `attend` has it.
    """
    if key.shape[2] == 0:
        return empty_state(q_rows, value.shape[3])
    acc = accumulator_dtype(q_rows.dtype)
    products = q_rows.to(acc) @ key.to(acc).transpose(2, 3)
    scores = products * scale if softcap is None else softcap * torch.tanh(products * (scale / softcap))
    value = value.to(acc)
    if mask is not None:
        excluded = mask == NEG_INF
        scores = torch.where(excluded, NEG_INF, scores + mask)
        value = value.masked_fill(excluded.all(dim=2).unsqueeze(-1), 0.0)  # they may be NaN, and 0 * NaN is NaN
    # The maximum and the sum are kept apart: with a large bias, an lse no longer tells how many keys there are.
    row_max = scores.amax(dim=-1, keepdim=True)
    p = torch.exp(scores - torch.where(row_max == NEG_INF, 0.0, row_max))
    row_sum = p.sum(dim=-1, keepdim=True)
    out = p @ value / torch.where(row_sum == 0, 1.0, row_sum)
    return out.to(q_rows.dtype), (row_max + torch.log(row_sum)).squeeze(-1)


def _flash(
    q_rows: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, some_empty: bool = True
) -> State:
    """Call the kernel. `some_empty`: the mask may leave a query without any key."""
    if flash_problem() is not None:
        return attend_by_products(q_rows, key, value, mask, scale)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q_rows, key, value, 0.0, False, attn_mask=mask, scale=scale
    )
    if mask is not None and some_empty:
        # A query without any key gets out = 0 from the kernel, but lse = 0 too.
        lse = lse.masked_fill((mask == NEG_INF).all(dim=-1), NEG_INF)
    if mask is not None and q_rows.element_size() == 2:
        # The kernel in low precision returns numbers for a bias of +inf, where NaN is right.
        out = out.masked_fill((lse == -NEG_INF).unsqueeze(-1), torch.nan)
    return out, lse


def splits_of(key: Tensor, value: Tensor) -> int:
    """Return the number of splits of the keys that keeps every core busy: the kernel parallelises over (batch, head).

    It is 1 if nothing is gained, or if (batch, head) is not one dimension in memory.
    """
    batch, kv_heads, kv_len, head_dim = key.shape
    threads, pairs = torch.get_num_threads(), batch * kv_heads
    if pairs % threads == 0:
        return 1
    if batch > 1 and kv_heads > 1 and any(x.stride(0) != kv_heads * x.stride(1) for x in (key, value)):
        return 1
    most = min(2 * threads, kv_len, 2 * pairs * kv_len * head_dim * key.element_size() // thresholds.CPU.split_bytes)

    def busy(splits: int) -> float:
        rounds = ceil_div(pairs * splits, threads)
        return pairs * splits / (rounds * threads)

    return next((splits for splits in range(1, most + 1) if busy(splits) > 0.9), 1)


def _attend_in_splits(
    q_rows: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, splits: int
) -> State:
    """Call `_flash` on equal splits of the keys, which take the place of heads; the remainder is one more state."""
    batch, kv_heads = key.shape[:2]
    q_rows, key, value = (x.flatten(0, 1) for x in (q_rows, key, value))
    if mask is not None:
        mask = mask.expand(batch, kv_heads, -1, key.shape[1]).flatten(0, 1)
    size = key.shape[1] // splits
    split_keys = size * splits

    out, lse = _flash(
        q_rows.unsqueeze(1).expand(-1, splits, -1, -1),
        key[:, :split_keys].unflatten(1, (splits, size)),
        value[:, :split_keys].unflatten(1, (splits, size)),
        None if mask is None else mask[..., :split_keys].unflatten(2, (splits, size)).transpose(1, 2),
        scale,
    )
    outs, lses = list(out.unbind(1)), list(lse.unbind(1))
    if split_keys < key.shape[1]:
        rest_mask = None if mask is None else mask[:, None, :, split_keys:]
        out, lse = _flash(q_rows[:, None], key[:, None, split_keys:], value[:, None, split_keys:], rest_mask, scale)
        outs.append(out.squeeze(1))
        lses.append(lse.squeeze(1))
    out, lse = combine_partials(outs, lses)
    return out.unflatten(0, (batch, kv_heads)), lse.unflatten(0, (batch, kv_heads))


def _attend_in_groups(
    q_rows: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, some_empty: bool
) -> State:
    """Call `_flash` on as many heads at a time as there are cores, so that packed keys are used while in the cache.

    If packed all at once, 32 heads of 4096 keys take 2 to 10 times as long (2-core Xeon with AMX, measured).
    """
    batch, kv_heads = key.shape[:2]
    size = torch.get_num_threads()
    states = []
    for b, head in itertools.product(range(batch), range(0, kv_heads, size)):
        group = (slice(b, b + 1), slice(head, head + size))
        part = None if mask is None else mask.expand(batch, kv_heads, -1, -1)[group]
        states.append(_flash(q_rows[group], key[group], value[group], part, scale, some_empty))
    out, lse = (
        torch.cat(parts, dim=1).unflatten(1, (batch, kv_heads)).squeeze(0) for parts in zip(*states, strict=True)
    )
    return out, lse
