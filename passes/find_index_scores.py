"""Find the scores that an indexer gives to keys: products of index heads, relu, and their weighted sum.

The form is `sum over heads h of weights[h] * relu(scale * query[h] @ key)`, followed by a mask. A program may multiply
by the scale and widen its tensors in any order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from tatten.ops.states import accumulator_dtype
from tatten.passes.eligible import check_q_len, check_transformed
from tatten.passes.index_cost import IndexCost, index_cost
from tatten.passes.index_narrow import StoredKeys, narrow_keys
from tatten.passes.index_operands import (
    KEY,
    OF_DIM,
    OF_LENGTH,
    OF_QUERIES,
    QUERY,
    WEIGHTS,
    candidate_operands,
    operands_of,
)
from tatten.passes.index_segments import KeySegments, find_key_segments
from tatten.passes.index_steps import ScaleSteps, steps_back
from tatten.passes.index_sum import Masked, Summed, find_mask, find_sum
from tatten.passes.literals import rounded
from tatten.passes.metadata import dead_from, readers, reads_values
from tatten.passes.mutation import mover_of, written_arguments, written_between
from tatten.passes.products import Factor, Product, product_of, viewed
from tatten.passes.reasons import Decline, Reason
from tatten.passes.run import Run
from tatten.passes.symbolic import FakeTensor, guard_between, known_tensor, tensor_of

SCALES = 1e-30, 1e30  # guarded range of input numbers after relu: above 0 and finite, also in float32


@dataclass(frozen=True)
class IndexerScores:
    """The scores of an indexer.

    Attributes:
        product: the node that multiplies queries and keys.
        query, key, weights, key_scale: as `tatten.index_scores` takes them, `key_scale` with dims of size 1.
        scale, factors: the factors of the products: a number, and numbers that are inputs of the graph.
        masked: the last node of the scores, which the op's result replaces, and its mask.
        path: the nodes that may have no users after that.
        cost: the estimate of what a rewrite saves; None if sizes are unknown.
        segments: the stored keys, if the program concatenates them only for the scores.
        not_narrow: the reason why dequantised keys are not read in 8 bits; empty if they are, or none were.
    """

    product: Node
    query: Factor
    key: Factor
    weights: Factor
    scale: float
    factors: tuple[Node, ...]
    masked: Masked
    path: frozenset[Node]
    cost: IndexCost | None
    segments: KeySegments | None = None
    key_scale: Factor | None = None
    not_narrow: str = ""


def find_index_scores(relu: Node, run: Run) -> IndexerScores | Decline | None:
    """Read the scores around a relu. May add a guard on the sign of an input number.

    Returns:
        The scores, the reason why they stay as they are, or None for a relu of something else.
    """
    above = steps_back(relu)
    product = None if above is None else product_of(above.node)
    summed = None if product is None else find_sum(relu)
    if above is None or product is None or summed is None:
        return None
    return (
        run.unsupported
        or _check_tensors(product, summed)
        or check_q_len(summed.sizes[OF_QUERIES], run.max_q_len)
        or _check_form(above, product, summed)
        or _read_scores(above, product, summed, run)
    )


def _check_tensors(product: Product, summed: Summed) -> Decline | None:
    """Return the reason why the op doesn't take these tensors, or None."""
    factors = [*(x.node for x in (product.left, product.right)), summed.weights]
    transformed = check_transformed((*factors, summed.node))
    if transformed is not None:
        return transformed
    tensors = [known_tensor(x) for x in (*factors, product.node, summed.steps.node, summed.node)]
    if not all(isinstance(x, FakeTensor) for x in tensors):
        return Decline(Reason.PLACEMENT, "the scores of an indexer over DTensors")
    if tensors[-1].requires_grad:
        return Decline(Reason.REQUIRES_GRAD, "the scores require grad")
    device, (query, key, weights, *computed) = tensors[0].device, tensors
    if device.type not in ("cpu", "cuda") or any(x.device != device for x in tensors):
        devices = f"{query.device}, {key.device}, {weights.device}"
        return Decline(Reason.DEVICE, f"queries, keys and weights are on {devices}")
    wide = (torch.float32, torch.float64) if device.type == "cpu" else (torch.float32,)
    dtypes = {x.dtype for x in (query, key, *computed)}
    if len(dtypes) > 1 or not dtypes <= {*wide}:
        nodes_and_tensors = zip((product.node, summed.steps.node, summed.node), computed, strict=True)
        shown = ", ".join(f"`{node}` in {tensor.dtype}" for node, tensor in nodes_and_tensors)
        return Decline(Reason.INDEX_SCORES, f"not all of it is in float32: {shown}")
    return None


def _check_form(above: ScaleSteps, product: Product, summed: Summed) -> Decline | None:
    """Return the reason if anything but relu and scales stands between the products and their sum, or None."""
    obstacle = above.obstacle or summed.steps.obstacle
    if obstacle:
        return Decline(Reason.INDEX_SCORES, f"between the products and their weighted sum, {obstacle}")
    if product.bias is not None or product.unknown_scale is not None:
        return Decline(Reason.INDEX_SCORES, f"`{product.node}` adds a bias, or has a scale that isn't known")
    return None


