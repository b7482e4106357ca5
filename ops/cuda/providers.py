"""Providers of plain decode attention on CUDA: calls of cuDNN and PyTorch's flash attention, and the choice.

The choice needs sizes and dtypes only, so the op and the report make it with the same function.
"""

from __future__ import annotations

import torch

from tatten.ops.call import AttentionCall
from tatten.ops.cuda.flash_attn import PACKAGES, package_unsupported_reason
from tatten.ops.cuda.gpu import capability, device_name, has_float8
from tatten.ops.cuda.tuning import Tuning, tuning_of
from tatten.ops.cuda.workload import NARROW, Workload
from tatten.ops.layout import pack_gqa
from tatten.ops.states import State


def choose_provider(work: Workload) -> str:
    """Return the provider for `provider="auto"`: the one measured to be fastest if it supports the call, else Triton.

    `"reference"` is plain PyTorch in float64. It is for checking models and has no kernel of its own.
    """
    if work.dtype == torch.float64:
        return "reference"
    provider = _fastest(work) if _asks_table(work) else "triton"
    return "triton" if unsupported_reason(provider, work) else provider


def table_note(work: Workload) -> str:
    """Return a note on the choice if it was not made by a table of this GPU; else an empty string."""
    device, tuning = device_name(work.device), _tuning(work)
    if not _asks_table(work) or device == "":
        return ""
    if tuning is None:
        return f"no provider table for {device}, nor for another GPU of its architecture"
    return "" if device == tuning.device else f"provider table measured on {tuning.device}, borrowed for {device}"


def replaced_flash(work: Workload) -> str:
    """Return a note on the choice if the table's "flash" is no longer PyTorch's own kernel; else an empty string."""
    if not _asks_table(work) or work.flash_impl is None or _fastest(work) != "flash":
        return ""
    return f"not flash: torch.nn.attention has {work.flash_impl} in its place"


def _asks_table(work: Workload) -> bool:
    """Return True if providers other than Triton are considered: none was faster with more packed queries."""
    return _unsupported_by_sdpa(work, 256) is None and 0 < work.packed <= 16


def _fastest(work: Workload) -> str:
    tuning = _tuning(work)
    return "triton" if tuning is None else tuning.provider(work.pairs, work.key[2])


def _tuning(work: Workload) -> Tuning | None:
    return tuning_of(device_name(work.device), capability(work.device))


def unsupported_reason(provider: str, work: Workload) -> str | None:
    """Return the reason why `provider` can't compute this, or None."""
    if provider == "triton":
        if work.kv_dtype == torch.float8_e4m3fn and not has_float8(work.device):
            return "it takes float8 from compute capability 8.9 on"
        return "it takes no float64" if work.dtype == torch.float64 else None
    if provider in PACKAGES:
        return package_unsupported_reason(provider, work)
    if provider == "flash" and work.flash_impl is not None:
        return (
            f"torch.nn.attention.activate_flash_attention_impl({work.flash_impl!r}) put another kernel in the place of "
            "PyTorch's own, which torch.nn.attention.restore_flash_attention_impl() brings back"
        )
    if provider == "cudnn" and cudnn_decodes_wrong(work.device, work.query[2]):
        return (
            f"cuDNN {torch.backends.cudnn.version()} gives wrong results for one query on compute capability 10 and 11 "
            "(pytorch/pytorch#193893)"
        )
    return _unsupported_by_sdpa(work, 128 if provider == "cudnn" else 256)


def cudnn_decodes_wrong(device: torch.device, q_length: int) -> bool:
    """Return True if cuDNN's attention kernel for one query is among the versions that give wrong results.

    From PyTorch 2.15 on, SDPA refuses the same versions on the same GPUs (pytorch/pytorch#194927). An older PyTorch and
    a direct call of the kernel don't.
    """
    if q_length != 1 or capability(device)[0] not in (10, 11):
        return False
    version = torch.backends.cudnn.version() or 0
    return 91900 <= version <= 92500 and version != 92401


def _unsupported_by_sdpa(work: Workload, widest: int) -> str | None:
    """Return the reason why a kernel of SDPA, for head_dims up to `widest`, can't compute this, or None."""
    head_dim, value_dim = work.key[3], work.value_dim
    if work.needs:
        return f"it takes no {', '.join(work.needs)}"
    if work.kv_dtype != work.dtype:
        return f"it takes no {NARROW}"
    if work.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {work.dtype}"
    if head_dim != value_dim or head_dim > widest or head_dim % 8:
        return f"it takes one head_dim up to {widest} in eights, not {head_dim} and {value_dim}"
    if work.key[2] == 0 or not work.dense:
        return "it takes keys, at least one, that are dense in head_dim"
    return None


def cudnn_attention(call: AttentionCall) -> State:
    """Call cuDNN, which packs the query heads of a kv head itself if there is one query."""
    query, (stored,) = call.query, call.segments
    state = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
        query, stored.key, stored.value, None, True, 0.0, False, False, scale=call.score_scale
    )
    return state[0].contiguous(), state[1].reshape(query.shape[:3])


def flash_attention(call: AttentionCall) -> State:
    """Call PyTorch's FlashAttention-2, which splits the keys if heads are few."""
    query, (stored,) = call.query, call.segments
    packed = pack_gqa(query, stored.key.shape[1])
    state = torch.ops.aten._scaled_dot_product_flash_attention.default(
        packed, stored.key, stored.value, scale=call.score_scale
    )
    return state[0].reshape(query.shape), state[1].reshape(query.shape[:3])
