"""Find large results in a graph, for which Inductor must not combine kernels."""

from __future__ import annotations

from torch import Tensor
from torch.fx import GraphModule, Node

from tatten.passes.calls import nodes_of
from tatten.passes.symbolic import constant, same_storage, tensor_of

# Inductor (PyTorch 2.11 to 2.15) runs a part of a combined kernel several times if another part has more than 65535
# blocks in a second dim of its grid. Blocks of a second dim have at least 16 elements, so that no part has as many.
MOST_ELEMENTS = 1 << 20


def has_large_results(gm: GraphModule) -> bool:
    """Return True if a node, also in the body of a higher-order operator, computes a tensor that is large or dynamic.

    Views and results in place don't count, and neither do tensors with one dim that is longer than 1.
    """
    return any(_is_large(node) for node in nodes_of(gm))


def _is_large(node: Node) -> bool:
    result = tensor_of(node)
    if result is None or node.op in ("placeholder", "get_attr"):
        return False
    sizes = [constant(n) for n in result.shape]
    if None not in sizes:
        numel, long_dims = result.numel(), sum(n != 1 for n in sizes)
        if numel <= MOST_ELEMENTS or long_dims < 2:
            return False
    return not any(_is_view(result, tensor_of(x)) for x in node.all_input_nodes)


def _is_view(result: Tensor, x: Tensor | None) -> bool:
    return x is not None and same_storage(result, x)
