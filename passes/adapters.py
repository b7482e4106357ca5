"""LoRA beside a projection of latents, where it is not merged: `c W + s (c A) B` is a projection, too.

Hu et al., arXiv 2106.09685. A sum of products with the same latents is taken apart here, and absorbed term by term: the
query becomes `q W_uk + s (q B_uk) A`, and neither `B A` nor anything of the latents' length is made.
"""

from __future__ import annotations

from torch.fx import Node

from tatten.passes.calls import argument, op_name
from tatten.passes.mutation import inactive_dropout, writes
from tatten.passes.op_names import CASTS, COPIES
from tatten.passes.symbolic import is_input_number, known_shape, number_in, tensor_of


def terms_of(node: Node) -> tuple[Node, Node] | None:
    """The tensors of which `node` is the sum, if it is one that broadcasts neither."""
    if op_name(node) != "add" or len(node.args) != 2 or node.kwargs or writes(node):
        return None
    base, added = node.args
    total = tensor_of(node)
    if not isinstance(base, Node) or not isinstance(added, Node) or total is None:
        return None
    terms = [tensor_of(x) for x in (base, added)]
    alike = all(x is not None and x.dtype == total.dtype and known_shape(x.shape, total.shape) for x in terms)
    return (base, added) if alike else None


def multiple_of(node: Node) -> tuple[float | Node, Node] | None:
    """The number and the tensor of which `node` is the product: 1 and itself if it is none; None if it is of others."""
    if op_name(node) != "mul":
        return 1.0, node
    a, b = node.args if len(node.args) == 2 else (None, None)
    number, tensor = (b, a) if tensor_of(a) is not None else (a, b)
    if not isinstance(tensor, Node) or tensor_of(tensor) is None or node.kwargs or writes(node):
        return None
    if isinstance(number, Node) and is_input_number(number):
        return number, tensor
    known = number_in(number)
    return None if known is None else (known, tensor)


def before_copies(node: Node) -> tuple[Node, tuple[Node, ...]]:
    """The tensor that copies, or dropout which is off, leave as it is, and the nodes that are such."""
    path: tuple[Node, ...] = ()
    while op_name(node) in CASTS | COPIES or inactive_dropout(node):
        source = node.all_input_nodes[0]
        before, after = tensor_of(source), tensor_of(node)
        if before is None or after is None or before.dtype != after.dtype or before.device != after.device:
            break
        if writes(node) or not known_shape(before.shape, after.shape):
            break
        path, node = (*path, node), source
    return node, path


def adds_bias(product: Node) -> bool:
    return op_name(product) == "linear" and argument(product, 2, "bias") is not None
