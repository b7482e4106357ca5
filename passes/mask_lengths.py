"""Find masks that leave one sequence its first keys: `arange(keys) < length`, in any spelling.

`tatten::decode_attention` then takes the length, and reads neither the mask nor a list of its blocks. Microseconds with
a mask whose blocks are listed, and with a length: 7.6 and 7.1 for 1000 keys, 11.0 and 10.1 for 4096, 15.7 and 14.4 for
8000 (H200, bfloat16, 8192 slots, 32 query heads and 8 kv heads of 128). For several sequences, neither is always
faster: 4 of 1000 keys take 11.6 and 12.8, 4 of 500 to 1500 keys 13.6 and 10.2, 8 of 1024 to 2048 keys 21.5 and 21.9. On
a CPU, 4 sequences take 1 to 15 % longer with lengths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from tatten.ops.layout import BATCH
from tatten.passes.calls import argument, only_adds_dims, op_name
from tatten.passes.drafts import Drafting
from tatten.passes.literals import number_of
from tatten.passes.mutation import may_alias, written_in
from tatten.passes.op_names import CASTS, COPIES, INVERTS, RESHAPES, STRETCHES
from tatten.passes.scattered import INTEGER_CASTS
from tatten.passes.sdpa import SdpaCall
from tatten.passes.symbolic import constant, in_memory, known_equal, known_tensor, tensor_of

MOST_KEYS = 1 << 30  # keys, and differences between a length and a bound, fit into int32
INTEGERS = (torch.int32, torch.int64)
NOTS = INVERTS | {"__invert__"}
MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
KEEPS_ORDER = COPIES | STRETCHES | RESHAPES | CASTS | INTEGER_CASTS


@dataclass(frozen=True)
class MaskLength:
    """A length that a mask compares with the numbers of keys.

    Attributes:
        compared: the comparison. The bound may be written after it.
        bound: an integer.
        added: the difference between the length and the bound.
        keys: the number of keys.
    """

    compared: Node
    bound: Node
    added: int
    keys: int

    def as_operand(self, draft: Drafting) -> Node:
        """Draft the length `[1]`, from 0 to the number of keys. It is computed before it could overflow."""
        length = draft("clamp", self.bound, -self.added, self.keys - self.added)
        return draft("reshape", draft("add", length, self.added) if self.added else length, -1)


@dataclass(frozen=True)
class _Marks:
    """The contents of a tensor of bools, one for each key.

    Attributes:
        length: the number of the first keys, which are marked.
        inverted: whether the other keys are marked instead.
        read: the nodes that the contents come from.
    """

    length: MaskLength
    inverted: bool
    read: tuple[Node, ...]


def find_mask_lengths(graph: Graph) -> dict[Node, MaskLength]:
    """Find the masks of a graph without movers that mark the first keys, and are never written."""
    marks = dict[Node, _Marks]()
    for node in graph.nodes:
        name = op_name(node)
        source = argument(node, 0, "input")
        of_node = marks.get(source) if isinstance(source, Node) else None
        if name in MIRRORED:
            of_node = _compare(node)
        elif of_node is not None and name in NOTS:
            of_node = replace(of_node, inverted=not of_node.inverted)
        elif of_node is not None and not _keeps_order(node):
            of_node = None
        if of_node is not None and _has_one_for_each(node, of_node.length.keys, (torch.bool,), of_node.length.bound):
            marks[node] = replace(of_node, read=(*of_node.read, node))
    masks = {node: x for node, x in marks.items() if not x.inverted}
    written = written_in(graph) if masks else None
    if written is None:
        return {}
    read = {x for mask in masks.values() for x in mask.read}
    unwritten = {x for x in read if not any(may_alias(y, [known_tensor(x)]) for y in written)}
    return {node: x.length for node, x in masks.items() if unwritten.issuperset(x.read)}


def length_of(call: SdpaCall, masks: Mapping[Node, MaskLength]) -> MaskLength | None:
    """Return the length behind the mask of a call for one sequence, or None.

    Args:
        call: the call.
        masks: the result of `find_mask_lengths`.
    """
    query = tensor_of(call.query)
    if call.attn_mask is None or query is None or call.picks is not None or not known_equal(query.shape[BATCH], 1):
        return None
    return masks.get(call.attn_mask)


def _compare(node: Node) -> _Marks | None:
    """Return the marks of a comparison between consecutive numbers and a bound, or None for other comparisons."""
    if len(node.args) != 2 or node.kwargs:
        return None
    for relation, numbers, bound in ((op_name(node), *node.args), (MIRRORED[op_name(node)], *node.args[::-1])):
        read = list[Node]()
        first, keys = _first_number(numbers, read), _keys(numbers)
        if first is not None and keys is not None and isinstance(bound, Node) and _is_bound(bound, numbers):
            # The keys up to a bound are one more than the keys below it.
            length = MaskLength(node, bound, (relation in ("le", "gt")) - first, keys)
            return _Marks(length, relation in ("ge", "gt"), tuple(read))
    return None


def _keys(numbers: object) -> int | None:
    """Return the size of the last dim of a node if it is constant and a length up to it can be computed, or None."""
    tensor = tensor_of(numbers)
    keys = constant(tensor.shape[-1]) if tensor is not None and tensor.dim() > 0 else None
    return keys if keys is not None and 1 < keys < MOST_KEYS else None


def _first_number(node: object, read: list[Node]) -> int | None:
    """Return the first of consecutive numbers, or None if a node has other contents or an earlier one might overflow.

    The nodes that hold the numbers are added to `read`.
    """
    added, keys, sums = 0.0, _keys(node), list[float]()
    while isinstance(node, Node) and keys is not None and _has_one_for_each(node, keys, INTEGERS):
        read.append(node)
        sums.append(added)
        name = op_name(node)
        if name == "arange":
            start = _start(node)
            first = math.nan if start is None else start + added
            fits = all(abs(first - x) < MOST_KEYS for x in sums)  # the first number of each node
            return int(first) if fits and first == int(first) else None
        if name in ("add", "sub") and not node.kwargs and len(node.args) == 2:
            number = number_of(node.args[1], node)
            if number is None:
                return None
            added += number if name == "add" else -number
        elif not _keeps_order(node):
            return None
        node = argument(node, 0, "input")
    return None


def _start(node: Node) -> float | None:
    """Return the first number of an `arange` with steps of one, or None."""
    if "end" in node.kwargs or "start" in node.kwargs or "step" in node.kwargs:
        return None
    start, step = node.args[0] if len(node.args) > 1 else 0, node.args[2] if len(node.args) > 2 else 1
    return number_of(start, node) if number_of(step, node) == 1 else None


def _has_one_for_each(node: Node, keys: int, dtypes: Sequence[torch.dtype], beside: Node | None = None) -> bool:
    """Return True if a node has one element for each key, along its last dim, of one of these dtypes.

    It has to be on the device of `beside`.
    """
    tensor = tensor_of(node)
    if tensor is None or in_memory(tensor) is not tensor or "out" in node.kwargs:
        return False
    if beside is not None and tensor.device != known_tensor(beside).device:
        return False
    *others, last = tensor.shape or (0,)
    return tensor.dtype in dtypes and known_equal(last, keys) and all(known_equal(n, 1) for n in others)


def _keeps_order(node: Node) -> bool:
    """Return True for views and copies. If they keep the number of elements, they keep the order."""
    return op_name(node) in KEEPS_ORDER or (op_name(node) == "getitem" and only_adds_dims(node.args[1]))


def _is_bound(node: Node, numbers: object) -> bool:
    """Return True if a node is one integer on the device of the numbers.

    A tensor without dims would be cast to the dtype of the numbers.
    """
    bound, compared = tensor_of(node), tensor_of(numbers)
    if bound is None or compared is None or in_memory(bound) is not bound or bound.dtype not in INTEGERS:
        return False
    keeps_dtype = bound.dim() > 0 or bound.dtype in (compared.dtype, torch.int32)
    return keeps_dtype and bound.device == compared.device and all(known_equal(n, 1) for n in bound.shape)
