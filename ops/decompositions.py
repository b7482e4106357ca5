"""Decompositions of the ops on a CPU into aten, for programs of `torch.export` that run without tatten."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tatten.ops.call import Attend, AttentionCall, KeyValue
from tatten.ops.cpu.attend_gathered import attend_gathered
from tatten.ops.cpu.attend_used import UsedKeys, attend_jointly, attend_used, used_by_rows, used_in_blocks
from tatten.ops.cpu.attention import merge_sinks, upcast, with_mask_in
from tatten.ops.cpu.index_scores import scores_of_keys
from tatten.ops.cpu.latent import query_and_rope
from tatten.ops.cpu.shared_pages import shared_pages
from tatten.ops.fused_linear import fused_linear
from tatten.ops.index_scores_validation import check_index_scores
from tatten.ops.kernel_signatures import bifurcated_kernel, decode_kernel, latent_kernel
from tatten.ops.latent_validation import check_latent_attention
from tatten.ops.library import block_mask
from tatten.ops.mixed_batch import MixedCall, as_decode, check_mixed, mixed_kernel, of_tokens
from tatten.ops.pages import gather_pages
from tatten.ops.picks import picked_mask
from tatten.ops.picks_validation import check_picks
from tatten.ops.project_heads import project_heads
from tatten.ops.reach import mask_of_reach, narrow_mask, with_masks_of_window
from tatten.ops.row_groups import group_size, row_groups_reference, rows_of
from tatten.ops.skinny_linear import skinny_linear
from tatten.ops.states import State, accumulator_dtype, combine_partials, merge
from tatten.ops.top_picks import top_picks
from tatten.ops.validation import check_decode_attention

# Inductor asks whether a size of a matrix product is 1, and can't tell for a size that depends on a mask's data.
LEAST_IN_PRODUCTS = 2


def decompositions(*, core_aten: bool = False) -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of tatten's ops into aten on a CPU, for `ExportedProgram.run_decompositions`.

    The decomposed program has none of tatten's ops, so that it runs where tatten cannot be imported: packaged by
    AOTInductor, in C++ too. It still reads only keys and values that count, each once, whatever the mask holds at run
    time, and does not depend on the machine that made it. Picked keys are copied; with a `rest_bias` all keys are read.
    All pages that a block table has room for are copied; `paged_attention` copies them for each token. `index_scores`
    reads all keys, and has the products of all heads in memory. Ops on other devices than the CPU stay. Lengths and
    rows out of range are clamped; in eager mode they are errors. Ops with `batch_invariant=True` have no
    decomposition: `run_decompositions` raises NotImplementedError.

    Args:
        core_aten: decompose without PyTorch's flash kernel. It is not in core ATen, and PyTorch's own decomposition of
            it loses the lse. For compilers that take core ATen, such as ExecuTorch.

    Returns:
        A table that holds tatten's ops alone: with `core_aten`, update `torch.export.default_decompositions()` with it.

    Examples:
        >>> import torch, tatten
        >>> class Step(torch.nn.Module):
        ...     def forward(self, query, key, value, mask):
        ...         return tatten.decode_attention(query, key, value, attn_mask=mask)
        >>> query, (key, value) = torch.randn(2, 8, 1, 64), torch.randn(2, 2, 2, 300, 64)
        >>> mask = (torch.arange(300) < 100).expand(2, 1, 1, 300)
        >>> with torch.no_grad():
        ...     program = torch.export.export(Step(), (query, key, value, mask))
        >>> program = program.run_decompositions(tatten.decompositions())
        >>> [node for node in program.graph.nodes if "tatten" in str(node.target)]
        []
    """
    ops = torch.ops.tatten
    table: dict[Any, Callable[..., Any]] = {
        ops.decode_attention.default: decode_kernel(
            _picks_gathered(functools.partial(_decode_attention, core_aten=core_aten))
        ),
        ops.latent_attention.default: latent_kernel(
            _picks_gathered(functools.partial(_latent_attention, core_aten=core_aten))
        ),
        ops.bifurcated_attention.default: bifurcated_kernel(
            _picks_gathered(functools.partial(_bifurcated_attention, core_aten=core_aten))
        ),
        ops.paged_attention.default: mixed_kernel(functools.partial(_paged_attention, core_aten=core_aten)),
        ops.merge_states.default: _merge_states,
        ops.row_groups.default: _row_groups,
        ops.shared_pages.default: shared_pages,
        ops.project_heads.default: project_heads,
        ops.index_scores.default: _index_scores,
        ops.skinny_linear.default: skinny_linear,
        ops.fused_linear.default: fused_linear,
        ops.top_picks.default: top_picks,
    }
    # Export keeps ops that PyTorch itself could decompose if they are not in the table.
    return {op: _on_a_cpu(decomposition) for op, decomposition in table.items()} | {ops.block_mask.default: block_mask}


