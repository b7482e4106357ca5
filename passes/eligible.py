"""Eligibility of SDPA calls: the calls that tatten's ops can compute, whatever their keys are made of."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import SymInt, Tensor
from torch.fx import Node

from tatten.ops.validation import FLOAT_DTYPES, widest_on_cuda
from tatten.passes.autocast import autocast_unknown, sets_autocast
from tatten.passes.reasons import Decline, Reason
from tatten.passes.sdpa import SdpaCall
from tatten.passes.symbolic import (
    FakeTensor,
    constant,
    known_at_most,
    known_different,
    known_equal,
    may_be_0_or_1,
    tensor_of,
    value_of,
)

DEFAULT_MAX_Q_LEN = 16


def check_transformed(nodes: Iterable[object]) -> Decline | None:
    """Return the reason to leave attention alone if a transform of `torch.func` wraps one of its tensors, else None.

    A wrapped tensor is valid only inside its transform, which Dynamo has left when the passes run.
    """
    for node in nodes:
        if type(tensor_of(node)) is Tensor:  # tensors of a graph are otherwise fake or DTensors
            return Decline(Reason.TORCH_FUNC, f"`{node}` is no fake tensor, as inside vmap, grad, jvp and the like")
    return None


def check_plain(call: SdpaCall) -> Decline | None:
    """Return the reason to leave a call alone if one of its tensors is a DTensor or another subclass, else None."""
    for name in ("query", "key", "value", "attn_mask"):
        tensor = tensor_of(getattr(call, name))
        placements = getattr(tensor, "placements", None)
        if placements is not None:
            return Decline(Reason.PLACEMENT, f"{name} is a DTensor placed as {tuple(placements)}")
        if tensor is not None and not isinstance(tensor, FakeTensor):
            return Decline(Reason.ARGUMENTS, f"{name} is a {type(tensor).__name__}, not a plain tensor")
    return None


def check_call(call: SdpaCall, max_q_len: int) -> Decline | None:
    """Return the reason to leave a call alone, or None if it may be rewritten. Adds no guards."""
    query, key, value = (tensor_of(x) for x in (call.query, call.key, call.value))
    result = tensor_of(call.result)
    if query is None or key is None or value is None or result is None:
        return Decline(Reason.ARGUMENTS, "query, key or value is not a tensor of the graph")
    if unknown := autocast_unknown(call.node.graph):
        return Decline(Reason.ARGUMENTS, unknown)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            return Decline(Reason.RANK, f"{name} has {tensor.dim()} dims")
    return (
        _check_flags(call, query, key, value, result, max_q_len)
        or check_mask(call, query, key)
        or _check_sinks(call, query)
        or _check_shapes(call, query, key, value)
    )


def check_q_len(q_len: int | SymInt, max_q_len: int) -> Decline | None:
    """Return the reason to leave a call with `q_len` queries alone, or None if they are known to be few enough."""
    fixed = constant(q_len)
    if fixed is None and not (known_at_most(1, q_len) and known_at_most(q_len, max_q_len)):
        return Decline(Reason.Q_LEN_DYNAMIC, f"q_length is {q_len}, not known to be between 1 and {max_q_len}")
    if fixed is not None and fixed > max_q_len:
        return Decline(Reason.Q_LEN, f"q_length is {q_len}, max_q_len is {max_q_len}")
    return None


def _check_flags(
    call: SdpaCall, query: Tensor, key: Tensor, value: Tensor, result: Tensor, max_q_len: int
) -> Decline | None:
    q_len = query.shape[2]
    unbounded = check_q_len(q_len, max_q_len)
    if unbounded is not None:
        return unbounded
    if result.requires_grad:
        return Decline(Reason.REQUIRES_GRAD, "the result requires grad")
    if not isinstance(call.dropout_p, int | float) or call.dropout_p != 0:
        return Decline(Reason.DROPOUT, f"dropout_p is {call.dropout_p}")
    if any(
        constant(x.shape[dim]) == 0 for x, dims in ((query, (0, 1, 2, 3)), (key, (1,)), (value, (3,))) for dim in dims
    ):
        return Decline(Reason.EMPTY, f"query is {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}")
    for name in ("is_causal", "enable_gqa"):
        if not isinstance(getattr(call, name), bool):
            return Decline(Reason.ARGUMENTS, f"{name} is {getattr(call, name)}, not a literal")
    if call.is_causal and not (known_equal(q_len, 1) and known_equal(key.shape[2], 1)):
        lengths = f"is_causal is True, q_length {q_len}, kv_length {key.shape[2]}"
        prefill = ": a prefill" if known_equal(key.shape[2], q_len) else ""
        return Decline(Reason.IS_CAUSAL, f"{lengths}{prefill}")
    if not (call.scale is None or isinstance(call.scale, int | float) or _is_symbolic_float(call.scale)):
        return Decline(Reason.SCALE, f"scale is {call.scale}")

    dtypes = [tensor.dtype for tensor in (query, key, value, result)]  # the result differs under autocast
    if len(set(dtypes)) != 1 or query.dtype not in FLOAT_DTYPES:
        return Decline(Reason.DTYPE, "query, key, value and result are " + ", ".join(str(d) for d in dtypes))
    if len({query.device, key.device, value.device}) != 1 or query.device.type not in ("cpu", "cuda"):
        return Decline(Reason.DEVICE, f"query, key and value are on {query.device}, {key.device}, {value.device}")
    if query.device.type == "cuda" and query.dtype == torch.float64:
        return Decline(Reason.DTYPE, "no CUDA kernel for float64")
    return None


def _is_symbolic_float(scale: object) -> bool:
    """Return True if a scale is a node, as a float attribute of a module under `dynamic=True` is."""
    return isinstance(scale, Node) and isinstance(value_of(scale), int | float | torch.SymFloat | torch.SymInt)


def check_mask(call: SdpaCall, query: Tensor, key: Tensor) -> Decline | None:
    """Return the reason why an op doesn't take the mask of a call with this query and key, or None."""
    if call.attn_mask is None:
        return None
    mask = tensor_of(call.attn_mask)
    if mask is None:
        return Decline(Reason.ARGUMENTS, "attn_mask is not a tensor of the graph")
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        return Decline(Reason.MASK_DTYPE, f"attn_mask is {mask.dtype}, query {query.dtype}")
    if mask.dtype != torch.bool and sets_autocast(call.node.graph):
        return Decline(Reason.MASK_DTYPE, f"attn_mask is {mask.dtype}, and autocast is set without a context manager")
    if mask.device != query.device:
        return Decline(Reason.DEVICE, f"attn_mask is on {mask.device}, query on {query.device}")
    scores = (*query.shape[:3], key.shape[2])
    fits = mask.dim() <= 4 and not any(
        known_different(size, 1) and known_different(size, expected)
        for size, expected in zip(reversed(mask.shape), reversed(scores), strict=False)
    )
    if not fits:
        return Decline(Reason.MASK_SHAPE, f"attn_mask is {list(mask.shape)}, scores {list(scores)}")
    # The op checks other sizes when it runs, as SDPA does.
    unknown = next((x for x in (*mask.shape, *scores) if may_be_0_or_1(x)), None)
    return None if unknown is None else Decline(Reason.UNBACKED, f"attn_mask or scores have a size {unknown}")


