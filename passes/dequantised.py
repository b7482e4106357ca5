"""Find keys and values that the program dequantises before attention, in 8 bits and with their scale.

`k8.to(dtype) * scale`, or int8 times a scale, represents each key as the product. The op reads keys in 8 bits and
multiplies in float32, which rounds less than the program's product in the dtype of the query.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from tatten.ops.cuda.providers import unsupported_reason
from tatten.ops.cuda.workload import Workload
from tatten.ops.layout import BATCH, HEAD_DIM, HEADS, LENGTH
from tatten.ops.validation import FLOAT_DTYPES, NARROW_DTYPES
from tatten.passes.calls import op_name
from tatten.passes.drafts import Drafting, dtensor_behind
from tatten.passes.mutation import writes, written_between
from tatten.passes.op_names import CASTS, MULTIPLIES, REORDERS, RESHAPES
from tatten.passes.reasons import Decline, Reason
from tatten.passes.sdpa import SdpaCall
from tatten.passes.stored import Stored, stored_at, walk_on
from tatten.passes.symbolic import (
    FakeTensor,
    constant,
    hint,
    is_input_number,
    known_equal,
    known_shape,
    known_tensor,
    number_in,
    tensor_of,
)
from tatten.passes.views import Size, source_of, walks_back

OTHER_ARITHMETIC = {"add", "sub", "subtract", "rsub", "div", "divide", "truediv", "true_divide", "mul_"}
MAX_DEPTH = 8  # ops between keys in 8 bits and attention; unbounded, a search through sums of sums would take long


@dataclass(frozen=True)
class Dequantised:
    """The result of a walk back to a tensor in 8 bits.

    Attributes:
        source: the tensor in 8 bits, of the same shape as the tensor where the walk began.
        path: the nodes from there to the one that reads `source`.
        scales: the factors on the way.
        obstacle: the reason why `source` times one scale isn't the value that the program computes; empty if it is.
    """

    source: Node
    path: tuple[Node, ...] = ()
    scales: tuple[Any, ...] = ()
    obstacle: str = ""


@dataclass(frozen=True)
class Scale:
    """A factor of stored keys or values: one for all of them, for each head or for each key.

    Attributes:
        factor: a node whose tensor broadcasts to the shape of the stored tensor, or a number.
        per_key: whether it may differ within a head.
    """

    factor: Node | float
    per_key: bool

    def as_operand(self, stored: Stored, dtype: torch.dtype, draft: Drafting) -> Node:
        """Draft the scale as `[kv_heads]` or `[batch, kv_heads, kv_length]`, in float32 or `dtype`."""
        factor, tensor, heads = self.factor, tensor_of(self.factor), constant(stored.size(HEADS))
        if not isinstance(factor, Node):
            return draft("new_full", stored.base, (heads,), factor, dtype=torch.float32)
        if tensor is None:  # Inductor supports an input number only as a factor
            return draft("mul", draft("new_full", stored.base, (heads,), 1.0, dtype=torch.float32), factor)
        node = draft("detach", factor) if tensor.requires_grad else factor
        node = node if tensor.dtype == dtype else draft.cast(node, torch.float32)
        if self.per_key:
            for _ in range(4 - tensor.dim()):
                node = draft("unsqueeze", node, 0)
            node = draft("squeeze", draft("permute", node, *stored.dims), HEAD_DIM)
            sizes = [
                (n, stored.size(role)) for n, role in zip(known_tensor(node).shape, (BATCH, HEADS, LENGTH), strict=True)
            ]
            if not all(known_equal(actual, expected) for actual, expected in sizes):
                expand_to = (-1 if known_equal(actual, expected) else constant(expected) for actual, expected in sizes)
                node = draft("expand", node, *expand_to)
        else:
            node = draft("reshape", node, -1)
            node = draft("expand", node, heads) if known_equal(tensor.numel(), 1) else node
        return draft("contiguous", node)  # here the copy can be fused, unlike a copy inside the op


@dataclass(frozen=True)
class Narrow:
    """Keys or values in 8 bits, and their scale, if they have one."""

    stored: Stored
    scale: Scale | None

    @property
    def dtype(self) -> torch.dtype | None:
        base = tensor_of(self.stored.base)
        return None if base is None else base.dtype

    def written_before(self, call: Node) -> Node | None:
        """Return the first node before `call` that may write to them, to a copy of them, or to their scale, or None."""
        scale = None if self.scale is None else tensor_of(self.scale.factor)
        writer = None if scale is None else written_between([scale], min(self.stored.path), call)
        return writer or self.stored.written_before(call)


def both_in_8_bits(call: SdpaCall, key: Stored, value: Stored) -> tuple[Narrow, Narrow] | Decline | None:
    """Find the tensors in 8 bits from which the keys and values of a call were dequantised. Adds no guards.

    Returns:
        Keys and values in 8 bits, the reason why they can't be read in place of `key` and `value`, or None if neither
        was dequantised.
    """
    query = known_tensor(call.query)
    outcomes = {name: _in_8_bits(stored, query) for name, stored in (("key", key), ("value", value))}
    for name, x in outcomes.items():
        if isinstance(x, str):
            return Decline(Reason.DEQUANTISED, f"{name} comes from {x}")
    narrow_key, narrow_value = outcomes.values()
    if narrow_key is None and narrow_value is None:
        return None
    if not isinstance(narrow_key, Narrow) or not isinstance(narrow_value, Narrow):
        wide = "key" if narrow_key is None else "value"
        return Decline(Reason.DEQUANTISED, f"{wide} is not dequantised, as the other is")
    if narrow_key.dtype != narrow_value.dtype:
        return Decline(Reason.DEQUANTISED, f"key is in {narrow_key.dtype}, value in {narrow_value.dtype}")
    for name, narrow in (("key", narrow_key), ("value", narrow_value)):
        writer = narrow.written_before(call.node)
        if writer is not None:
            return Decline(Reason.WRITTEN, f"{name}, or a tensor that it is dequantised from, is written by `{writer}`")
    return narrow_key, narrow_value


def _in_8_bits(stored: Stored, query: Tensor) -> Narrow | str | None:
    """Return the tensor that `stored` was dequantised from, or the reason why it can't be read in place of `stored`.

    The result is None if `stored` was not dequantised.
    """
    ends = _ends(stored)
    if not ends:
        return None
    stored, dequantised = next((end for end in ends if not end[1].obstacle), ends[0])
    source, dims = known_tensor(dequantised.source), stored.dims
    kind = f"`{dequantised.source}` in {str(source.dtype)[6:]}"
    if source.dtype not in NARROW_DTYPES:
        return f"{kind}, where attention takes float8_e4m3fn and int8"
    if dequantised.obstacle:
        return f"{kind}, {dequantised.obstacle}"
    if len(dequantised.scales) > 1:
        return f"{kind}, times {len(dequantised.scales)} factors"
    if None in dims or constant(stored.size(HEADS)) is None:
        return f"{kind}, of shape {list(source.shape)}"
    unsupported = _unsupported(source, query)
    if unsupported:
        return f"{kind}, but {unsupported}"
    scale: Scale | str | None = None
    if dequantised.scales:
        scale = _scale_of(dequantised.scales[0], source, [d or 0 for d in dims], query.dtype)
    if isinstance(scale, str):
        return f"{kind}, {scale}"
    return Narrow(dataclasses.replace(stored, base=dequantised.source, path=(*stored.path, *dequantised.path)), scale)


def _ends(stored: Stored) -> list[tuple[Stored, Dequantised]]:
    """Return the tensors in 8 bits behind `stored`, and behind each tensor that it is a view of."""
    if dtensor_behind(stored.base) is not None or stored.shared:
        return []
    ends = []
    for walk in walks_back(walk_on(stored, stored.base, stored.path)):
        viewed = stored_at(walk)
        dequantised = None if viewed is None or viewed.shared else dequantised_at(walk.node)
        if viewed is not None and dequantised is not None and dequantised.path:
            ends.append((viewed, dequantised))
    return ends


def dequantised_at(node: Node, depth: int = 0) -> Dequantised | None:
    """Return the tensor in 8 bits from which casts, products and other arithmetic computed `node`, or None."""
    tensor = tensor_of(node)
    if not isinstance(tensor, FakeTensor) or depth > MAX_DEPTH:
        return None
    if tensor.element_size() == 1:
        return None if tensor.dtype == torch.bool else Dequantised(node)
    name = op_name(node)
    if not (name in CASTS | MULTIPLIES | OTHER_ARITHMETIC | RESHAPES | REORDERS and tensor.dtype in FLOAT_DTYPES):
        return None
    operands: list[Any] = [source_of(node)]
    if name in MULTIPLIES | OTHER_ARITHMETIC:
        operands = [*node.args, *(x for x in node.kwargs.values() if isinstance(x, Node))][:2]
    for i, operand in enumerate(operands):
        before = tensor_of(operand)
        if before is None or before.device != tensor.device:
            continue
        if name not in RESHAPES | REORDERS and not known_shape(before.shape, tensor.shape):
            continue
        dequantised = dequantised_at(operand, depth + 1)
        if dequantised is not None:
            scales, obstacle = dequantised.scales, dequantised.obstacle
            if name in MULTIPLIES:
                scales = (*scales, *(x for j, x in enumerate(operands) if j != i))
            elif name not in CASTS:
                obstacle = obstacle or f"changed by `{node}` ({name})"
            if writes(node):
                obstacle = f"written in place by `{node}`"
            return Dequantised(dequantised.source, (node, *dequantised.path), scales, obstacle)
    return None


def _scale_of(factor: Any, source: Tensor, dims: list[int], dtype: torch.dtype) -> Scale | str:
    """Return a factor of a tensor whose dims have the roles `dims` as a scale, or the reason why it is none."""
    number = number_in(factor)
    if number is not None:
        return Scale(number, per_key=False)
    if is_input_number(factor):
        return Scale(factor, per_key=False)
    scale = tensor_of(factor)
    if not isinstance(scale, FakeTensor) or not isinstance(factor, Node):
        return f"times `{factor}`, which is not a tensor or a number"
    if scale.device != source.device:
        return f"times a scale on {scale.device}"
    if scale.dtype not in (torch.float16, torch.bfloat16, torch.float32, dtype):
        return f"times a scale in {str(scale.dtype)[6:]}"
    sizes: list[Size] = [*[1] * (source.dim() - scale.dim()), *scale.shape]

    def is_one(role: int) -> bool:
        return known_equal(sizes[dims[role]], 1)

    shown = f"times a scale of shape {list(scale.shape)}"
    if not is_one(HEAD_DIM):
        return f"{shown}, which differs along head_dim"
    per_key = not (is_one(BATCH) and is_one(LENGTH))
    for role in (BATCH, HEADS, LENGTH) if per_key else (HEADS,):
        size, expected = sizes[dims[role]], source.shape[dims[role]]
        if not known_equal(size, expected) and not (known_equal(size, 1) and constant(expected) is not None):
            return f"{shown}, which may or may not broadcast"
    return Scale(factor, per_key)


def _unsupported(source: Tensor, query: Tensor) -> str:
    """Return the reason why no kernel reads `source` with this query, or an empty string."""
    if source.device.type != "cuda":
        return ""
    return unsupported_reason("triton", Workload.of(query, source, source, (), lambda n: hint(n) or 0)) or ""
