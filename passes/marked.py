"""Masks that are made from indices: one number at all keys that no index names.

A model that selects keys fills a tensor with one number and scatters another number to its indices. It compares,
inverts, casts and repeats the result, and joins it with other masks. Each step back keeps an invariant: the tensor is
one number at all keys that are not named. Its contents at the named keys are followed as far as they are known.
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
from tatten.passes.views import begin_walk, walks_back

MAX_DEPTH = 48


@dataclass(frozen=True)
class Marked:
    """A tensor `[..., rows, keys]` that is one number at all keys that indices don't name.

    Attributes:
        indices: `[..., rows, picks]`, a node or draft with the same number of dims; a dim of size 1 broadcasts.
        outside: the number at keys that no index of their row names.
        inside: the contents at the named keys: one number, a tensor that is equal there, or None if they are unknown.
        block: number of neighbouring keys that an index names.
        repeats: number of neighbouring heads that share one head of the indices.
        counts: whether `inside`, which is 1, stands for any integer from 1 on.
        in_range: whether each index is known to name a key.
        path: the nodes from the filled tensor to this one.
        written: the filled node and the node that scatters into it in place.
        reads: the nodes that are read in place of the tensor, each with the node that read it in the program.
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
        """Return the tensor after one more step, `node`, which also reads `others`."""
        read = tuple((x, node) for x in others)
        return dataclasses.replace(self, path=(*self.path, node), reads=(*self.reads, *read), **changes)


class Reading:
    """The reading of one mask, for attention at `place`.

    Attributes:
        place: the node before which attention is computed.
        draft: makes drafts for it.
    """

    def __init__(self, place: Node, drafts: Drafts, step: Callable[[Reading, Node], Marked | None]) -> None:
        """Make a reading that calls `step` for nodes that are not views."""
        self.place = place
        self.draft = Drafting(drafts, place)
        self._step = step
        self._depth = 0
        self._read: dict[Node, Marked | None] = {}

    def at(self, reader: Node) -> Node:
        """Return the node at whose place `reader` runs: a draft is inserted at `place`."""
        return self.place if is_draft(reader) else reader

    def number(self, x: Any, reader: Node) -> float | None:
        """Return the number that `reader` gets, or None for anything else."""
        return number_at(x, reader, self.place)

    def read(self, node: Any, reader: Node) -> Marked | None:
        """Read a tensor at the time when `reader` reads it."""
        if not isinstance(node, Node) or not 2 <= rank_of(node) <= 5 or self._depth == MAX_DEPTH:
            return None
        reader = self.at(reader)
        writer = written(node, node, reader)
        if writer is not None:
            only_write = argument(writer, 0, "self") is node and not written(node, writer, reader)
            return self._step(self, writer) if only_write else None
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
            return dataclasses.replace(stored, base=x, path=()).as_operand(self.draft)

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
        """Read an operand of a pointwise op. It must have all columns of the result; its rows may broadcast."""
        tensor, result = tensor_of(x), known_tensor(node)
        if tensor is None or tensor.dim() != result.dim() or not known_equal(tensor.shape[-1], result.shape[-1]):
            return None
        marked = self.read(x, node)
        if marked is not None and marked.repeats > 1 and not known_equal(tensor.shape[HEADS], result.shape[HEADS]):
            return None
        return marked

    def aligned(self, x: Any, node: Node) -> Node | None:
        """Draft another operand of a pointwise op with as many dims as the result."""
        if not isinstance(x, Node) or not 0 <= rank_of(x) <= rank_of(node):
            return None
        return self.draft.views(x, [("unsqueeze", 0)] * (rank_of(node) - rank_of(x)))


def _furthest(node: Node) -> Stored | None:
    """Return the tensor before its heads were repeated and dims of size 1 were added, or None if it is `node`."""
    if rank_of(node) != 4:
        return None
    candidates = [x for walk in walks_back(begin_walk(node)) if (x := stored_at(walk)) is not None]
    last = next((x for x in reversed(candidates) if not x.shared and x.rows is None and _keeps_keys(x)), None)
    return None if last is None or last.base is node else last


def _keeps_keys(stored: Stored) -> bool:
    return stored.dims[-1] == rank_of(stored.base) - 1


def written(node: Node, start: Node, reader: Node) -> Node | None:
    """Return the first node after `start` that may write to `node` before `reader` reads it, or None."""
    tensor = tensor_of(node)
    if is_draft(node) or is_draft(reader) or tensor is None:
        return None
    return written_between([tensor], start, reader)


def on_one_device(a: Node, b: Node) -> bool:
    return known_tensor(a).device == known_tensor(b).device