def _check_sinks(call: SdpaCall, query: Tensor) -> Decline | None:
    sinks = tensor_of(call.sinks)
    if sinks is None:
        return None
    if sinks.dtype not in (torch.float32, query.dtype):
        return Decline(Reason.DTYPE, f"sinks are {sinks.dtype}, query {query.dtype}")
    return None if sinks.device == query.device else Decline(Reason.DEVICE, f"sinks are on {sinks.device}")


def _check_shapes(call: SdpaCall, query: Tensor, key: Tensor, value: Tensor) -> Decline | None:
    if not known_equal(query.shape[3], key.shape[3]):
        return Decline(Reason.HEAD_DIM, f"query has head_dim {query.shape[3]}, key {key.shape[3]}")
    widths = [constant(x.shape[3]) for x in (query, value)]
    most = widest_on_cuda(query.dtype)
    if query.device.type == "cuda" and any(width is None or width > most for width in widths):
        shown = ", ".join(str(x.shape[3]) for x in (query, value))
        return Decline(Reason.HEAD_DIM, f"head_dim is {shown}; the CUDA kernel takes constants up to {most}")
    if known_different(key.shape[2], value.shape[2]):
        return Decline(Reason.KV_LENGTH, f"key has length {key.shape[2]}, value {value.shape[2]}")

    q_heads, kv_heads = query.shape[1], key.shape[1]
    one_to_one, broadcasts = known_equal(q_heads, kv_heads), known_equal(kv_heads, 1)
    divisible = one_to_one or broadcasts or (call.enable_gqa and not known_different(q_heads % kv_heads, 0))
    if not divisible or not known_equal(value.shape[1], kv_heads):
        heads = f"query, key, value have {q_heads}, {kv_heads}, {value.shape[1]} heads"
        return Decline(Reason.HEADS, f"{heads}, enable_gqa is {call.enable_gqa}")
    return None
