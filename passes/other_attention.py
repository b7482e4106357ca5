"""Find attention of forms that are never rewritten: written out as matrix products, or inside larger ops.

The report says what would help.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch
from torch.fx import Graph, Node

from tatten.passes.calls import op_name, reached
from tatten.passes.eligible import check_transformed
from tatten.passes.findings import Declined, source_location
from tatten.passes.flex import is_flex
from tatten.passes.metadata import reads_values
from tatten.passes.op_names import CASTS, CATS, COPIES, MATMULS, REORDERS, RESHAPES, STRETCHES
from tatten.passes.reasons import Decline, Reason
from tatten.passes.symbolic import known_equal, tensor_of

SOFTMAX = {"softmax", "_softmax", "special_softmax"}
EXP = {"exp", "exp_", "exp2"}
LOG_SUMS = {"logsumexp", "log_softmax", "_log_softmax", "special_log_softmax"}
PRODUCTS = MATMULS | {"baddbmm", "mm", "addmm", "einsum", "tensordot"}
NOT_SCORES = {
    "linear",
    "conv1d",
    "conv2d",
    "embedding",
    "scaled_dot_product_attention",
}  # a search for scores ends here
WITH_PROJECTIONS = {"multi_head_attention_forward", "_native_multi_head_attention", "_transformer_encoder_layer_fwd"}

# Ops between a softmax and the product with values. Weights may be scaled or dropped, but keep their keys.
CARRIES = {
    *(STRETCHES | RESHAPES | REORDERS | COPIES | CASTS),
    *("movedim", "getattr", "getitem", "slice", "narrow", "split", "chunk"),
    *("mul", "mul_", "imul", "div", "div_", "truediv", "itruediv"),
    *("where", "masked_fill", "masked_fill_", "nan_to_num", "nan_to_num_", "dropout", "dropout_"),
}


def find_other_attention(graph: Graph, known: Container[Node]) -> Iterator[Declined]:
    """Yield the attention of forms that are never rewritten, in order.

    A softmax is attention if its scores are a matrix product of two activations, and it is multiplied by a third. A
    router, a classifier or a sampler takes the softmax of a product with a parameter, or doesn't multiply the result.

    Args:
        graph: the graph.
        known: softmaxes and calls of attention that other passes handle.
    """
    for node in graph.nodes:
        name = op_name(node)
        if is_flex(node):
            if node in known:
                continue
            yield _declined(node, Decline(Reason.FLEX_ATTENTION, "a call to flex_attention"))
        elif name in WITH_PROJECTIONS:
            yield _declined(node, Decline(Reason.MULTIHEAD, f"`{name}` projects and attends in one call"))
        elif (name in SOFTMAX or name in EXP) and node not in known:
            attention = _written_out(node, name)
            if attention is not None:
                yield attention


def _written_out(softmax: Node, name: str) -> Declined | None:
    users = sorted({user for node in _weights(softmax) for user in node.users})
    output = next((user for user in users if _multiplies_activations(user)), None)
    normalised = name in SOFTMAX or any(op_name(user) == "sum" for user in users) or _subtracts_log_sum(softmax)
    if output is None or not normalised:
        return None
    scores = scores_above(softmax)
    if softmax not in scores:
        return None
    transformed = check_transformed((softmax, output))
    if transformed is not None:
        return _declined(output, transformed)
    detail = f"attention written out: {'softmax' if name in SOFTMAX else 'exp over its sum'} of a matrix product"
    beyond = []
    if any(op_name(node) in ("tanh", "tanh_") for node in scores):
        beyond.append("a soft cap (tanh of the scores)")
    if any(_adds_a_column(node, scores, softmax) for node in scores):
        beyond.append("sinks (logits beside those of the keys)")
    if beyond:
        return _declined(output, Decline(Reason.BEYOND_SDPA, f"{detail}, with {' and '.join(beyond)}"))
    return _declined(output, Decline(Reason.NO_SDPA, detail))


def _declined(output: Node, decline: Decline) -> Declined:
    """Return the finding for attention; `output` is the node of its output."""
    return Declined(source_location(output), "", decline)


def _subtracts_log_sum(exp: Node) -> bool:
    """Return True if this is `exp` of a `log_softmax`, or of scores minus their `logsumexp`, maybe through a view."""
    sources = exp.all_input_nodes
    for _ in range(3):
        if any(op_name(node) in LOG_SUMS for node in sources):
            return True
        sources = [source for node in sources for source in node.all_input_nodes]
    return False


def _weights(softmax: Node) -> set[Node]:
    """Return the softmax and the nodes that are computed from it before the product with values."""
    return reached(softmax, lambda node: [user for user in node.users if op_name(user) in CARRIES])


def scores_above(softmax: Node) -> set[Node]:
    """Return the products of activations above a softmax, and the nodes from them down to the softmax."""
    above = reached(softmax, lambda node: () if op_name(node) in PRODUCTS | NOT_SCORES else node.all_input_nodes)
    scores: set[Node] = set()
    for node in sorted(above):
        if _multiplies_activations(node) or any(x in scores and reads_values(node, x) for x in node.all_input_nodes):
            scores.add(node)
    return scores


def _multiplies_activations(node: Node) -> bool:
    """Return True if this is a matrix product without a parameter."""
    return op_name(node) in PRODUCTS and not any(_is_parameter(factor) for factor in node.all_input_nodes)


def _is_parameter(node: Node) -> bool:
    """Return True if a node is a parameter, or a view or cast of one."""
    while len(node.all_input_nodes) == 1 and not isinstance(tensor_of(node), torch.nn.Parameter):
        (node,) = node.all_input_nodes
    return isinstance(tensor_of(node), torch.nn.Parameter)


def _adds_a_column(node: Node, scores: set[Node], softmax: Node) -> bool:
    """Return True if other logits are concatenated to scores, and the softmax still includes them.

    Relative positions also pad scores, but only to shift them.
    """
    joined, weights = tensor_of(node), tensor_of(softmax)
    return (
        op_name(node) in CATS
        and not scores.issuperset(node.all_input_nodes)
        and joined is not None
        and weights is not None
        and known_equal(joined.shape[-1], weights.shape[-1])
    )
