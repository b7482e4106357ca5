"""Find attention that is written out as two products around a softmax.

`tatten.passes.scores` reads the softmax over keys back to the product of queries and keys, and `tatten.passes.weights`
follows it to the product with values. `tatten.passes.written_out_call` turns the result into a call of SDPA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Graph, Node

from tatten.passes.calls import argument, op_name
from tatten.passes.eligible import check_transformed
from tatten.passes.metadata import dead_from, readers, reads_values
from tatten.passes.mutation import written_arguments, written_between
from tatten.passes.no_effect import is_last_dim, subtracts_maximum
from tatten.passes.op_names import CASTS, COPIES, RESHAPES
from tatten.passes.other_attention import SOFTMAX, scores_above
from tatten.passes.products import Factor, Heads, Product, viewed, with_heads
from tatten.passes.reasons import Decline, Reason
from tatten.passes.scores import Scores, find_scores
from tatten.passes.sinks import find_vector, sinks_of
from tatten.passes.symbolic import constant, known_equal, known_shape, rank_of, tensor_of
from tatten.passes.views import Size
from tatten.passes.weights import Weights, find_weights


@dataclass(frozen=True)
class WrittenOut:
    """Attention that is written out.

    Attributes:
        softmax: the node of the softmax.
        scores, weights: the nodes above and below the softmax.
        query, key, value: `[batch, heads, length, head_dim]`.
        heads: the batch and heads that the first dim merges in tensors of rank 3; or the batch, the kv heads and the
            query heads of each, as three dims; None if all tensors have rank 4.
        log_sums: the nodes of `logsumexp` of the same scores.
        reads: all tensors that are read.
        path: the nodes that have no users once an op computes the result.
    """

    softmax: Node
    scores: Scores
    weights: Weights
    query: Factor
    key: Factor
    value: Factor
    heads: Heads | None
    log_sums: tuple[Node, ...]
    reads: tuple[Node, ...]
    path: tuple[Node, ...]

    @property
    def grouped_heads(self) -> Heads | None:
        """`heads` if kv heads and the query heads of each are separate dims, else None."""
        return self.heads if self.heads is not None and len(self.heads) == 3 else None

    @property
    def place(self) -> Node:
        """The first node that uses a result of attention, or the product with values."""
        return min([self.weights.product.node, *(user for node in self.log_sums for user in node.users)])

    def sinks(self) -> Factor | Decline | None:
        """Return the sinks, one for each query head, the reason why they can't be read, or None without sinks."""
        column = self.scores.sinks
        return None if column is None else sinks_of(column, self.query.node, _heads_of(self.query), self.place)

    @property
    def form(self) -> str:
        """A description of the form for the report."""
        steps = {"add": "bias", "where": "mask", "where_not": "mask", "at_least": "lower bound"}
        parts = [steps[x.kind] for x in self.scores.steps if x.kind in steps]
        parts += [] if self.scores.softcap is None else [f"soft cap {self.scores.softcap:g}"]
        parts += [] if self.scores.sinks is None else ["sinks"]
        parts += ["logsumexp"] * bool(self.log_sums)
        return "attention written out" + (f", with {', '.join(parts)}" if parts else "")


def find_written_out(graph: Graph) -> list[tuple[Node, Node, Node]]:
    """Find attention that is written out.

    A softmax that isn't made from a product, or doesn't lead to a product with values, is left out. It isn't attention,
    or has a form that `tatten.passes.other_attention` reports.

    Returns:
        The product with values, the softmax and the place of each, in the order of the products.
    """
    matches = []
    for node in graph.nodes:
        if op_name(node) in SOFTMAX:
            weights = find_weights(node)
            read = None if weights is None else read_written_out(node)
            if weights is not None and read is not None:
                product = weights.product.node
                matches.append((product, node, product if isinstance(read, Decline) else read.place))
    return sorted(matches)


