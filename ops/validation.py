"""Checks of the ops' inputs. Each message names the argument, the expected and the actual value."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from tatten.ops.call import AttentionCall, KeyValue
from tatten.ops.pages import heads_first
from tatten.ops.pages_validation import check_pages
from tatten.ops.sizes import ceil_div

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PROVIDERS = ("auto", "cpu", "triton", "cudnn", "flash", "fa2", "fa3", "fa4")
NARROW_DTYPES = (torch.float8_e4m3fn, torch.int8)  # for keys and values, which are upcast as they are read
BLOCK_KEYS = 64  # keys in a block of a `BlockList`: one bit each in an int64


def widest_on_cuda(dtype: torch.dtype) -> int:
    """Return the largest head_dim of the CUDA kernel: a block of 64 keys and values has to fit in shared memory."""
    return 256 if dtype == torch.float32 else 512


def check_tensors(**arguments: object) -> None:
    """Raise TypeError unless all arguments are plain tensors; the dispatcher's own error does not name them."""
    for name, argument in arguments.items():
        if not isinstance(argument, Tensor):
            raise TypeError(f"`{name}` must be a Tensor, got {type(argument).__name__}")
        if type(argument) is not Tensor and hasattr(argument, "placements"):
            raise TypeError(
                f"`{name}` must be a plain Tensor, got a {type(argument).__name__}: "
                "pass `to_local()` of each, and merge the states of ranks by `tatten.tree_merge`"
            )


def check_no_grad(op: str, **tensors: Tensor | None) -> None:
    """Raise NotImplementedError if autograd would have to differentiate `op`.

    Public functions call it, too. Inside `torch.func.grad` and `jvp`, an op gets tensors that don't show a gradient.
    """
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.requires_grad:
            raise NotImplementedError(
                f"tatten.{op} has no backward: `{name}` must not require grad, got requires_grad=True; "
                "call it under torch.no_grad() or pass a detached tensor"
            )
        # A fake tensor inside an op does not show its tangent: to ask for it raises an error.
        if type(tensor) in (Tensor, Parameter) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"tatten.{op} has no forward-mode derivative: `{name}` must have no tangent, got one"
            )


def check_call_no_grad(call: AttentionCall) -> None:
    """Apply `check_no_grad` to the tensors of a call."""
    if torch.is_grad_enabled():
        check_no_grad(call.op, **call.tensors)


def check_provider(provider: str, device: torch.device) -> None:
    """Raise ValueError unless `provider` exists on the type of `device`: a named provider never falls back."""
    if provider == "auto":
        return
    on_cpu = device.type == "cpu"
    supported = [name for name in PROVIDERS if name == "auto" or (name == "cpu") == on_cpu]
    if provider not in supported:
        raise ValueError(
            f"`provider` must be one of {', '.join(supported)} on a {device.type} device, got {provider!r}"
        )


def check_batch_invariant(call: AttentionCall) -> None:
    """Raise unless the provider can compute each sequence as if it were alone."""
    ours = "cpu" if call.query.device.type == "cpu" else "triton"
    if call.provider not in ("auto", ours):
        raise ValueError(f"`provider` must be 'auto' or '{ours}' with `batch_invariant`, got {call.provider!r}")
    if ours == "cpu" and call.softcap is not None:
        raise NotImplementedError(
            f"`softcap` must be None with `batch_invariant` on a CPU, got {call.softcap}: "
            "it takes matrix products whose sums depend on the batch and the threads"
        )


def check_decode_attention(call: AttentionCall) -> None:
    """Raise ValueError, TypeError or NotImplementedError unless the inputs fit `tatten::decode_attention`.

    It reads no data, so that no device is synchronised, unlike `check_kv_lens`. `check_devices` checks the devices.
    """
    query, stored, (key, value, *_) = call.query, call.segments[0], call.segments[0]
    check_call_no_grad(call)
    check_query(query)
    batch, head_dim = query.shape[0], query.shape[3]
    if stored.block_table is not None:
        check_pages(call)
    elif key.dim() == 4 and key.shape[0] != batch:
        raise ValueError(f"`key` must be [{batch}, kv_heads, kv_length, {head_dim}], got shape {tuple(key.shape)}")
    check_key_value(query, key, value, "key", "value", (query.dtype, *NARROW_DTYPES))
    for name in ("key_scale", "value_scale"):
        factors = getattr(stored, name)
        if factors is not None:
            _check_kv_scale(factors, query, stored, name)
    check_softmax(call, query.dtype)
    check_block_masks(call)


