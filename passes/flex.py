"""Read calls of `flex_attention`: their score function and their block mask, from the graphs of both functions.

`tatten.passes.flex_mask` turns the result into one mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from tatten.passes.calls import op_name
from tatten.passes.drafts import Drafts
from tatten.passes.reasons import Decline, Reason
from tatten.passes.sdpa import SdpaCall
from tatten.passes.symbolic import (
    FakeTensor,
    constant,
    known_at_most,
    known_equal,
    known_tensor,
    number_in,
    tensor_of,
    value_of,
)

POSITIONS = 4  # a mask function takes batch, head, query and key, then the tensors and numbers that it captured
POINTWISE = {
    *("add", "sub", "mul", "truediv", "div", "floordiv", "floor_divide", "mod", "remainder", "fmod", "neg", "abs"),
    *("and_", "or_", "xor", "invert", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "rshift", "lshift"),
    *("logical_and", "logical_or", "logical_xor", "logical_not", "eq", "ne", "lt", "le", "gt", "ge"),
    *("__eq__", "__ne__", "__and__", "__or__", "__invert__"),
    *("where", "minimum", "maximum", "clamp", "to", "bool", "int", "long", "float"),
}
CONSTANTS = {"new_ones", "new_zeros", "new_full", "ones", "zeros", "full"}
INDEXING = {"getitem", "index"}
NO_BLOCKS = 1 << 30  # the block size of the mask that `flex_attention` makes if it gets none


@dataclass(frozen=True)
class FlexBlockList:
    """The blocks of keys that each block of queries attends to.

    Attributes:
        counts: int32 `[batch or 1, heads or 1, q_blocks]`, the number of blocks of each row of `indices` that count.
        indices: int32 `[batch or 1, heads or 1, q_blocks, any]`.
    """

    counts: Node
    indices: Node


@dataclass(frozen=True)
class FlexBlockMask:
    """The keys that a block mask leaves: all keys of full blocks, and in other blocks the keys that a function chooses.

    Attributes:
        mask_mod: the body of the mask function, a graph over scalars; None if it leaves all keys.
        captured: the values that the body reads besides positions: numbers and plain tensors.
        partial: the blocks to which the function applies; None for all.
        full: the blocks of which all keys are left; None without any.
        q_block, kv_block: number of queries and of keys of a block.
    """

    mask_mod: GraphModule | None
    captured: tuple[Any, ...]
    partial: FlexBlockList | None
    full: FlexBlockList | None
    q_block: int
    kv_block: int


def is_flex(node: Node) -> bool:
    return node.op == "call_function" and str(node.target) == "flex_attention"


def find_flex(graph: Graph) -> list[Node]:
    """Return all calls of `flex_attention` in a graph, in order."""
    return [node for node in graph.nodes if is_flex(node)]


def read_flex(node: Node, drafts: Drafts) -> tuple[SdpaCall, FlexBlockMask | None] | Decline:
    """Read a call of `flex_attention` as a call of SDPA.

    Returns:
        The call and its block mask, which is None if it leaves all keys; or the reason why no op of tatten computes it.
    """
    if len(node.args) != 9 or node.kwargs:
        return _decline("its arguments are not those that are known")
    query, key, value, score_mod, blocks, scale, options, score_captured, mask_captured = node.args
    decline = _check_arguments(node) or _check_kernel(options)
    if decline is not None:
        return decline
    results = _results(node)
    if isinstance(results, Decline):
        return results
    out, log_sums, path = results
    bodies = [_body_of(x) for x in (score_mod, blocks[-1])]  # type: ignore[index]
    if bodies[0] is None or bodies[1] is None:
        return _decline("its functions are not part of the graph")
    softcap = _softcap(bodies[0].graph, score_captured)  # type: ignore[arg-type]
    if isinstance(softcap, Decline):
        return softcap
    mask = _read_mask(node, blocks, bodies[1], mask_captured)  # type: ignore[arg-type]
    if isinstance(mask, Decline):
        return mask
    known = number_in(scale)
    scale = scale if known is None else known
    path = (*path, node, *(x for x in (score_mod, blocks[-1]) if isinstance(x, Node)))  # type: ignore[index]
    call = SdpaCall(
        node,
        query,
        key,
        value,
        scale=scale,
        enable_gqa=True,
        softcap=softcap,
        form=_form(softcap, mask),
        log_sums=log_sums,
        path=path,
        draft_result=(stands_for := drafts.result(known_tensor(out))),
        outputs=((out, stands_for), *((x, x) for x in log_sums)),
    )
    return call, mask


def _form(softcap: float | None, mask: FlexBlockMask | None) -> str:
    """Describe how attention was written, for the report."""
    parts = [] if softcap is None else [f"soft cap of {softcap:g}"]
    if mask is not None:
        parts += ["mask function"] * (mask.mask_mod is not None) + ["blocks"] * (mask.partial is not None)
    return f"flex_attention ({', '.join(parts)})" if parts else "flex_attention"


def _decline(detail: str) -> Decline:
    return Decline(Reason.FLEX_ATTENTION, f"a call to flex_attention: {detail}")


def _check_arguments(node: Node) -> Decline | None:
    """Return the reason why tensors or blocks of a call have another form than the code below assumes, or None."""
    for name, x in zip(("query", "key", "value"), node.args, strict=False):
        tensor = tensor_of(x)
        if not isinstance(tensor, FakeTensor) or tensor.dim() != 4:
            shown = "no tensor of the graph" if tensor is None else f"a {type(tensor).__name__} of {tensor.dim()} dims"
            return _decline(f"its {name} is {shown}, not a plain tensor of 4")
    blocks = node.args[4]
    if not isinstance(blocks, tuple | list) or len(blocks) < 9:
        return _decline("its block mask has another form than the one that is known")
    return None


def _check_kernel(options: Any) -> Decline | None:
    """Return the reason if the options choose a kernel that must not be replaced, or None."""
    if "BACKEND" not in options:
        return _decline("its options don't say which kernel is wanted")
    return _decline("its options choose the kernel of FlashAttention") if options["BACKEND"] == "FLASH" else None


def _body_of(function: Any) -> GraphModule | None:
    if not isinstance(function, Node) or function.op != "get_attr":
        return None
    module = function.graph.owning_module
    body = None if module is None else getattr(module, str(function.target), None)
    return body if isinstance(body, GraphModule) else None


def _results(node: Node) -> tuple[Node, tuple[Node, ...], tuple[Node, ...]] | Decline:
    """Return the output, the lse, and the nodes that take both from the tuple.

    The op returns the lse to base 2, and the program multiplies it by ln(2).
    """
    items: dict[Any, list[Node]] = {0: [], 1: []}
    for user in node.users:
        if op_name(user) != "getitem":
            return _decline(f"`{user}` uses its results as one")
        if user.args[1] not in items:
            return _decline("its largest scores are used")
        items[user.args[1]].append(user)
    outs, lses = items[0], items[1]
    if len(outs) != 1:
        return _decline(f"{len(outs)} nodes take its output, where one is known how to be replaced")
    log_sums = [user for lse in lses for user in lse.users]
    if any(op_name(x) != "mul" or math.log(2.0) not in x.args for x in log_sums):
        return _decline("its lse is used in a way that is not known")
    return outs[0], tuple(log_sums), (outs[0], *lses)


def _softcap(scores: Graph, captured: Sequence[Any]) -> float | Decline | None:
    """Return the `c` of a score function `c * tanh(score / c)`, or None for one that returns scores unchanged."""
    score = next(iter(scores.nodes))
    end = result_of(scores)
    if end is score:
        return None
    cap, capped = _times(end)
    if capped is not None and op_name(capped) == "tanh" and 0 < cap < math.inf:
        inner = capped.args[0]
        divides = isinstance(inner, Node) and op_name(inner) in ("truediv", "div") and not inner.kwargs
        if (divides and inner.args == (score, cap)) or _times(inner) == (1 / cap, score):  # type: ignore[union-attr]
            return cap
    if captured:
        return _decline("its score function reads tensors, or numbers that are inputs of the graph")
    return _decline("its score function is neither identity nor `cap * tanh(score / cap)` with one number as `cap`")


def _times(node: Any) -> tuple[float, Node | None]:
    """Return the number and the node whose product a node is, or NaN and None if it is no such product."""
    if isinstance(node, Node) and op_name(node) == "mul" and len(node.args) == 2:
        for number, factor in (node.args, node.args[::-1]):
            if isinstance(number, int | float) and isinstance(factor, Node):
                return float(number), factor
    return math.nan, None


def result_of(graph: Graph) -> Any:
    """Return the result of a function, from the graph of its body."""
    (output,) = graph.find_nodes(op="output")
    result = output.args[0]
    return result[0] if isinstance(result, tuple | list) and len(result) == 1 else result


def _read_mask(
    node: Node, blocks: Sequence[Any], body: GraphModule, captured: Sequence[Any]
) -> FlexBlockMask | Decline | None:
    query = tensor_of(node.args[0])
    counts, indices, full_counts, full_indices = blocks[2:6]
    q_block, kv_block = blocks[-3:-1]
    if query is None or not isinstance(q_block, int) or not isinstance(kv_block, int):
        return _decline("its block size is not a number")
    if counts is None or indices is None or (full_counts is None) != (full_indices is None):
        return _decline("its block mask lacks a list of blocks")
    placeholders = body.graph.find_nodes(op="placeholder")
    if len(placeholders) != POSITIONS + len(captured):
        return _decline(
            f"its mask function takes {len(placeholders)} arguments, and is given {POSITIONS + len(captured)}"
        )
    lists = [(counts, indices)] + ([] if full_counts is None else [(full_counts, full_indices)])
    decline = (
        _check_body(body.graph)
        or _check_captured((*(x for pair in lists for x in pair), *captured), query)
        or next((x for pair in lists if (x := _check_lists(*pair, q_block, query)) is not None), None)
    )
    if decline is not None:
        return decline
    end = result_of(body.graph)
    mask_mod = None if op_name(end) == "new_ones" else body
    full = None if full_counts is None else FlexBlockList(full_counts, full_indices)
    no_block_mask = q_block == kv_block == NO_BLOCKS and [op_name(x) for x in (counts, indices)] == ["ones", "zeros"]
    partial = None if no_block_mask and full is None else FlexBlockList(counts, indices)
    if mask_mod is None and partial is None:
        return None
    return FlexBlockMask(mask_mod, tuple(captured) if mask_mod else (), partial, full, q_block, kv_block)


def _check_captured(captured: Sequence[Any], query: Tensor) -> Decline | None:
    for x in captured:
        value = value_of(x) if isinstance(x, Node) else x
        if isinstance(value, Tensor) and (not isinstance(value, FakeTensor) or value.device != query.device):
            return _decline(f"its mask reads `{x}`, which is not a plain tensor on {query.device}")
        if value is None and isinstance(x, Node):
            return _decline(f"its mask reads `{x}`, whose value is unknown")
    return None


def _check_lists(counts: Any, indices: Any, q_block: int, query: Tensor) -> Decline | None:
    """Return the reason why lists of blocks don't fit the batch, heads and queries of a call, or None."""
    for x, rank in ((counts, 3), (indices, 4)):
        tensor = tensor_of(x)
        if tensor is None:
            return _decline(f"its list of blocks `{x}` is not a tensor of the graph")
        if tensor.dim() != rank or tensor.dtype not in (torch.int32, torch.int64):
            shown = f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"
            return _decline(f"its list of blocks `{x}` is {shown}, where integers of {rank} dims are known")
        fits = (any(known_equal(tensor.shape[dim], size) for size in (1, query.shape[dim])) for dim in (0, 1))
        rows, queries = constant(tensor.shape[2]), query.shape[2]
        if not all(fits) or (rows is not None and not known_at_most(queries, rows * q_block)):
            return _decline(f"its list of blocks `{x}` is {list(tensor.shape)}, its query {list(query.shape)}")
    return None


