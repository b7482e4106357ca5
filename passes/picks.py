"""Picks: the keys that the queries of a call attend to at most, by their indices."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from tatten.ops.layout import HEADS
from tatten.passes.symbolic import constant, hint, known_tensor
from tatten.passes.views import Size


@dataclass(frozen=True)
class Picks:
    """The keys that the queries of a call attend to, at most.

    Attributes:
        indices: `[batch, 1 or heads, q_length, picks]`, a node or a draft of integers.
        block: how many neighbouring keys an index names.
        mask: the mask that tells which of these keys count; None if all do.
        rest_bias: the bias of all other keys; None if they are excluded.
        distinct: whether no row is known to name a key twice.
        names_all: whether each row is known to name all keys.
        kv_length: the number of keys.
        by_top_k: whether a top-k is known to have picked them.
        path: the nodes that may have no users once `indices` are read in place of the call's mask.
        written: nodes that are filled and the nodes that scatter into them in place, which may go, too.
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
        """The number of keys that a query attends to, at most; None if it is unknown."""
        count = hint(self.count)
        return None if count is None else count * self.block

    def read_of(self, length: int, queries: int = 1) -> int:
        """The number of keys, of so many, that are read at most for `queries`, each of which may have picked others."""
        return length if self.names_all or self.most_keys is None else min(self.most_keys * queries, length)

    def fits(self, kv_heads: Size) -> bool:
        """Return True if each of so many kv heads has one head of the indices."""
        most = constant(kv_heads)
        return self.heads == 1 or (most is not None and most % self.heads == 0)

    def __str__(self) -> str:
        blocks = "" if self.block == 1 else f" blocks of {self.block} keys,"
        return f"{self.count}{blocks} of {self.kv_length} keys by {'top-k' if self.by_top_k else 'index'}"