def read_written_out(softmax: Node) -> WrittenOut | Decline | None:
    """Read the attention around a softmax.

    Returns:
        The attention, the reason why it can't be read, or None if it isn't attention.
    """
    tensor, weights = tensor_of(softmax), find_weights(softmax)
    if tensor is None or weights is None or not is_last_dim(argument(softmax, 1, "dim"), tensor.dim()):
        return None
    above = scores_above(softmax) - {softmax}
    scores = find_scores(softmax, above)
    if scores is None:
        return None
    if isinstance(scores, Decline):
        return check_transformed(sorted(above)) or scores
    transformed = check_transformed((softmax, weights.product.node))
    if transformed is not None:
        return transformed
    if weights.active_dropout is not None:
        return Decline(Reason.DROPOUT, f"`{weights.active_dropout}` is active")
    if weights.dropped != (None if scores.sinks is None else scores.column):
        return Decline(Reason.RELATIVE, "the column beside those of the keys is not the one that is dropped")
    attention = _laid_out(softmax, scores, weights)
    return attention if isinstance(attention, Decline) else _check_users(attention)


def _laid_out(softmax: Node, scores: Scores, weights: Weights) -> WrittenOut | Decline:
    """Return the attention with queries, keys and values of rank 4, or the reason why they can't have it."""
    chain = (*weights.path, *scores.path)
    heads = _grouped_heads(scores, chain)
    if heads is None and any(rank_of(node) == 5 for node in chain):
        return Decline(Reason.RANK, "heads have two dims in some of the scores and weights, but not in all")
    heads = heads or _heads(scores.product, weights.product.right, chain)
    factors = _factors(scores, weights, heads, narrow=False)
    if factors is None or len({x.dtype for x in _tensors(factors)}) > 1:
        factors = _factors(scores, weights, heads, narrow=True)
    if factors is None:
        return Decline(Reason.RANK, f"`{scores.product.node}` has {rank_of(scores.product.node)} dims")
    query, key, value = factors
    if any(hasattr(x, "placements") for x in _tensors(factors)):
        return Decline(Reason.PLACEMENT, "written out over DTensors")
    if heads is not None and any(constant(x) is None for x in heads[1:]):
        return Decline(Reason.RANK, f"{' x '.join(map(str, heads[1:]))} heads are no constant")
    if heads is not None and len(heads) == 3 and not known_equal(_heads_of(query), heads[1] * heads[2]):
        return Decline(Reason.RANK, f"`{scores.product.left.node}` has fewer heads than its scores")
    operands = scores.product.left, scores.product.right, weights.product.right
    merged = [x.node for x, before in zip(factors, operands, strict=True) if rank_of(before.node) == 3]
    if heads is not None and not all(_fits(node, heads) for node in (*chain, *merged)):
        return Decline(Reason.RANK, f"`{softmax}` has other batch and heads than its queries")
    steps = [x.node for x in scores.steps if x.node is not None]
    sinks = [] if scores.sinks is None else [scores.sinks]
    reads = (query.node, key.node, value.node, *steps, *sinks)
    path = (*chain, *query.path, *key.path, *value.path, weights.product.node)
    return WrittenOut(softmax, scores, weights, query, key, value, heads, (), reads, path)


def _factors(scores: Scores, weights: Weights, heads: Heads | None, *, narrow: bool) -> tuple[Factor, ...] | None:
    """Return query, key and value of rank 4, if `narrow` before casts to a wider dtype, or None."""
    query, key = (with_heads(x, heads, narrow=narrow) for x in (scores.product.left, scores.product.right))
    value = with_heads(weights.product.right, heads, narrow=narrow)
    return None if query is None or key is None or value is None else (query, _swapped(key), value)


def _tensors(factors: Iterable[Factor]) -> list[Tensor]:
    return [tensor for x in factors if (tensor := tensor_of(x.node)) is not None]


def _swapped(factor: Factor) -> Factor:
    """Return the factor with its last two dims swapped."""
    if factor.views and factor.views[-1] == ("transpose", -2, -1):
        return dataclasses.replace(factor, views=factor.views[:-1])
    return dataclasses.replace(factor, views=(*factor.views, ("transpose", -2, -1)))


def _heads(product: Product, value: Factor, chain: tuple[Node, ...]) -> Heads | None:
    """Return the batch and heads that the first dim merges in tensors of rank 3, or None if all have rank 4.

    Any tensor of rank 4 on the way shows them. Without one, there is one head.
    """
    scores, query = tensor_of(product.node), tensor_of(product.left.node)
    if scores is None or query is None or all(rank_of(node) != 3 for node in chain):
        return None
    if query.dim() == 4:
        return scores.shape[0], scores.shape[1]
    merged: Heads = query.shape[0], 1
    sources = [with_heads(x, merged, narrow=True) for x in (product.left, product.right, value)]
    for node in (*(x.node for x in sources if x is not None), *chain):
        tensor = tensor_of(node)
        if tensor is not None and tensor.dim() == 4 and known_equal(tensor.shape[0] * tensor.shape[1], merged[0]):
            return tensor.shape[0], tensor.shape[1]
    return merged


