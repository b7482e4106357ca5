"""LoRA beside a projection of latents, where it is not merged: `c W + s (c A) B` is a projection, too.

Hu et al., arXiv 2106.09685. A sum of products with the same latents is taken apart here, and absorbed term by term: the
query becomes `q W_uk + s (q B_uk) A`, and neither `B A` nor anything of the latents' length is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.fx import Node

from tatten.passes.calls import argument, op_name
from tatten.passes.mutation import writes
from tatten.passes.no_effect import inactive_dropout
from tatten.passes.symbolic import known_shape, tensor_of
from tatten.passes.views import Part, Walk

if TYPE_CHECKING:
    from tatten.passes.projection import Projection

Find = Callable[[Node, Sequence[Part | None]], "Projection | None"]


@dataclass(frozen=True)
class Adapter:
    """What is added to a projection: `factor` times the product of latents with `down`'s weight and `up`'s.

    Attributes:
        up: the outer product, whose `latent` is the inner one.
        path: the nodes from the sum to the inner product, and dropout before that.
    """

    down: Projection
    up: Projection
    factor: float
    path: tuple[Node, ...]


def terms_of(node: Node) -> tuple[Node, Node] | None:
    """The tensors of which `node` is the sum, if it is one that broadcasts neither."""
    if op_name(node) != "add" or len(node.args) != 2 or node.kwargs or writes(node):
        return None
    base, added = node.args
    whole = tensor_of(node)
    if not isinstance(base, Node) or not isinstance(added, Node) or whole is None:
        return None
    terms = [tensor_of(x) for x in (base, added)]
    alike = all(x is not None and x.dtype == whole.dtype and known_shape(x.shape, whole.shape) for x in terms)
    return (base, added) if alike else None


def adapter_of(node: Node, parts: Sequence[Part | None], product_of: Find) -> Adapter | None:
    """The two products, one of the other, that `node` is, maybe times a number; `product_of` finds a single one."""
    factor, path, outer = 1.0, list[Node](), node
    if op_name(node) == "mul" and len(node.args) == 2 and not node.kwargs and not writes(node):
        numbers = [x for x in node.args if isinstance(x, int | float)]
        tensors = [x for x in node.args if isinstance(x, Node)]
        if len(numbers) != 1 or len(tensors) != 1:
            return None
        factor, path, outer = float(numbers[0]), [node], tensors[0]
    up = product_of(outer, parts)
    down = None if up is None else product_of(up.latent.here, up.latent.parts)
    if up is None or down is None:
        return None
    path += [*up.path, *down.path]
    latent = down.latent
    while op_name(latent.here) == "dropout" and inactive_dropout(latent.here) and not writes(latent.here):
        path.append(latent.here)
        latent = Walk(latent.here.all_input_nodes[0], latent.parts)
    return Adapter(dataclasses.replace(down, latent=latent), up, factor, tuple(path))


def adds_bias(product: Node) -> bool:
    return op_name(product) == "linear" and argument(product, 2, "bias") is not None
