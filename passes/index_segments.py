"""Index keys that a program concatenates only for their scores, such as those of a shared prefix.

A score depends on one key, so each segment is scored where it is stored, and the scores are concatenated. The queries
of all sequences that share a segment then count as queries of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from tatten.ops.layout import BATCH, HEADS, LENGTH
from tatten.passes.index_operands import KEY, before_views
from tatten.passes.masks import size_of
from tatten.passes.products import Factor
from tatten.passes.replace import Inserter
from tatten.passes.segments import find_segments
from tatten.passes.stored import Stored
from tatten.passes.symbolic import constant, known_equal, known_tensor
from tatten.passes.views import Walk


@dataclass(frozen=True)
class KeySegments:
    """Segments of index keys, in order.

    Attributes:
        stored: the segments, each with a row for every sequence, or for every n consecutive sequences.
        batch, q_len: the sizes of the query.
    """

    stored: tuple[Stored, ...]
    batch: int
    q_len: int

    def keys(self, insert: Inserter) -> list[Node]:
        """Insert `[rows, kv_length, dim]` of each segment."""
        return [insert("squeeze", x.as_operand(insert), 1) for x in self.stored]

    def sizes(self) -> list[int | Node]:
        """Insert the number of keys of each segment."""
        return [size_of(x, LENGTH) for x in self.stored]

    def as_rows(self, insert: Inserter, segment: Stored, tensor: Node) -> Node:
        """Insert `[rows, sequences of a row * q_length, ...]` of a tensor `[batch, q_length, ...]`."""
        rows = constant(segment.size(BATCH))
        if rows == self.batch:
            return tensor
        return insert("flatten", insert("unflatten", tensor, 0, (rows, self.batch // (rows or 1))), 1, 2)

    def as_sequences(self, insert: Inserter, segment: Stored, scores: Node) -> Node:
        """Insert `[batch, q_length, kv_length]` of the scores of a segment."""
        if constant(segment.size(BATCH)) == self.batch:
            return scores
        return insert("flatten", insert("unflatten", scores, 1, (-1, self.q_len)), 0, 1)

    def mask_as_rows(self, insert: Inserter, segment: Stored, mask: Node, like: Tensor) -> Node:
        """Insert the mask of a segment's keys as rows.

        `like` is the mask of all keys, `[1 or batch, 1 or q_length, kv_length]`.
        """
        rows = constant(segment.size(BATCH))
        if rows == self.batch or (known_equal(like.shape[0], 1) and known_equal(like.shape[1], 1)):
            return mask
        return self.as_rows(insert, segment, insert("expand", mask, self.batch, self.q_len, -1))


def find_key_segments(key: Factor, query: Tensor, place: Node, vanishing: frozenset[Node]) -> KeySegments | None:
    """Find the segments of keys that can be read where they are stored.

    Args:
        key: the keys of all sequences.
        query: `[batch, q_length, heads, dim]`.
        place: the node before which the op reads them.
        vanishing: the nodes that nothing uses once the op computes the scores.

    Returns:
        The segments, or None if keys are one tensor with a row for each sequence, or sizes are dynamic.
    """
    batch, q_len = constant(query.shape[0]), constant(query.shape[1])
    if batch is None or q_len is None:
        return None
    stored = find_segments(Walk(key.node, before_views(key, KEY), path=key.path), rows=False, vanishing=vanishing)
    rows = [constant(x.size(BATCH)) for x in stored]
    if len(stored) == 1 and rows == [batch]:
        return None
    for segment, size in zip(stored, rows, strict=True):
        if not size or batch % size or segment.rows is not None or not known_equal(segment.size(HEADS), 1):
            return None
        if known_tensor(segment.base).dtype != known_tensor(key.node).dtype or segment.written_before(place):
            return None
    return KeySegments(stored, batch, q_len)