def _grouped_heads(scores: Scores, chain: tuple[Node, ...]) -> Heads | None:
    """Return the batch, the kv heads and the query heads of each if these are separate dims, else None.

    They must be separate in all scores and weights. Without a dim for the batch, sinks that differ along both dims
    before the queries show that these count heads.
    """
    shapes = [tensor.shape for x in chain if (tensor := tensor_of(x)) is not None]
    if all(len(shape) == 5 for shape in shapes):
        return tuple(shapes[-1][:3])
    if all(len(shape) == 4 for shape in shapes) and _differs_along_both(scores):
        return 1, *shapes[-1][:2]
    return None


def _differs_along_both(scores: Scores) -> bool:
    """Return True if sinks differ along the first dim of scores, and no other tensor that joins scores does."""
    if scores.sinks is None or find_vector(scores.sinks) is not None:
        return False
    others = [tensor for x in scores.steps if x.node is not None and (tensor := tensor_of(x.node)) is not None]
    return not any(x.dim() == 4 and not known_equal(x.shape[0], 1) for x in others)


def _heads_of(query: Factor) -> Size:
    """Return the number of heads of a factor with views."""
    tensor = viewed(query)
    assert tensor is not None
    return tensor.shape[1]


def _fits(node: Node, heads: Heads) -> bool:
    if len(heads) == 3:
        return True  # their factors were checked
    tensor = tensor_of(node)
    return tensor is None or tensor.dim() != 4 or known_shape(tensor.shape[:2], heads)


def _check_users(attention: WrittenOut) -> WrittenOut | Decline:
    """Return the attention, or the reason if other nodes use its scores or a tensor is written too early."""
    chain = {*attention.path}
    log_sums, unread = set[Node](), set[Node]()
    for node in sorted({*attention.scores.path, *attention.weights.path}):
        for user in node.users:
            if user in chain:
                continue
            if not reads_values(user, node):
                unread.update(readers(user, node))
            elif (dead := dead_from(user)) is not None:
                unread.update(dead)
            elif node in written_arguments(user):
                return Decline(Reason.IN_PLACE, f"`{user}` changes `{node}` in place")
            elif not _sums(user, node, attention):
                return Decline(Reason.WEIGHTS_USED, f"`{user}` uses `{node}`")
            else:
                log_sums.add(user)
    attention = dataclasses.replace(attention, log_sums=tuple(sorted(log_sums)), path=(*attention.path, *unread))
    late = next((x for x in attention.reads if x >= attention.place), None)
    if late is not None:
        return Decline(Reason.WEIGHTS_USED, f"`{attention.place}` needs scores before `{late}` is computed")
    writer = _writer(attention)
    if writer is not None:
        return Decline(Reason.WRITTEN, f"`{writer}` writes to a tensor that is read between the products")
    return attention


def _writer(attention: WrittenOut) -> Node | None:
    """Return the first node that may write to a tensor after the program reads it and before the op does, or None."""
    product, chain = attention.weights.product.node, {*attention.path}
    since = [(x, min(user for user in x.users if user in chain)) for x in attention.reads]
    since += [
        (copy, copy)
        for x in (attention.query, attention.key, attention.value)
        for copy in x.path
        if copy is not product
    ]
    for x, start in since:
        tensor = tensor_of(x)
        writer = None if tensor is None else written_between([tensor], start, product)
        if writer is not None:
            return writer
    return None


def _sums(user: Node, node: Node, attention: WrittenOut) -> bool:
    """Return True if `user` is the logsumexp of the softmax's input, which is the lse of attention."""
    tensor = tensor_of(node)
    if op_name(user) != "logsumexp" or tensor is None or attention.scores.sinks is not None or attention.grouped_heads:
        return False
    softmax_inputs = set()  # nodes with the values of softmax's input
    for x in attention.scores.path:
        if subtracts_maximum(x) is not None:
            break
        softmax_inputs.add(x)
        if op_name(x) not in CASTS | COPIES | RESHAPES:
            break
    return node in softmax_inputs and is_last_dim(argument(user, 1, "dim"), tensor.dim())
