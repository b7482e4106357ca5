"""Caches of sliding windows that a program rolls: they are moved in place instead.

`StaticSlidingWindowLayer` of transformers, once it is full, drops its first slot for each token:

    moved = cache.roll(-1, dims=-2); moved[:, :, torch.tensor([-1])] = new; cache.copy_(moved)

Compiled that is two kernels, and four times the bytes of the cache, where attention reads them once.
`tatten::slide_` is one kernel and two times the bytes. What the cache holds afterwards is the same to the bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

from tatten.ops.layout import LENGTH
from tatten.ops.storage import same_storage
from tatten.passes.calls import argument, op_name
from tatten.passes.mutation import written_between
from tatten.passes.symbolic import constant, tensor_of

# On a CPU a call of the op takes about 15 us more than generated code, which small caches don't save: with 2 MB it was
# slower than Inductor's code, from 8 MB on it takes 0.19 to 0.66 of the time (2 cores, `benchmarks/sliding.py`).
LEAST_BYTES = {"cuda": 1, "cpu": 1 << 23}


@dataclass(frozen=True)
class Slide:
    """A cache that is rolled by one slot, of which the last is replaced.

    Attributes:
        cache: `[batch, heads, slots, head_dim]`.
        new: `[batch, heads, 1, head_dim]`.
        nodes: what does it, the last one first.
    """

    cache: Node
    new: Node
    nodes: tuple[Node, ...]


def find_slides(graph: Graph) -> list[Slide]:
    """Find the caches that a graph rolls, and that are large enough. Changes nothing."""
    return [found for node in graph.nodes if op_name(node) == "copy_" and (found := _slide(node)) is not None]


def _slide(copy: Node) -> Slide | None:
    if len(copy.args) != 2 or any(copy.kwargs.values()):
        return None
    cache, rolled = copy.args
    if not isinstance(cache, Node) or not isinstance(rolled, Node) or not _rolls(rolled, cache):
        return None
    puts = [user for user in rolled.users if user is not copy]
    written = _written_last(puts[0], rolled) if len(puts) == 1 and rolled < puts[0] < copy else None
    if written is None:
        return None
    new, index = written
    at, of = tensor_of(cache), tensor_of(new)
    if at is None or of is None or not _movable(at, of):
        return None
    if written_between([at], rolled, copy) is not None or written_between([of], puts[0], copy) is not None:
        return None
    return Slide(cache, new, (copy, *puts, *([index] if len(index.users) == 1 else []), rolled))


def _rolls(node: Node, cache: Node) -> bool:
    """Whether a node is `cache.roll(-1, dims=-2)`."""
    given = argument(node, 1, "shifts"), argument(node, 2, "dims")
    shift, dim = (x[0] if isinstance(x, (list, tuple)) and len(x) == 1 else x for x in given)
    return op_name(node) == "roll" and node.args[0] is cache and shift == -1 and dim in (LENGTH, LENGTH - 4)


def _written_last(node: Node, rolled: Node) -> tuple[Node, Node] | None:
    """What a node writes to the last slots of `rolled`, and the index of these; None if that isn't all it does."""
    if op_name(node) != "setitem" or node.args[0] is not rolled:
        return None
    at, new = node.args[1:]
    if not isinstance(new, Node) or not isinstance(at, tuple) or len(at) != 3 or at[:2] != (slice(None), slice(None)):
        return None
    index = at[2]
    if not isinstance(index, Node) or op_name(index) != "tensor" or index.args[0] not in ([-1], (-1,)):
        return None
    value = tensor_of(index)
    return None if value is None or written_between([value], index, node) is not None else (new, index)


def _movable(cache: Tensor, new: Tensor) -> bool:
    """Whether the op takes these, a dense cache of constant sizes and other memory of the same kind, and it pays."""
    sizes = [constant(n) for n in (*cache.shape, *new.shape)]
    return (
        cache.dim() == 4
        and None not in sizes
        and sizes[4:] == [*sizes[:2], 1, sizes[3]]
        and cache.nbytes >= LEAST_BYTES.get(cache.device.type, math.inf)
        and cache.is_contiguous()
        and (cache.dtype, cache.device) == (new.dtype, new.device)
        and not same_storage(cache, new)
        and not (cache.requires_grad or new.requires_grad or cache.dtype.is_complex)
        and not any(hasattr(x, "placements") for x in (cache, new))
    )


def apply_slide(found: Slide) -> None:
    """Move the cache in place."""
    copy = found.nodes[0]
    with copy.graph.inserting_before(copy):
        op = copy.graph.call_function(torch.ops.tatten.slide_.default, (found.cache, found.new))
    op.meta.update({k: v for k, v in copy.meta.items() if k != "example_value"})
    copy.replace_all_uses_with(found.cache)
    for node in found.nodes:
        node.graph.erase_node(node)
