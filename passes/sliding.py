"""Find caches of sliding windows that a program rolls, and move them in place instead.

`StaticSlidingWindowLayer` of transformers, once it is full, drops its first slot for each token:

    moved = cache.roll(-1, dims=-2); moved[:, :, torch.tensor([-1])] = new; cache.copy_(moved)

Compiled, this takes two kernels that move four times the bytes of the cache. `tatten::slide_` moves little more than
two times the bytes. The contents of the cache are the same to the bit.
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

# On a CPU a call of the op takes about 15 us more than generated code. With 2 MB it is slower than Inductor's code, and
# from 8 MB on it takes 0.19 to 0.66 of the time (2 cores, `benchmarks/sliding.py`).
LEAST_BYTES = {"cuda": 1, "cpu": 1 << 23}  # on a GPU it always pays


@dataclass(frozen=True)
class Slide:
    """A cache that is rolled by one slot and gets a new last slot.

    Attributes:
        rolled: the node `cache.roll(-1, dims=-2)` of a cache `[batch, heads, slots, head_dim]`.
        index, put: the index of the last slot, and the node that writes `[batch, heads, 1, head_dim]` there.
        copy: the node that copies the result back to the cache.
    """

    rolled: Node
    index: Node
    put: Node
    copy: Node


def find_slides(graph: Graph, movers: Sequence[Node]) -> list[Slide]:
    """Find the caches that a graph rolls, and that are large enough.

    Args:
        graph: a Dynamo graph.
        movers: the result of `tatten.passes.mutation.movers` for the graph.
    """
    slides = [_slide(node) for node in graph.nodes if op_name(node) == "copy_" and mover_of(node, movers) is None]
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
    old, new = tensor_of(cache), tensor_of(put.args[2])
    if old is None or new is None or not _movable(old, new):
        return None
    if written_between([old], rolled, copy) is not None or written_between([new], put, copy) is not None:
        return None
    return Slide(rolled, index, put, copy)


def _rolls(node: Node, cache: Node) -> bool:
    """Return True if a node is `cache.roll(-1, dims=-2)`."""
    arguments = argument(node, 1, "shifts"), argument(node, 2, "dims")
    shift, dim = (x[0] if isinstance(x, (list, tuple)) and len(x) == 1 else x for x in arguments)
    return op_name(node) == "roll" and source_of(node) is cache and shift == -1 and dim in (LENGTH, LENGTH - 4)


def _last_of(put: Node, rolled: Node) -> Node | None:
    """Return the index of a node that writes to the last slot of `rolled`, or None for another node."""
    if op_name(put) != "setitem" or put.args[0] is not rolled:
        return None
    key = put.args[1]
    if not isinstance(key, tuple) or len(key) != 3 or key[:2] != (slice(None), slice(None)):
        return None
    index = key[2]
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
