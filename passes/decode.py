"""The decode pass: `F.scaled_dot_product_attention` of a few queries becomes `tatten::decode_attention`.

`match_decode` only looks and returns what it found or why not; `apply_decode` changes the graph.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from tatten.ops.validate import FLOAT_DTYPES, MAX_CUDA_HEAD_DIM
from tatten.passes.heads import IDENTITY, Peeled, peel_heads
from tatten.passes.mutation import written_between
from tatten.passes.reasons import Decline, Reason
from tatten.passes.sdpa import SdpaCall
from tatten.passes.symbolic import (
    constant,
    hint,
    known_different,
    known_equal,
    known_shape,
    same_storage,
    tensor_of,
    value_of,
)

DEFAULT_MAX_Q_LEN = 16


@dataclass(frozen=True)
class DecodeMatch:
    """An SDPA call that `tatten::decode_attention` answers; key and value as they were before heads were repeated."""

    call: SdpaCall
    key: Peeled
    value: Peeled


def match_decode(call: SdpaCall, max_q_len: int = DEFAULT_MAX_Q_LEN) -> DecodeMatch | Decline:
    """Decide about one call. Adds no guards and changes nothing."""
    query, key, value = (tensor_of(x) for x in (call.query, call.key, call.value))
    result = tensor_of(call.node)
    if query is None or key is None or value is None or result is None:
        return Decline(Reason.ARGUMENTS, "query, key or value is not a tensor of the graph")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, FakeTensor):
            return Decline(Reason.ARGUMENTS, f"{name} is a {type(tensor).__name__}, not a plain tensor")
        if tensor.dim() != 4:
            return Decline(Reason.RANK, f"{name} has {tensor.dim()} dims")
    return (
        _check_flags(call, query, key, value, result, max_q_len)
        or _check_mask(call, query, key)
        or _match_heads(call, query, key, value)
    )


def _check_flags(
    call: SdpaCall, query: Tensor, key: Tensor, value: Tensor, result: Tensor, max_q_len: int
) -> Decline | None:
    q_len = constant(query.shape[2])
    if q_len is None:
        return Decline(Reason.Q_LEN_DYNAMIC, f"q_length is {query.shape[2]}")
    if not 1 <= q_len <= max_q_len:
        return Decline(Reason.Q_LEN, f"q_length is {q_len}, max_q_len is {max_q_len}")
    if result.requires_grad:
        return Decline(Reason.REQUIRES_GRAD, "gradients of the result are wanted")
    if not isinstance(call.dropout_p, int | float) or call.dropout_p != 0:
        return Decline(Reason.DROPOUT, f"dropout_p is {call.dropout_p}")
    if any(constant(x.shape[dim]) == 0 for x, dims in ((query, (0, 1, 3)), (key, (1,)), (value, (3,))) for dim in dims):
        return Decline(Reason.EMPTY, f"query is {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}")
    if call.is_causal is not False and not (call.is_causal is True and q_len == 1 and known_equal(key.shape[2], 1)):
        return Decline(Reason.IS_CAUSAL, f"is_causal is {call.is_causal}, q_length {q_len}, kv_length {key.shape[2]}")
    if not isinstance(call.enable_gqa, bool):
        return Decline(Reason.ARGUMENTS, f"enable_gqa is {call.enable_gqa}, not a literal")
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
    """Under dynamic=True a float attribute of a module reaches the graph as a node."""
    return isinstance(scale, Node) and isinstance(value_of(scale), int | float | torch.SymFloat | torch.SymInt)


def _check_mask(call: SdpaCall, query: Tensor, key: Tensor) -> Decline | None:
    if call.attn_mask is None:
        return None
    mask = tensor_of(call.attn_mask)
    if mask is None or not isinstance(mask, FakeTensor):
        return Decline(Reason.ARGUMENTS, "attn_mask is not a plain tensor of the graph")
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        return Decline(Reason.MASK_DTYPE, f"attn_mask is {mask.dtype}, query {query.dtype}")
    if mask.device != query.device:
        return Decline(Reason.DEVICE, f"attn_mask is on {mask.device}, query on {query.device}")
    scores = (*query.shape[:3], key.shape[2])
    fits = mask.dim() <= 4 and not any(
        known_different(have, 1) and known_different(have, want)
        for have, want in zip(reversed(mask.shape), reversed(scores), strict=False)
    )
    # Sizes that may be equal are left to the op, which checks them when it runs, as SDPA does.
    return None if fits else Decline(Reason.MASK_SHAPE, f"attn_mask is {list(mask.shape)}, scores {list(scores)}")


def _match_heads(call: SdpaCall, query: Tensor, key: Tensor, value: Tensor) -> DecodeMatch | Decline:
    if not known_equal(query.shape[0], key.shape[0]) or not known_equal(query.shape[0], value.shape[0]):
        return Decline(Reason.BATCH, f"query, key, value have batch {query.shape[0]}, {key.shape[0]}, {value.shape[0]}")
    if not known_equal(query.shape[3], key.shape[3]):
        return Decline(Reason.HEAD_DIM, f"query has head_dim {query.shape[3]}, key {key.shape[3]}")
    widths = [constant(x.shape[3]) for x in (query, value)]
    if query.device.type == "cuda" and any(width is None or width > MAX_CUDA_HEAD_DIM for width in widths):
        shown = ", ".join(str(x.shape[3]) for x in (query, value))
        return Decline(
            Reason.HEAD_DIM, f"head_dim is {shown}; the CUDA kernel takes constants up to {MAX_CUDA_HEAD_DIM}"
        )
    if known_different(key.shape[2], value.shape[2]):
        return Decline(Reason.KV_LENGTH, f"key has length {key.shape[2]}, value {value.shape[2]}")

    q_heads, kv_heads = query.shape[1], key.shape[1]
    one_to_one, one_for_all = known_equal(q_heads, kv_heads), known_equal(kv_heads, 1)
    divisible = one_to_one or one_for_all or (call.enable_gqa and not known_different(q_heads % kv_heads, 0))
    if not divisible or not known_equal(value.shape[1], kv_heads):
        heads = f"query, key, value have {q_heads}, {kv_heads}, {value.shape[1]} heads"
        return Decline(Reason.HEADS, f"{heads}, enable_gqa is {call.enable_gqa}")
    peeled_key, peeled_value = peel_heads(call.key), peel_heads(call.value)
    if peeled_key.repeats != peeled_value.repeats:  # DiffLlama pairs values of its own: take both as they are
        peeled_key, peeled_value = Peeled(call.key), Peeled(call.value)
    for name, peeled in (("key", peeled_key), ("value", peeled_value)):
        tensors = [tensor for tensor in map(tensor_of, (peeled.base, *peeled.chain)) if tensor is not None]
        writer = written_between(tensors, peeled.chain[-1], call.node) if peeled.chain else None
        if writer is not None:
            return Decline(Reason.WRITTEN, f"{name} is written by `{writer}` after its heads were repeated")

    nothing_repeated = peeled_key.repeats == 1
    if call.attn_mask is None and nothing_repeated and (one_to_one or query.device.type == "cuda"):
        return Decline(Reason.NO_GAIN, f"no mask, and {kv_heads} kv heads for {q_heads} query heads as they are")
    return DecodeMatch(call, peeled_key, peeled_value)


def kv_bytes(match: DecodeMatch) -> tuple[int, int] | None:
    """Bytes of K and V that a step moves before the rewrite, and reads at most after it; None for unknown sizes.

    Repeating heads in memory reads K and V, writes them `repeats` times, and attention reads that again.
    """
    before = after = 0
    for node, peeled in ((match.call.key, match.key), (match.call.value, match.value)):
        repeated, base = tensor_of(node), tensor_of(peeled.base)
        assert repeated is not None
        assert base is not None
        sizes = [hint(size) for size in base.shape]
        size = base.element_size()
        for n in sizes:
            if n is None:
                return None
            size *= n
        after += size
        before += size if same_storage(repeated, base) else size * (1 + 2 * peeled.repeats)
    return before, after


def apply_decode(match: DecodeMatch, spans: Node | None = None) -> Node:
    """Put the op in SDPA's place and erase exactly what this leaves unused. Returns the op's node."""
    call, graph = match.call, match.call.node.graph
    result = tensor_of(call.node)
    assert result is not None
    with graph.inserting_before(call.node):
        key, value = (_permuted(peeled) for peeled in (match.key, match.value))
        scale = call.scale if call.scale is None or isinstance(call.scale, Node) else float(call.scale)
        op = graph.call_function(
            torch.ops.tatten.decode_attention.default, (call.query, key, value, call.attn_mask, None, scale, spans)
        )
        out = graph.call_function(operator.getitem, (op, 0))
        op.meta.update({k: v for k, v in call.node.meta.items() if k != "example_value"})
        out.meta.update(call.node.meta)
        out = _with_strides_of(out, result)
    call.node.replace_all_uses_with(out)
    graph.erase_node(call.node)
    _erase_unused({*match.key.chain, *match.value.chain})
    return op


def shared_spans(match: DecodeMatch, known: dict[Node, tuple[Node, Node]]) -> Node | None:
    """The node that holds the spans of the call's mask: layers share a mask, so it is looked at once per step.

    `known` maps a mask to its spans and to the node up to which it is known not to be written; it is kept up to date.
    None on CUDA, and where the mask broadcasts over keys.
    """
    mask_node, mask, key = match.call.attn_mask, tensor_of(match.call.attn_mask), tensor_of(match.call.key)
    if mask is None or key is None or mask.device.type != "cpu" or not known_equal(mask.shape[-1], key.shape[2]):
        return None
    spans, unwritten = known.get(mask_node, (None, None))
    if spans is None or unwritten is None or written_between([mask], unwritten, match.call.node) is not None:
        with mask_node.graph.inserting_before(match.call.node):
            spans = mask_node.graph.call_function(torch.ops.tatten.mask_spans.default, (mask_node,))
        spans.meta["stack_trace"] = match.call.node.meta.get("stack_trace")
    # The call itself is about to be replaced, and what takes its place writes nothing.
    known[mask_node] = spans, match.call.node.prev
    return spans


def _permuted(peeled: Peeled) -> Node:
    if peeled.dims == IDENTITY:
        return peeled.base
    node = peeled.base.graph.call_method("permute", (peeled.base, *peeled.dims))
    node.meta.update(peeled.base.meta)
    base = tensor_of(peeled.base)
    assert base is not None
    node.meta["example_value"] = base.permute(peeled.dims)
    return node


def _with_strides_of(out: Node, like: Tensor) -> Node:
    """`out`, which is contiguous, laid out as `like` was, because a `view` further on may rest on SDPA's strides."""
    strides = [hint(stride) for stride in like.stride()]
    if known_equal(like.shape[2], 1) or None in strides:
        return out  # with one query, [b, h, 1, d] and [b, 1, h, d] are the same in memory
    order = sorted(range(4), key=lambda dim: -(strides[dim] or 0))
    if order == list(IDENTITY):
        return out
    back = [order.index(dim) for dim in range(4)]
    dense = like.permute(order)
    if not known_shape(dense.stride(), torch.empty(dense.shape, device="meta").stride()):
        return out
    graph = out.graph
    for name, args in (("permute", order), ("contiguous", ()), ("permute", back)):
        node = graph.call_method(name, (out, *args))
        node.meta.update(out.meta)
        out = node
    return out


def _erase_unused(chain: set[Node]) -> None:
    """Erase what nobody uses of the nodes that repeated the heads, last first.

    Never `graph.eliminate_dead_code()`: on a Dynamo graph it deletes the writes to the cache.
    """
    for node in sorted(chain, reverse=True):
        if not node.users:
            node.graph.erase_node(node)
