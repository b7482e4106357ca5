"""Picks: the indices of the keys that the queries of a call may attend to."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from tatten.ops.layout import HEADS
from tatten.passes.symbolic import constant, hint, known_tensor
from tatten.passes.views import Size


@dataclass(frozen=True)
class Picks:
    """The keys that the queries of a call may attend to.

    Attributes:
        indices: `[batch, 1 or heads, q_length, picks]`, a node or a draft of integers.
        block: number of neighbouring keys that an index names.
        mask: the mask of these keys; None if all of them count.
        rest_bias: the bias of all other keys; None if they are excluded.
        distinct: whether each row is known to name no key twice.
        names_all: whether each row is known to name all keys.
        kv_length: the number of keys.
        by_top_k: whether a top-k is known to have picked them.
        path: the nodes that may have no users once `indices` are read in place of the call's mask.
        written: filled nodes and the nodes that scatter into them in place. They may have no users then, too.
    """

    indices: Node
    block: int
    mask: Node | None
    rest_bias: float | None
    distinct: bool
    names_all: bool
    kv_length: Size
    by_top_k: bool
    path: frozenset[Node] = frozenset()
    written: tuple[tuple[Node, Node], ...] = ()

    @property
    def heads(self) -> int:
        """The number of heads of the indices."""
        heads = constant(known_tensor(self.indices).shape[HEADS])
        assert heads is not None
        return heads

    @property
    def count(self) -> Size:
        """The number of indices of a query."""
        size: Size = known_tensor(self.indices).shape[-1]
        return size

    @property
    def most_keys(self) -> int | None:
        """An upper bound of the keys that a query attends to; None if it is unknown."""
        count = hint(self.count)
        return None if count is None else count * self.block

    def keys_read(self, length: int, queries: int = 1) -> int:
        """Return an upper bound of the keys, out of `length`, that are read for `queries` with different picks."""
        return length if self.names_all or self.most_keys is None else min(self.most_keys * queries, length)

    def fits(self, kv_heads: Size) -> bool:
        """Return True if each of `kv_heads` kv heads has one head of the indices."""
        fixed = constant(kv_heads)
        return self.heads == 1 or (fixed is not None and fixed % self.heads == 0)

    def __str__(self) -> str:
        blocks = "" if self.block == 1 else f" blocks of {self.block} keys,"
        return f"{self.count}{blocks} of {self.kv_length} keys by {'top-k' if self.by_top_k else 'index'}"
