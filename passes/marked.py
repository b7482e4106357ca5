"""Masks that are made of indices: one number everywhere but at the keys that the indices name.

A model that selects keys fills a tensor with one number and scatters another to its indices. It compares, inverts and
casts the result, repeats it, and joins it with its other masks. Each step back keeps an upper bound: outside the keys
that are named there is one number. What there is at these keys is followed too, as far as it is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from tatten.ops.layout import HEADS
from tatten.passes.calls import argument
from tatten.passes.drafts import Drafting, Drafts, is_draft, number_at
from tatten.passes.mutation import written_between
from tatten.passes.stored import Stored, stored_at
from tatten.passes.symbolic import known_equal, known_tensor, rank_of, tensor_of
from tatten.passes.views import begin, way_back

MAX_DEPTH = 48


@dataclass(frozen=True)
class Marked:
    """A tensor `[..., rows, keys]` that is one number wherever indices don't name the key.

    Attributes:
        indices: `[..., rows, picks]`, a node or draft with as many dims; a size of 1 stands for any.
        outside: the number at keys that no index of their row names.
        inside: what is at the keys that are named: one number, a tensor that has the same there, or None if only the
            tensor itself tells.
        block: how many neighbouring keys an index names.
        repeats: how many neighbouring heads share one head of the indices.
        counts: whether `inside`, which is 1, stands for any integer from 1 on.
        in_range: whether each index is known to name a key.
        path: the nodes from the one that is filled to the tensor.
        written: the node that is filled, and the one that scatters into it in place.
        reads: the nodes that are read in place of the tensor, each with the node that read it.
    """

    indices: Node
    outside: float
    inside: float | Node | None
    block: int = 1
    repeats: int = 1
    counts: bool = False
    in_range: bool = True
    path: tuple[Node, ...] = ()
    written: tuple[tuple[Node, Node], ...] = ()
    reads: tuple[tuple[Node, Node], ...] = ()

    def after(self, node: Node, *others: Node, **changes: Any) -> Marked:
        """The same after one step more, `node`, which also reads `others`."""
        read = tuple((x, node) for x in others)
        return dataclasses.replace(self, path=(*self.path, node), reads=(*self.reads, *read), **changes)


class Reading:
    """The reading of one mask, for attention at `place`.

    Attributes:
        place: the node before which attention is computed.
        draft: makes drafts for it.
    """

    def __init__(self, place: Node, drafts: Drafts, step: Callable[[Reading, Node], Marked | None]) -> None:
        """Read masks by `step`, which reads a node that is no view of another."""
        self.place = place
        self.draft = Drafting(drafts, place)
        self._step = step
        self._depth = 0
        self._read: dict[Node, Marked | None] = {}

    def at(self, reader: Node) -> Node:
        """Where a node reads: a draft is inserted at `place`."""
        return self.place if is_draft(reader) else reader

    def number(self, x: Any, reader: Node) -> float | None:
        """The number that `reader` gets; None for others."""
        return number_at(x, reader, self.place)

    def read(self, node: Any, reader: Node) -> Marked | None:
        """Read a tensor as `reader` finds it."""
        if not isinstance(node, Node) or not 2 <= rank_of(node) <= 5 or self._depth == MAX_DEPTH:
            return None
        reader = self.at(reader)
        writer = written(node, node, reader)
        if writer is not None:
            once = argument(writer, 0, "self") is node and not written(node, writer, reader)
            return self._step(self, writer) if once else None
        if node not in self._read:
            self._depth += 1
            self._read[node] = self._through_views(node)
            self._depth -= 1
        return self._read[node]

    def _through_views(self, node: Node) -> Marked | None:
        """Read a tensor through repeated heads and new dims, if there are any."""
        stored = _furthest(node)
        if stored is None:
            return self._step(self, node)
        if stored.written_before(self.place) is not None:
            return None
        marked = self.read(stored.base, stored.path[-1] if stored.path else self.place)
        if marked is None or (marked.repeats > 1 and stored.dims != (0, 1, 2, 3)):
            return None

        def view(x: Node) -> Node:
            return dataclasses.replace(stored, base=x, path=()).as_attention_takes_it(self.draft)

        inside = marked.inside
        if isinstance(inside, Node):
            inside = view(inside) if stored.repeats == 1 else None
        return dataclasses.replace(
            marked,
            indices=view(marked.indices),
            inside=inside,
            repeats=marked.repeats * stored.repeats,
            path=(*marked.path, *reversed(stored.path)),
        )

    def operand(self, x: Any, node: Node) -> Marked | None:
        """Read an operand of a pointwise op, if it has all columns of the result, and rows that may broadcast."""
        tensor, result = tensor_of(x), known_tensor(node)
        if tensor is None or tensor.dim() != result.dim() or not known_equal(tensor.shape[-1], result.shape[-1]):
            return None
        marked = self.read(x, node)
        if marked is not None and marked.repeats > 1 and not known_equal(tensor.shape[HEADS], result.shape[HEADS]):
            return None
        return marked

    def aligned(self, x: Any, node: Node) -> Node | None:
        """Another operand of a pointwise op, with as many dims as the result."""
        if not isinstance(x, Node) or not 0 <= rank_of(x) <= rank_of(node):
            return None
        return self.draft.views(x, [("unsqueeze", 0)] * (rank_of(node) - rank_of(x)))


def _furthest(node: Node) -> Stored | None:
    """The tensor before its heads were repeated and dims of size 1 were added; None if it is `node`."""
    if rank_of(node) != 4:
        return None
    found = [x for walk in way_back(begin(node)) if (x := stored_at(walk)) is not None]
    last = next((x for x in reversed(found) if not x.shared and x.rows is None and _keeps_keys(x)), None)
    return None if last is None or last.base is node else last


def _keeps_keys(stored: Stored) -> bool:
    return stored.dims[-1] == rank_of(stored.base) - 1


def written(node: Node, start: Node, reader: Node) -> Node | None:
    """The first node after `start` that may write to `node` before `reader` gets it."""
    tensor = tensor_of(node)
    if is_draft(node) or is_draft(reader) or tensor is None:
        return None
    return written_between([tensor], start, reader)


def on_one_device(a: Node, b: Node) -> bool:
    return known_tensor(a).device == known_tensor(b).device