def _check_body(body: Graph) -> Decline | None:
    """Return the reason why a mask function can't be computed for all positions at once, or None.

    Each of its ops must compute a scalar from scalars. Tensors of more dims may only be indexed.
    """
    for node in body.nodes:
        if node.op in ("placeholder", "output"):
            continue
        name, value = op_name(node), value_of(node)
        inputs = [tensor_of(x) for x in node.all_input_nodes]
        scalars = all(x is None or x.dim() == 0 for x in inputs)
        known = scalars and isinstance(value, Tensor) and value.dim() == 0 and name in POINTWISE | CONSTANTS
        if not known and not (name in INDEXING and _indexes(node)):
            return _decline(f"its mask function calls `{name or node.target}` in a way that is not known")
    result = tensor_of(result_of(body))
    if result is None or result.dim() != 0 or result.dtype != torch.bool:
        return _decline("its mask function does not return one bool")
    return None


def _indexes(node: Node) -> bool:
    """Return True if a node indexes a tensor along its first dims by scalars."""
    base = tensor_of(node.args[0])
    places = places_of(node)
    if base is None or len(places) > base.dim() or node.kwargs:
        return False
    for place in places:
        tensor = tensor_of(place)
        if tensor is None and (not isinstance(place, int) or isinstance(place, bool)):
            return False
        if tensor is not None and (tensor.dim() != 0 or tensor.dtype not in (torch.int32, torch.int64)):
            return False
    return True


def places_of(node: Node) -> tuple[Any, ...]:
    """Return the indices of a node that indexes a tensor, one for each dim."""
    places = node.args[1]
    return tuple(places) if isinstance(places, tuple | list) else (places,)
