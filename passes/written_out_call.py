"""Turn attention that is written out into an equivalent call of SDPA, whose operands and results are drafts."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.fx import Node

from tatten.passes.calls import argument
from tatten.passes.drafts import Drafting
from tatten.passes.masks import Masks
from tatten.passes.products import Factor, Heads, View
from tatten.passes.scores import Step
from tatten.passes.sdpa import SdpaCall
from tatten.passes.symbolic import constant, known_equal, known_tensor, rank_of, tensor_of
from tatten.passes.written_out import WrittenOut


def written_out_call(attention: WrittenOut, sinks: Factor | None, masks: Masks, *, fused: bool) -> SdpaCall:
    """Return attention that is written out as a call. `fused` tells whether the graph's compiler would fuse it."""
    product, draft = attention.weights.product, Drafting(masks.drafts, attention.place)
    query, key, value = (draft.views(x.node, x.views) for x in (attention.query, attention.key, attention.value))
    for number, divides in attention.scores.factors:
        query = draft(torch.div if divides else torch.mul, query, number)
    mask, empty = _mask(attention, masks, draft)
    result = masks.drafts.result(_result(attention))
    sums = (x if empty is None else _without_keys(draft, x, empty, query) for x in attention.log_sums)
    outputs = (product.node, _like_product(attention, draft, result)), *zip(attention.log_sums, sums, strict=True)
    return SdpaCall(
        attention.place,
        query,
        key,
        value,
        attn_mask=mask,
        scale=attention.scores.scale,
        enable_gqa=attention.grouped_heads is not None,
        softcap=attention.scores.softcap,
        sinks=None if sinks is None else draft.views(sinks.node, sinks.views),
        form=attention.form,
        log_sums=attention.log_sums,
        path=attention.path,
        fused=fused,
        grouped=attention.grouped_heads is not None,
        origin=product.node,
        draft_result=result,
        outputs=outputs,
    )


def _like_product(attention: WrittenOut, draft: Drafting, result: Node) -> Node:
    """Draft the result in the shape of the product with values."""
    product, out = attention.weights.product, result
    if attention.grouped_heads is not None:
        out = draft("unflatten", out, 1, attention.grouped_heads[1:])
        out = out if rank_of(product.node) == 5 else draft("squeeze", out, 0)
    elif rank_of(product.node) == 3:
        out = draft("flatten", out, 0, 1)
    return out if product.result_view is None else draft(product.result_view[0], out, *product.result_view[1:])


def _without_keys(draft: Drafting, lse: Node, empty: Node, query: Node) -> Node:
    """Draft an lse that is -inf for queries without keys."""
    rows, rank = empty, rank_of(argument(lse, 0, "input"))
    if rank == 3:
        rows = draft("flatten", draft("expand_as", rows, draft("narrow", query, -1, 0, 1)), 0, 1)
    rows = rows if rank_of(lse) == rank else draft("squeeze", rows, -1)
    return draft("masked_fill", lse, rows, -math.inf)


def _result(attention: WrittenOut) -> Tensor:
    """Return the fake tensor of the result as `[batch, heads, q_len, head_dim]`."""
    product = attention.weights.product
    tensor = known_tensor(product.node)
    if product.result_view is not None:
        order = product.result_view[1:]
        tensor = tensor.permute([order.index(d) for d in range(len(order))])
    if attention.grouped_heads is not None:
        return (tensor if tensor.dim() == 5 else tensor.unsqueeze(0)).flatten(1, 2)
    return tensor.unflatten(0, _heads(attention)) if tensor.dim() == 3 else tensor


def _heads(attention: WrittenOut) -> tuple[int, int]:
    assert attention.heads is not None
    heads = constant(attention.heads[1])
    assert heads is not None
    return -1, heads


def _mask(attention: WrittenOut, masks: Masks, draft: Drafting) -> tuple[Node | None, Node | None]:
    """Draft the bias, which is the result of the steps for a score of 0, and a mask of its rows without keys."""
    steps = attention.scores.steps
    if all(x.node is None for x in steps):
        return None, None
    bias = _bias(draft, attention, masks)
    if attention.scores.sinks is not None or steps[-1].kind == "at_least":
        return bias, None
    # A softmax of a row of -inf is NaN, while attention to no keys is 0.
    empty = draft("all", draft("eq", bias, -math.inf), -1, True)
    return draft("masked_fill", bias, empty, math.nan), empty


def _bias(draft: Drafting, attention: WrittenOut, masks: Masks) -> Node:
    bias: Node | None = None
    for step in attention.scores.steps:
        if step.node is not None:
            like_scores = _like_scores(masks.first_view(step.node), attention)
            bias = _with(draft, step, bias, draft.views(like_scores.node, like_scores.views))
        elif bias is not None:
            bias = draft.cast(bias, step.dtype)
            bias = draft("mul", bias, step.number) if step.kind == "times" and step.number != 1 else bias
            bias = draft("div", bias, step.number) if step.kind == "over" else bias
            bias = draft("clamp", bias, step.number) if step.kind == "at_least" else bias
    assert bias is not None
    return bias


def _with(draft: Drafting, step: Step, bias: Node | None, node: Node) -> Node:
    """Draft a step with a tensor, `node`. The result has the dtype of scores, as in a sum in place."""
    if step.kind == "add":
        node = node if step.number == 1 else draft("mul", draft.cast(node, step.dtype), step.number)
        return draft.cast(node if bias is None else draft(torch.add, draft.cast(bias, step.dtype), node), step.dtype)
    bias = draft.cast(draft(torch.zeros_like, node) if bias is None else bias, step.dtype)
    condition = node if step.kind == "where" else draft("logical_not", node)
    return draft(torch.masked_fill, bias, condition, step.number)


def _like_scores(node: Node, attention: WrittenOut) -> Factor:
    """Return a tensor with views that broadcast to scores `[batch, heads, q_len, kv_len]`."""
    tensor = tensor_of(node)
    if tensor is not None and tensor.dim() == 0:
        return Factor(node, (("unsqueeze", 0),))
    if attention.grouped_heads is not None and tensor is not None:
        return Factor(node, _joined(tensor, attention.grouped_heads))
    if attention.heads is None or tensor is None or tensor.dim() != 3 or known_equal(tensor.shape[0], 1):
        return Factor(node)
    if known_equal(tensor.shape[0], attention.heads[0] * attention.heads[1]):
        return Factor(node, (("unflatten", 0, _heads(attention)),))
    return Factor(node)


def _joined(tensor: Tensor, heads: Heads) -> tuple[View, ...]:
    """Return views that merge the two dims of heads of a tensor that broadcasts to scores."""
    if tensor.dim() < 3:
        return ()
    new_dims = (("unsqueeze", 0),) * (5 - tensor.dim())
    kv_heads, group_size = (1, 1, *tensor.shape)[-4:-2]
    if known_equal(kv_heads, 1) != known_equal(group_size, 1):
        return (*new_dims, ("expand", -1, *heads[1:], -1, -1), ("flatten", 1, 2))
    return (*new_dims, ("flatten", 1, 2))
