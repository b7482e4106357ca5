"""Caches of sliding windows that a program rolls: they are moved in place instead.

`StaticSlidingWindowLayer` of transformers, once it is full, drops its first slot for each token:

    moved = cache.roll(-1, dims=-2); moved[:, :, torch.tensor([-1])] = new; cache.copy_(moved)

Compiled that is two kernels, and four times the bytes of the cache, where attention reads them once.
`tatten::slide_` takes two times the bytes, and little more. What the cache holds afterwards is the same to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from tatten.ops.layout import LENGTH
from tatten.ops.slide import slide_op
from tatten.ops.storage import same_storage
from tatten.passes.calls import argument, op_name
from tatten.passes.mutation import mover_of, written_between
from tatten.passes.replace import Inserter, erase_unused_of
from tatten.passes.symbolic import FakeTensor, bytes_of, constant, known_shape, known_tensor, tensor_of
from tatten.passes.views import source_of

# On a CPU a call of the op takes about 15 us more than generated code, which small caches don't save: with 2 MB it was
# slower than Inductor's code, from 8 MB on it takes 0.19 to 0.66 of the time (2 cores, `benchmarks/sliding.py`).
LEAST_BYTES = {"cuda": 1, "cpu": 1 << 23}  # on a GPU it always pays


@dataclass(frozen=True)
class Slide:
    """A cache that is rolled by one slot, of which the last is replaced.

    Attributes:
        rolled: `cache.roll(-1, dims=-2)` of a cache `[batch, heads, slots, head_dim]`.
        index, put: the index of the last slot, and what writes the new one there, `[batch, heads, 1, head_dim]`.
        copy: what copies all of it back to the cache.
    """

    rolled: Node
    index: Node
    put: Node
    copy: Node


def find_slides(graph: Graph, moving: Sequence[Node] = ()) -> list[Slide]:
    """Find the caches that a graph rolls, and that are large enough. Changes nothing.

    Args:
        graph: a graph of Dynamo's.
        moving: what `tatten.passes.mutation.movers` found in it.
    """
    slides = [_slide(node) for node in graph.nodes if op_name(node) == "copy_" and mover_of(node, moving) is None]
    return [x for x in slides if x is not None]


def _slide(copy: Node) -> Slide | None:
    if len(copy.args) != 2 or any(copy.kwargs.values()):
        return None
    cache, rolled = copy.args
    if not isinstance(cache, Node) or not isinstance(rolled, Node) or not _rolls(rolled, cache):
        return None
    puts = [user for user in rolled.users if user is not copy]
    index = _last_of(puts[0], rolled) if len(puts) == 1 and rolled < puts[0] < copy else None
    if index is None:
        return None
    (put,) = puts
    at, of = tensor_of(cache), tensor_of(put.args[2])
    if at is None or of is None or not _movable(at, of):
        return None
    if written_between([at], rolled, copy) is not None or written_between([of], put, copy) is not None:
        return None
    return Slide(rolled, index, put, copy)


def _rolls(node: Node, cache: Node) -> bool:
    """Return True if a node is `cache.roll(-1, dims=-2)`."""
    arguments = argument(node, 1, "shifts"), argument(node, 2, "dims")
    shift, dim = (x[0] if isinstance(x, (list, tuple)) and len(x) == 1 else x for x in arguments)
    return op_name(node) == "roll" and source_of(node) is cache and shift == -1 and dim in (LENGTH, LENGTH - 4)


def _last_of(put: Node, rolled: Node) -> Node | None:
    """The index of a node that writes to the last slots of `rolled`; None if that isn't what it does."""
    if op_name(put) != "setitem" or put.args[0] is not rolled:
        return None
    at = put.args[1]
    if not isinstance(at, tuple) or len(at) != 3 or at[:2] != (slice(None), slice(None)):
        return None
    index = at[2]
    if not isinstance(index, Node) or op_name(index) != "tensor" or argument(index, 0, "data") not in ([-1], (-1,)):
        return None
    value = tensor_of(index)
    return None if value is None or written_between([value], index, put) is not None else index


def _movable(cache: Tensor, new: Tensor) -> bool:
    """Return True if the op supports this cache and these new tokens, and the rewrite pays.

    The cache has to be dense, with constant sizes, and `new` other memory of the same kind.
    """
    sizes = [constant(n) for n in (*cache.shape, *new.shape)]
    size = bytes_of(cache)
    return (
        isinstance(cache, FakeTensor)  # neither a DTensor nor inside a transform of torch.func
        and isinstance(new, FakeTensor)
        and cache.dim() == 4
        and None not in sizes
        and sizes[4:] == [*sizes[:2], 1, sizes[3]]
        and size is not None
        and size >= LEAST_BYTES.get(cache.device.type, math.inf)
        and known_shape(cache.stride(), [math.prod(cache.shape[dim + 1 :]) for dim in range(4)])
        and (cache.dtype, cache.device) == (new.dtype, new.device)
        and not same_storage(cache, new)
        and not (cache.requires_grad or new.requires_grad or cache.dtype.is_complex)
    )


def apply_slide(slide: Slide) -> None:
    """Move the cache in place."""
    copy, put = slide.copy, slide.put
    cache: Any = copy.args[0]
    with copy.graph.inserting_before(copy):
        Inserter(copy)(slide_op(known_tensor(cache).device), cache, put.args[2])
    copy.replace_all_uses_with(cache)
    for node in (copy, put):
        node.graph.erase_node(node)
    erase_unused_of([slide.index, slide.rolled])