def check_softmax(call: AttentionCall, dtype: torch.dtype) -> None:
    """Raise unless mask, lengths, window, soft cap and sinks fit queries over the keys of one segment.

    `dtype`: the dtype that masks and sinks may have besides float32.
    """
    query, stored = call.query, call.segments[0]
    if stored.attn_mask is not None:
        check_mask(stored.attn_mask, dtype, (*query.shape[:3], stored.kv_len))
    if (kv_lens := stored.kv_lens) is not None:
        if kv_lens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"`kv_lens` must be int32 or int64, got {kv_lens.dtype}")
        if tuple(kv_lens.shape) != (query.shape[0],):
            raise ValueError(f"`kv_lens` must have shape ({query.shape[0]},), got {tuple(kv_lens.shape)}")
    check_variant(call, dtype)


def check_variant(call: AttentionCall, dtype: torch.dtype) -> None:
    """Raise unless window, soft cap and sinks, which may be in `dtype`, fit the queries."""
    heads, window, softcap, sinks = call.query.shape[1], call.window, call.softcap, call.sinks
    if window is not None and window < 1:
        raise ValueError(f"`window` must be at least 1, got {window}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"`softcap` must be finite and above 0, got {softcap}")
    if sinks is not None:
        if sinks.dtype not in (torch.float32, dtype):
            raise TypeError(f"`sinks` must be {_float32_or(dtype)}, got {sinks.dtype}")
        if tuple(sinks.shape) != (heads,):
            raise ValueError(f"`sinks` must have shape ({heads},), one per query head, got {tuple(sinks.shape)}")


def check_query(query: Tensor) -> None:
    if query.dtype not in FLOAT_DTYPES:
        raise TypeError(f"`query` must be float16, bfloat16, float32 or float64, got {query.dtype}")
    if query.dim() != 4:
        raise ValueError(f"`query` must be [batch, heads, length, head_dim], got shape {tuple(query.shape)}")
    if 0 in query.shape:
        raise ValueError(f"`query` must have no dimension of size 0, got shape {tuple(query.shape)}")


def check_key_value(
    query: Tensor, key: Tensor, value: Tensor, key_name: str, value_name: str, dtypes: tuple[torch.dtype, ...] = ()
) -> None:
    """Raise unless key and value fit each other and, except in batch, the query. Default of `dtypes`: the query's."""
    dtypes, q, k, v = dtypes or (query.dtype,), query.shape, key.shape, value.shape
    if key.dtype not in dtypes:
        wanted = dtype_of_query_or(dtypes[0], *dtypes[1:])
        raise TypeError(f"`{key_name}` must be {wanted}, got {key.dtype}")
    if value.dtype != key.dtype:
        raise TypeError(f"`{value_name}` must have the dtype of `{key_name}`, {key.dtype}, got {value.dtype}")
    if len(k) != 4 or len(v) != 4:
        name, shape = (key_name, k) if len(k) != 4 else (value_name, v)
        raise ValueError(f"`{name}` must be [batch, heads, length, head_dim], got shape {tuple(shape)}")
    batch, kv_heads, kv_len = k[:3]
    if k[3] != q[3]:
        raise ValueError(f"`{key_name}` must be [batch, kv_heads, kv_length, {q[3]}], got shape {tuple(k)}")
    if v[:3] != k[:3] or v[3] == 0:
        like = f"[{batch}, {kv_heads}, {kv_len}, head_dim] like `{key_name}`"
        raise ValueError(f"`{value_name}` must be {like}, got shape {tuple(v)}")
    check_kv_heads(query, key, key_name)


def check_kv_heads(query: Tensor, key: Tensor, name: str) -> None:
    q_heads, kv_heads = query.shape[1], key.shape[1]
    if kv_heads == 0 or q_heads % kv_heads:
        raise ValueError(f"`{name}` must have a number of heads that divides `query`'s {q_heads}, got {kv_heads}")


def _check_kv_scale(scale: Tensor, query: Tensor, stored: KeyValue, name: str) -> None:
    key = stored.key
    per_key, shape = key.shape[:3], scale.shape
    if stored.block_table is not None:
        per_key, shape = heads_first(key).shape[:3], heads_first(scale).shape
    if key.dtype not in NARROW_DTYPES:
        narrow = "float8_e4m3fn or int8"
        raise TypeError(f"`{name}` must be None unless `key` and `value` are {narrow}, got `key` in {key.dtype}")
    if scale.dtype not in (torch.float32, query.dtype):
        raise TypeError(f"`{name}` must be {_float32_or(query.dtype)}, got {scale.dtype}")
    if shape not in ((key.shape[1],), per_key):
        raise ValueError(
            f"`{name}` must have shape ({key.shape[1]},), one per kv head, or {tuple(per_key)}, one per key, "
            f"got {tuple(shape)}"
        )


def dtype_of_query_or(dtype: torch.dtype, *others: torch.dtype) -> str:
    """Return the text of an error that names the dtype of a query and the other dtypes that are allowed."""
    return " or ".join([f"{dtype} (the dtype of `query`)", *map(str, others)])


def _float32_or(dtype: torch.dtype) -> str:
    return " or ".join(dict.fromkeys(("torch.float32", str(dtype))))


def check_block_masks(call: AttentionCall) -> None:
    """Raise ValueError unless each block mask can be the result of `tatten::block_mask` on the call's device."""
    for i, stored in enumerate(call.segments):
        block_mask, rows, kv_len = stored.block_mask, stored.kv_batch, stored.kv_len
        if block_mask is None:
            continue
        shape = (3,) if call.query.device.type == "cpu" else (ceil_div(kv_len, BLOCK_KEYS) + 1, 2)
        if block_mask.dtype != torch.int64 or block_mask.shape not in ((1, *shape), (rows, *shape)):
            wanted, name = f"int64 of shape {(1, *shape)} or {(rows, *shape)}", call.name_of("block_mask", i)
            raise ValueError(f"`{name}` must be {wanted}, got {block_mask.dtype} of shape {tuple(block_mask.shape)}")


def check_cuda_head_dims(query: Tensor, value: Tensor) -> None:
    """Raise NotImplementedError if head_dim is too large for the CUDA kernels' tiles."""
    have, most = max(query.shape[3], value.shape[3]), widest_on_cuda(query.dtype)
    if have > most and query.dtype != torch.float64:
        raise NotImplementedError(f"key and value must have head_dim <= {most} in {query.dtype} on CUDA, got {have}")


def check_devices(query: Tensor, **tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors are on one device. On a CPU the dispatcher checks this, but for `meta`."""
    for name, x in tensors.items():
        if x is not None and x.device != query.device:
            raise ValueError(f"`{name}` must be on the device of `query`, {query.device}, got {x.device}")


def check_mask(
    attn_mask: Tensor, dtype: torch.dtype, scores: tuple[int, int, int, int], name: str = "attn_mask"
) -> None:
    """Raise unless `attn_mask` is a bool or additive mask that broadcasts to the shape `scores`."""
    if attn_mask.dtype not in (torch.bool, torch.float32, dtype):
        raise TypeError(f"`{name}` must be torch.bool or {_float32_or(dtype)}, got {attn_mask.dtype}")
    shape = (1,) * (4 - attn_mask.dim()) + attn_mask.shape
    if len(shape) != 4 or (shape != scores and any(n not in (1, want) for n, want in zip(shape, scores, strict=True))):
        raise ValueError(
            f"`{name}` must broadcast to [batch, q_heads, q_length, kv_length] = "
            f"{list(scores)}, got shape {tuple(attn_mask.shape)}"
        )


def check_mask_alone(attn_mask: Tensor, kv_batch: int | None, rows: Tensor | None) -> None:
    """Raise unless `attn_mask` is a mask over a KV with the batch `kv_batch`."""
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in FLOAT_DTYPES:
        raise TypeError(f"`attn_mask` must be bool, float16, bfloat16, float32 or float64, got {attn_mask.dtype}")
    if not 1 <= attn_mask.dim() <= 4:
        wanted = "[batch, q_heads, q_length, kv_length]"
        raise ValueError(f"`attn_mask` must broadcast to {wanted}, got shape {tuple(attn_mask.shape)}")
    batch = attn_mask.shape[0] if attn_mask.dim() == 4 else 1
    if not isinstance(kv_batch, int | torch.SymInt | None):
        raise TypeError(f"`kv_batch` must be an int, got {type(kv_batch).__name__}")
    if rows is not None:
        check_tensors(rows=rows)
        check_rows(rows)
        if kv_batch is None or kv_batch < 1:
            raise ValueError(f"`kv_batch` must be given with `rows`, at least 1, got {kv_batch}")
        if batch not in (1, kv_batch, rows.shape[0]):
            wanted = f"1, {kv_batch} as `kv_batch`, or {rows.shape[0]} as `rows`"
            raise ValueError(f"`attn_mask` must have a batch of {wanted}, got {batch}")
        if rows.device != attn_mask.device:
            raise ValueError(f"`rows` must be on the device of `attn_mask`, {attn_mask.device}, got {rows.device}")
    elif kv_batch is not None and (kv_batch < 1 or (batch != 1 and batch % kv_batch)):
        wanted = "positive" if batch == 1 else f"a divisor of `attn_mask`'s batch {batch}"
        raise ValueError(f"`kv_batch` must be {wanted}, got {kv_batch}")


def check_kv_lens(call: AttentionCall) -> list[int] | None:
    """Return the lengths as a list; raise ValueError unless each lies in [0, kv_length]. Reads the tensor: CPU only."""
    stored = call.segments[0]
    if stored.kv_lens is None:
        return None
    lens, kv_len, table = stored.kv_lens.tolist(), stored.kv_len, stored.block_table
    for n in lens:
        if not 0 <= n <= kv_len:
            most = f"`{call.name_of('key')}`'s length {kv_len}"
            if table is not None:
                most = (
                    f"{kv_len}, which is {stored.key.shape[2]} keys for each of `block_table`'s {table.shape[1]} pages"
                )
            raise ValueError(f"`kv_lens` must lie between 0 and {most}, got {n}")
    return lens  # type: ignore[no-any-return]


def check_rows(rows: Tensor, batch: int | None = None, name: str = "rows") -> None:
    """Raise unless `rows` holds one row for each sequence. Their values are left to `check_row_values`."""
    if rows.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"`{name}` must be int32 or int64, got {rows.dtype}")
    if rows.dim() != 1 or rows.shape[0] == 0 or (batch is not None and rows.shape[0] != batch):
        wanted = "[batch]" if batch is None else f"[{batch}], the batch of `query`"
        raise ValueError(f"`{name}` must have shape {wanted}, got {tuple(rows.shape)}")


def check_row_values(rows: Tensor, kv_batch: int) -> None:
    """Raise ValueError unless each row lies in [0, kv_batch). Reads the tensor: CPU only."""
    low, high = rows.min().item(), rows.max().item()
    if low < 0 or high >= kv_batch:
        raise ValueError(
            f"`rows` must lie between 0 and {kv_batch - 1}, as {kv_batch} rows are stored, got {low} to {high}"
        )


def check_row_groups(row_groups: Tensor, batch: int, name: str) -> None:
    """Raise ValueError unless `row_groups` can be the result of `tatten::row_groups` for `batch` sequences."""
    if row_groups.dtype != torch.int32 or row_groups.shape != (4, batch + 1):
        wanted = f"int32 of shape {(4, batch + 1)}"
        raise ValueError(f"`{name}` must be {wanted}, got {row_groups.dtype} of shape {tuple(row_groups.shape)}")
