"""The ops `torch.ops.tatten.*`: schemas, shape functions, and the implementation for each device.

All schemas but that of `slide_` are functional: no op mutates its inputs. Modules that need Triton are imported when
they first run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tatten.ops.call import AttentionCall
from tatten.ops.cpu import attention as cpu
from tatten.ops.cpu.bifurcated import bifurcated_attention as bifurcated_on_cpu
from tatten.ops.cpu.index_scores import index_scores as index_scores_on_cpu
from tatten.ops.cpu.latent import latent_attention as latent_on_cpu
from tatten.ops.cpu.mixed import paged_attention as paged_on_cpu
from tatten.ops.cpu.rows import row_groups as row_groups_on_cpu
from tatten.ops.cpu.shared_pages import shared_pages as shared_pages_on_cpu
from tatten.ops.cuda import dispatch as cuda
from tatten.ops.cuda.fused_linear import fused_linear as fused_linear_on_cuda
from tatten.ops.cuda.index_scores import index_scores as index_scores_on_cuda
from tatten.ops.cuda.mixed import paged_attention as paged_on_cuda
from tatten.ops.cuda.project_heads import project_heads as project_heads_on_cuda
from tatten.ops.cuda.skinny_linear import skinny_linear as skinny_linear_on_cuda
from tatten.ops.cuda.top_picks import top_picks as top_picks_on_cuda
from tatten.ops.distributed.collectives import group_of
from tatten.ops.distributed.tree_merge import tree_merge_op
from tatten.ops.fused_linear import fake_fused_linear, fused_linear
from tatten.ops.index_scores_validation import fake_index_scores
from tatten.ops.kernel_signatures import OpKernel, bifurcated_kernel, decode_kernel, latent_kernel
from tatten.ops.masks import block_list, key_spans, mask_of_rows, mask_rows
from tatten.ops.mixed_batch import fake_mixed, mixed_kernel
from tatten.ops.page_runs import LEVELS, ROWS
from tatten.ops.pages_validation import check_table_alone
from tatten.ops.project_heads import fake_project_heads, project_heads
from tatten.ops.sizes import ceil_div
from tatten.ops.skinny_linear import fake_skinny_linear, skinny_linear
from tatten.ops.slide import check_slide, slide_
from tatten.ops.state_validation import check_stack
from tatten.ops.states import State, accumulator_dtype
from tatten.ops.top_picks import fake_top_picks, top_picks
from tatten.ops.validation import BLOCK_KEYS, check_call_no_grad, check_devices

_library = torch.library.Library("tatten", "DEF")

for _schema in (
    "decode_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, Tensor? kv_lens=None, "
    "float? scale=None, Tensor? block_mask=None, *, int? window=None, float? softcap=None, Tensor? sinks=None, "
    'Tensor? key_scale=None, Tensor? value_scale=None, str provider="auto", bool batch_invariant=False, '
    "Tensor? indices=None, int index_block=1, float? rest_bias=None, Tensor? block_table=None, "
    "Tensor? shared_pages=None) -> (Tensor out, Tensor lse)",
    "latent_attention(Tensor query, Tensor? query_rope, Tensor latent, Tensor? key_rope, Tensor? attn_mask=None, "
    "Tensor? kv_lens=None, *, float scale, Tensor? block_mask=None, int? window=None, float? softcap=None, "
    "Tensor? sinks=None, ScalarType? out_dtype=None, bool batch_invariant=False, Tensor? indices=None, "
    "int index_block=1, float? rest_bias=None, Tensor? block_table=None) -> (Tensor out, Tensor lse)",
    "bifurcated_attention(Tensor query, Tensor[] keys, Tensor[] values, Tensor?[] attn_masks, Tensor?[] block_masks, "
    "float? scale=None, Tensor?[]? row_groups=None, *, int? window=None, float? softcap=None, Tensor? sinks=None, "
    "bool batch_invariant=False, Tensor?[]? indices=None, int index_block=1) -> (Tensor out, Tensor lse)",
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor block_table, Tensor cu_seqlens_q, Tensor kv_lens, "
    "*, float? scale=None, int? window=None, float? softcap=None, Tensor? sinks=None, Tensor? key_scale=None, "
    "Tensor? value_scale=None, bool batch_invariant=False, Tensor? shared_pages=None) -> (Tensor out, Tensor lse)",
    "row_groups(Tensor rows, SymInt kv_batch, SymInt queries) -> Tensor",
    "block_mask(Tensor attn_mask, SymInt? kv_batch=None, Tensor? rows=None, bool every_block=False) -> Tensor",
    "block_list(Tensor attn_mask, SymInt kv_batch, bool every_block=False) -> Tensor",
    "shared_pages(Tensor block_table, Tensor kv_lens, SymInt n_pages, SymInt page_size, SymInt q_length=1) -> Tensor",
    "merge_states(Tensor out, Tensor lse, *, bool batch_invariant=False) -> (Tensor out, Tensor lse)",
    "tree_merge(Tensor out, Tensor lse, str group, int n, int rank, str strategy, bool scatter_heads=False, "
    "bool batch_invariant=False) -> (Tensor out, Tensor lse)",
    "push_merge(Tensor out, Tensor lse, str group, bool scatter_heads) -> (Tensor out, Tensor lse)",
    "index_scores(Tensor query, Tensor key, Tensor weights, *, float scale=1.0, Tensor? attn_mask=None, "
    "Tensor? key_scale=None) -> Tensor",
    "project_heads(Tensor x, Tensor weight, ScalarType? out_dtype=None) -> Tensor",
    "skinny_linear(Tensor x, Tensor[] weights, int parts=1, ScalarType? out_dtype=None) -> Tensor[]",
    "fused_linear(Tensor x, Tensor[] weights, *, Tensor? norm_weight=None, float eps=0.0, str? gate=None, "
    "Tensor? residual=None, bool prefetch=False) -> Tensor[]",
    "top_picks(Tensor scores, int k) -> Tensor",
    "slide_(Tensor(a!) cache, Tensor new) -> ()",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _fake_attention(call: AttentionCall) -> State:
    check_call_no_grad(call)
    check_devices(**call.tensors)  # one tensor on `meta` is enough for a call to come here
    query, shape = call.query, call.query.shape[:3]
    out = query.new_empty((*shape, call.segments[0].value.shape[3]), dtype=call.out_dtype)
    return out, query.new_empty(shape, dtype=accumulator_dtype(query.dtype))


torch.library.register_fake("tatten::decode_attention", decode_kernel(_fake_attention), lib=_library)
torch.library.register_fake("tatten::latent_attention", latent_kernel(_fake_attention), lib=_library)
torch.library.register_fake("tatten::bifurcated_attention", bifurcated_kernel(_fake_attention), lib=_library)
torch.library.register_fake("tatten::paged_attention", mixed_kernel(fake_mixed), lib=_library)
torch.library.register_fake("tatten::index_scores", fake_index_scores, lib=_library)
torch.library.register_fake("tatten::project_heads", fake_project_heads, lib=_library)
torch.library.register_fake("tatten::skinny_linear", fake_skinny_linear, lib=_library)
torch.library.register_fake("tatten::fused_linear", fake_fused_linear, lib=_library)
torch.library.register_fake("tatten::top_picks", fake_top_picks, lib=_library)
torch.library.register_fake("tatten::slide_", check_slide, lib=_library)


@torch.library.register_fake("tatten::row_groups", lib=_library)
def _(rows: Tensor, kv_batch: int, queries: int) -> Tensor:
    return rows.new_empty((4, rows.shape[0] + 1), dtype=torch.int32)


@torch.library.register_fake("tatten::shared_pages", lib=_library)
def _(block_table: Tensor, kv_lens: Tensor, n_pages: int, page_size: int, q_length: int = 1) -> Tensor:
    check_table_alone(block_table, kv_lens, n_pages, page_size, q_length)
    return block_table.new_empty((ROWS, LEVELS * block_table.shape[0] + 1))


@torch.library.register_fake("tatten::block_list", lib=_library)
def _(attn_mask: Tensor, kv_batch: int, every_block: bool = False) -> Tensor:
    n_blocks = ceil_div(attn_mask.shape[-1], BLOCK_KEYS)
    return attn_mask.new_empty((mask_rows(attn_mask, kv_batch), n_blocks + 1, 2), dtype=torch.int64)


@torch.library.register_fake("tatten::merge_states", lib=_library)
def _(out: Tensor, lse: Tensor, *, batch_invariant: bool = False) -> State:
    check_stack(out, lse)
    return out.new_empty(out.shape[1:]), lse.new_empty(lse.shape[1:])


@torch.library.register_fake("tatten::push_merge", lib=_library)
def _(out: Tensor, lse: Tensor, group: str, scatter_heads: bool) -> State:
    if not scatter_heads:
        return out.new_empty(out.shape), lse.new_empty(lse.shape)
    heads = out.shape[1] // group_of(group).size()
    batch, _, *rest = out.shape
    return out.new_empty((batch, heads, *rest)), lse.new_empty((batch, heads, *rest[:-1]))


def _push_merge(out: Tensor, lse: Tensor, group: str, scatter_heads: bool) -> State:
    from tatten.ops.distributed.push import push_merge

    return push_merge(out, lse, group, scatter_heads)


def block_mask(
    attn_mask: Tensor, kv_batch: int | None = None, rows: Tensor | None = None, every_block: bool = False
) -> Tensor:
    """Find the `data` of a `BlockMask`: in plain PyTorch on a CPU, which Inductor fuses; by one opaque op on CUDA."""
    if rows is not None and kv_batch is not None and attn_mask.dim() == 4 and 1 != attn_mask.shape[0] == rows.shape[0]:
        attn_mask = mask_of_rows(attn_mask, kv_batch, rows)
    if attn_mask.device.type == "cpu":
        return key_spans(attn_mask, kv_batch)
    data: Tensor = torch.ops.tatten.block_list.default(attn_mask, mask_rows(attn_mask, kv_batch), every_block)
    return data


_library.impl("block_mask", block_mask, "CompositeImplicitAutograd")
_library.impl("tree_merge", tree_merge_op, "CompositeImplicitAutograd")
_library.impl("row_groups", row_groups_on_cpu, "CPU")
_library.impl("row_groups", cuda.row_groups, "CUDA")
_library.impl("shared_pages", shared_pages_on_cpu, "CPU")
_library.impl("shared_pages", cuda.shared_pages, "CUDA")
_library.impl("block_list", block_list, "CPU")
_library.impl("block_list", cuda.block_list, "CUDA")
_KERNELS: dict[str, dict[str, OpKernel]] = {
    "decode_attention": {"CPU": decode_kernel(cpu.decode_attention), "CUDA": decode_kernel(cuda.attention)},
    "latent_attention": {"CPU": latent_kernel(latent_on_cpu), "CUDA": latent_kernel(cuda.attention)},
    "bifurcated_attention": {"CPU": bifurcated_kernel(bifurcated_on_cpu), "CUDA": bifurcated_kernel(cuda.attention)},
    "paged_attention": {"CPU": mixed_kernel(paged_on_cpu), "CUDA": mixed_kernel(paged_on_cuda)},
    "merge_states": {"CPU": cpu.merge_states, "CUDA": cuda.merge_states},
    "push_merge": {"CUDA": _push_merge},
    "index_scores": {"CPU": index_scores_on_cpu, "CUDA": index_scores_on_cuda},
    "project_heads": {"CPU": project_heads, "CUDA": project_heads_on_cuda},
    "skinny_linear": {"CPU": skinny_linear, "CUDA": skinny_linear_on_cuda},
    "fused_linear": {"CPU": fused_linear, "CUDA": fused_linear_on_cuda},
    "top_picks": {"CPU": top_picks, "CUDA": top_picks_on_cuda},
    "slide_": {"CPU": slide_, "CUDA": slide_},
}


def cuda_implementations() -> dict[Any, OpKernel]:
    """Return the ops that launch kernels on a GPU without waiting for other GPUs, with their implementations."""
    kernels: dict[str, OpKernel] = {
        "row_groups": cuda.row_groups,
        "block_list": cuda.block_list,
        "shared_pages": cuda.shared_pages,
    }
    attention = "decode_attention", "latent_attention", "bifurcated_attention", "paged_attention"
    others = "merge_states", "index_scores", "project_heads", "skinny_linear", "fused_linear", "top_picks"
    kernels |= {name: _KERNELS[name]["CUDA"] for name in (*attention, *others)}
    return {getattr(torch.ops.tatten, name).default: kernel for name, kernel in kernels.items()}


def _without_autocast(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Return `implementation`, run with autocast off: autocast would round values that are summed in float32."""

    @functools.wraps(implementation)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return implementation(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return implementation(*args, **kwargs)

    return run


for _name, _kernels in _KERNELS.items():
    for _device, _kernel in _kernels.items():
        _library.impl(_name, _without_autocast(_kernel) if _device == "CPU" else _kernel, _device)
    # Implementations raise if gradients are required. PyTorch's own fallback aliases each output first (10 us, cold).
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