def _on_a_cpu(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a decomposition so that it declines tensors on other devices."""

    @functools.wraps(decomposition)
    def declining(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        return decomposition(first, *args, **kwargs) if first.device.type == "cpu" else NotImplemented

    return declining


def _picks_gathered(attend: Attend) -> Attend:
    """Wrap a decomposition so that a call with picks copies the picked keys alone.

    With a `rest_bias` the graph can't know whether a query attends to all keys, so it gets the dense mask.
    """

    @functools.wraps(attend)
    def decomposition(call: AttentionCall) -> State:
        if not call.has_picks:
            return attend(call)
        _check_decomposes(call)
        check_picks(call)
        if call.rest_bias is not None:
            return attend(_with_dense_mask(call, call.rest_bias))
        out, lse = attend_gathered(call)
        out, lse = (out, lse) if call.sinks is None else merge_sinks(out, lse, call.sinks)
        return out.to(call.out_dtype or call.query.dtype).contiguous(), lse.contiguous()

    return decomposition


def _with_dense_mask(call: AttentionCall, rest_bias: float) -> AttentionCall:
    query, (stored,) = call.query, call.segments
    assert stored.indices is not None
    picked = picked_mask(stored.indices, stored.key.shape[2], call.index_block, query.shape[1])
    bias = query.new_zeros(()) if stored.attn_mask is None else stored.attn_mask
    mask = torch.where(picked, bias.to(accumulator_dtype(query.dtype)), rest_bias)
    stored = stored._replace(attn_mask=mask, block_mask=None, indices=None)
    return call._replace(segments=(stored,))


def _check_decomposes(call: AttentionCall) -> None:
    if call.batch_invariant:
        raise NotImplementedError(f"`batch_invariant` must be False where {call.op} is decomposed, got True")


def _in_order(call: AttentionCall, check: Callable[[AttentionCall], None]) -> AttentionCall:
    """Return the call with its pages, if it has any, copied in order; `check` checks a call with pages first."""
    if call.segments[0].block_table is None:
        return call
    check(call)
    return gather_pages(call)


def _decode_attention(call: AttentionCall, *, core_aten: bool) -> State:
    _check_decomposes(call)
    call = _in_order(call, check_decode_attention)
    query, dtype = call.query, call.query.dtype
    stored = call.segments[0]
    upcasts = stored.key.dtype != dtype
    if upcasts:  # as `tatten.ops.cpu.attention` does
        query = query.to(accumulator_dtype(dtype))
        stored = with_mask_in(stored, query.dtype)
    stored = _within_reach(call, stored)
    jointly = core_aten or call.softcap is not None
    used = used_in_blocks(query, stored, LEAST_IN_PRODUCTS if jointly else 1)
    if upcasts:
        key, value = (upcast(x, f, query.dtype) for x, f in zip((used.key, used.value), used.scales, strict=True))
        used = UsedKeys(key, value, used.mask, used.inside)
    out, lse = _attend(call, query, [used], jointly)
    return out.to(dtype).contiguous(), lse.contiguous()


def _within_reach(call: AttentionCall, stored: KeyValue) -> KeyValue:
    """Narrow the mask to lengths and window; a block mask then no longer holds."""
    mask, kv_lens, kv_len, window = stored.attn_mask, stored.kv_lens, stored.key.shape[2], call.window
    if kv_lens is None and window is None:
        return stored
    lens = torch.full((1,), kv_len) if kv_lens is None else kv_lens.to(torch.int64).clamp(0, kv_len)
    reach = mask_of_reach(lens, call.query.shape[2], kv_len, window)
    return stored._replace(attn_mask=narrow_mask(mask, reach), block_mask=None)


def _latent_attention(call: AttentionCall, *, core_aten: bool) -> State:
    _check_decomposes(call)
    call = _in_order(call, check_latent_attention)
    acc, jointly = accumulator_dtype(call.query.dtype), core_aten or call.softcap is not None
    query, key_rope = query_and_rope(call)
    stored = _within_reach(call, with_mask_in(call.segments[0], acc))._replace(value=key_rope)
    used = used_in_blocks(query, stored, LEAST_IN_PRODUCTS if jointly else 1)
    # A graph can't loop over a number of blocks that depends on the mask: the used latents are joined with their rope.
    keys = torch.cat((used.key, used.value), dim=3).to(acc)
    used = UsedKeys(keys, used.key.to(acc), used.mask, used.inside)
    out, lse = _attend(call, query.to(acc), [used], jointly)
    return out.to(call.out_dtype or call.query.dtype).contiguous(), lse.contiguous()


def _bifurcated_attention(call: AttentionCall, *, core_aten: bool) -> State:
    _check_decomposes(call)
    call = with_masks_of_window(call)
    query, masks = call.query, [x.attn_mask for x in call.segments]
    additive = len(masks) > 1 and any(mask is not None and mask.dtype != torch.bool for mask in masks)
    jointly = core_aten or additive or call.softcap is not None
    least = LEAST_IN_PRODUCTS if jointly else 1
    segments = [
        used_in_blocks(query, x, least) if (rows := rows_of(query, x)) is None else used_by_rows(x, rows, least)
        for x in call.segments
    ]
    out, lse = _attend(call, query, segments, jointly)
    return out.contiguous(), lse.contiguous()


def _attend(call: AttentionCall, query: Tensor, segments: Sequence[UsedKeys], jointly: bool) -> State:
    """Return the state of `query` over the sinks and the used keys.

    With `jointly`, matrix products hold the keys of all segments. Otherwise PyTorch's flash kernel computes each one.
    """
    scale = call.score_scale
    if jointly:
        out, lse = attend_jointly(query, segments, scale, call.softcap)
    else:
        out, lse = combine_partials(*zip(*(attend_used(query, used, scale) for used in segments), strict=True))
    return (out, lse) if call.sinks is None else merge_sinks(out, lse, call.sinks)


def _paged_attention(call: MixedCall, *, core_aten: bool) -> State:
    check_mixed(call)
    tokens, padding = as_decode(call)
    return of_tokens(_decode_attention(tokens, core_aten=core_aten), padding)


def _merge_states(out: Tensor, lse: Tensor, *, batch_invariant: bool = False) -> State:
    if batch_invariant:
        raise NotImplementedError("`batch_invariant` must be False where merge_states is decomposed, got True")
    return merge(out, lse)


def _index_scores(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    scale: float = 1.0,
    attn_mask: Tensor | None = None,
    key_scale: Tensor | None = None,
) -> Tensor:
    check_index_scores(query, key, weights, attn_mask, key_scale)
    return scores_of_keys(query, key, weights, scale, attn_mask, key_scale)


def _row_groups(rows: Tensor, kv_batch: int, queries: int) -> Tensor:
    return row_groups_reference(rows, kv_batch, group_size(rows.shape[0], kv_batch, queries))
