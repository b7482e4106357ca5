"""The scores that an indexer gives to keys: products of index heads, relu, and their weighted sum.

Found is `sum over heads h of weights[h] * relu(scale * query[h] @ key)`, in whatever order a program multiplies by the
scale and widens its tensors, and the mask that the sum gets.
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
from tatten.passes.index_operands import KEY, OF_DIM, OF_LENGTH, OF_QUERIES, QUERY, WEIGHTS, operands_of, ways_back
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

SCALES = 1e-30, 1e30  # of numbers after relu that are inputs: above 0 and finite, also rounded to float32


@dataclass(frozen=True)
class IndexerScores:
    """The scores of an indexer.

    Attributes:
        product: the node that multiplies queries and keys.
        query, key, weights, key_scale: as `tatten.index_scores` takes them, `key_scale` with dims of size 1.
        scale, factors: what multiplies the products: a number, and numbers that are inputs of the graph.
        masked: the last node of the scores, which the op's result replaces, and its mask.
        path: the nodes that may have no users then.
        cost: the estimate of what a rewrite saves; None if sizes are unknown.
        segments: the keys as they are stored, where the program concatenates them for the scores alone.
        not_narrow: why keys that were dequantised are not read in 8 bits; empty if they are, or none were.
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
    """Read the scores around a relu. Changes nothing; guards the sign of a number that is an input.

    Returns:
        The scores; why they stay as they are; or None where it is another relu.
    """
    above = steps_back(relu)
    product = None if above is None else product_of(above.node)
    summed = None if product is None else find_sum(relu)
    if above is None or product is None or summed is None:
        return None
    return (
        _check_tensors(product, summed)
        or check_q_len(summed.sizes[OF_QUERIES], run.max_q_len)
        or _check_form(above, product, summed)
        or _read(above, product, summed, run)
    )


def _check_tensors(product: Product, summed: Summed) -> Decline | None:
    """Check that the op takes tensors of this kind."""
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
        named = zip((product.node, summed.steps.node, summed.node), computed, strict=True)
        shown = ", ".join(f"`{node}` in {tensor.dtype}" for node, tensor in named)
        return Decline(Reason.INDEX_SCORES, f"not all of it is in float32: {shown}")
    return None


def _check_form(above: ScaleSteps, product: Product, summed: Summed) -> Decline | None:
    """Check that nothing stands between the products and their sum but relu and scales."""
    obstacle = above.obstacle or summed.steps.obstacle
    if obstacle:
        return Decline(Reason.INDEX_SCORES, f"between the products and their weighted sum, {obstacle}")
    if product.bias is not None or product.unknown_scale is not None:
        return Decline(Reason.INDEX_SCORES, f"`{product.node}` adds a bias, or has a scale that isn't known")
    return None


def _read(above: ScaleSteps, product: Product, summed: Summed, run: Run) -> IndexerScores | Decline:
    masked, lead = find_mask(summed), summed.parts[:2]
    sizes = summed.sizes | {OF_DIM: known_tensor(product.left.node).shape[-1]}
    queries = operands_of(product.left, (*lead, summed.parts[2], OF_DIM), QUERY, sizes)
    of_keys = product.right, (*lead, OF_DIM, OF_LENGTH), KEY, sizes
    keys = operands_of(*of_keys)
    weights = operands_of(Factor(summed.weights), summed.of_weights, WEIGHTS, sizes)
    wide = known_tensor(product.node).dtype
    narrow = narrow_keys(ways_back(*of_keys), wide)
    in_8_bits = narrow if isinstance(narrow, StoredKeys) else None
    alike = [x for x in queries if (in_8_bits is not None or x in keys) and accumulator_dtype(x) == wide]
    if not alike or not weights:
        return Decline(Reason.INDEX_SCORES, _unlike(product, summed))
    dtype = min(alike, key=lambda x: x.itemsize)
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
    writer = mover_of(masked.node, run.moving) or _writer(operands, path, masked.node)
    if writer is not None:
        return Decline(Reason.WRITTEN, f"`{writer}` writes to what the scores of an indexer read")
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


def _unlike(product: Product, summed: Summed) -> str:
    """Tell that operands have other dims or dtypes than the op's."""
    named = ("queries", product.left.node), ("keys", product.right.node), ("weights", summed.weights)
    shown = [(name, known_tensor(x)) for name, x in named]
    return "; ".join(f"{name} are {list(x.shape)} in {x.dtype}" for name, x in shown)


def _tensor(operand: Factor) -> Tensor:
    tensor = viewed(operand)
    assert tensor is not None
    return tensor


def _check_users(chain: set[Node], masked: Masked) -> set[Node] | Decline:
    """Check that nothing else reads what will not be computed. Returns users that read none of its values."""
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
    """The first node that may write to what the scores have read before their last node, where the op would read it."""
    since = [(x.node, min(user for user in x.node.users if user in path)) for x in operands]
    since += [(copy, copy) for x in operands for copy in x.path]
    for node, start in since:
        tensor = tensor_of(node)
        writer = None if tensor is None or start is place else written_between([tensor], start, place)
        if writer is not None:
            return writer
    return None