def _read_scores(above: ScaleSteps, product: Product, summed: Summed, run: Run) -> IndexerScores | Decline:
    masked, lead = find_mask(summed), summed.parts[:2]
    sizes = summed.sizes | {OF_DIM: known_tensor(product.left.node).shape[-1]}
    queries = operands_of(product.left, (*lead, summed.parts[2], OF_DIM), QUERY, sizes)
    of_keys = product.right, (*lead, OF_DIM, OF_LENGTH), KEY, sizes
    keys = operands_of(*of_keys)
    weights = operands_of(Factor(summed.weights), summed.weight_parts, WEIGHTS, sizes)
    wide = known_tensor(product.node).dtype
    narrow = narrow_keys(candidate_operands(*of_keys), wide)
    in_8_bits = narrow if isinstance(narrow, StoredKeys) else None
    dtypes = [x for x in queries if (in_8_bits is not None or x in keys) and accumulator_dtype(x) == wide]
    if not dtypes or not weights:
        return Decline(Reason.INDEX_SCORES, _mismatch(product, summed))
    dtype = min(dtypes, key=lambda x: x.itemsize)
    query, stored = queries[dtype], in_8_bits or StoredKeys(keys[dtype])
    key, key_scale = stored.key, stored.scale
    scale = above.scale * product.scale * summed.steps.scale * masked.scale * stored.number
    if not math.isfinite(rounded(scale, torch.float32)):
        return Decline(Reason.INDEX_SCORES, f"products are multiplied by {scale:g}")
    chain = {*above.path, *summed.steps.path, *summed.path, *masked.path}
    users = _check_users(chain, masked)
    if isinstance(users, Decline):
        return users
    weight = list(weights.values())[-1]
    operands = tuple(x for x in (query, key, weight, masked.mask, key_scale) if x is not None)
    path = chain | users | {masked.node} | {node for x in operands for node in x.path}
    segments = find_key_segments(key, _tensor(query), masked.node, frozenset(path)) if in_8_bits is None else None
    parts = () if segments is None else segments.stored
    cost = index_cost(_tensor(query), _tensor(key), parts, widened=_tensor(key).dtype != wide)
    writer = mover_of(masked.node, run.movers) or _writer(operands, path, masked.node)
    if writer is not None:
        return Decline(Reason.WRITTEN, f"`{writer}` writes to a tensor that the scores of an indexer read")
    if cost is not None and not cost.pays:
        return Decline(Reason.INDEX_SMALL, str(cost))
    for factor in summed.steps.factors:
        if not run.may_guard or not guard_between(factor, *SCALES):
            unknown = f"`{factor}`, which multiplies products after relu, isn't known to be above 0"
            return Decline(Reason.INDEX_SCORES, unknown)
    factors = above.factors + summed.steps.factors + stored.factors
    return IndexerScores(
        product.node,
        query,
        key,
        weight,
        scale,
        factors,
        masked,
        frozenset(path.union(*(x.path for x in parts))),
        cost,
        segments=segments,
        key_scale=key_scale,
        not_narrow=narrow if isinstance(narrow, str) else "",
    )


def _mismatch(product: Product, summed: Summed) -> str:
    """Return the shapes and dtypes of operands that the op does not take."""
    operands = ("queries", product.left.node), ("keys", product.right.node), ("weights", summed.weights)
    tensors = [(name, known_tensor(x)) for name, x in operands]
    return "; ".join(f"{name} are {list(x.shape)} in {x.dtype}" for name, x in tensors)


def _tensor(operand: Factor) -> Tensor:
    tensor = viewed(operand)
    assert tensor is not None
    return tensor


def _check_users(chain: set[Node], masked: Masked) -> set[Node] | Decline:
    """Return the users of the nodes in `chain` that read none of their values, or the reason if another user does."""
    unread = set[Node]()
    for node in sorted({*chain, masked.node}):
        written = next((x for x in written_arguments(node) if x not in chain), None)
        if written is not None:
            return Decline(Reason.INDEX_USED, f"`{node}` writes to `{written}`")
        for user in node.users if node in chain else ():
            if user in chain or user is masked.node:
                continue
            if not reads_values(user, node):
                unread.update(readers(user, node))
            elif (dead := dead_from(user)) is not None:
                unread.update(dead)
            else:
                return Decline(Reason.INDEX_USED, f"`{user}` uses `{node}`")
    return unread


def _writer(operands: tuple[Factor, ...], path: set[Node], place: Node) -> Node | None:
    """Return the first node that may write to an operand after the scores read it and before `place`, or None.

    The op reads the operands at `place`.
    """
    since = [(x.node, min(user for user in x.node.users if user in path)) for x in operands]
    since += [(copy, copy) for x in operands for copy in x.path]
    for node, start in since:
        tensor = tensor_of(node)
        writer = None if tensor is None or start is place else written_between([tensor], start, place)
        if writer is not None:
            return writer
    return None
