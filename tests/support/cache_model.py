"""A naive model of what a KV cache must hold: for each sequence a list of its tokens, and for sharing a list of rows.

A token is a number, and its keys and values are made of that number, so that the contents of a cache can be read back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis.stateful import RuleBasedStateMachine
from torch import Tensor

LAYERS, KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 2, 3, 2
TOKEN_BYTES = LAYERS * KV_HEADS * (HEAD_DIM + VALUE_DIM) * 8  # of one token in all layers


def keys_and_values(tokens: Sequence[Sequence[int]], layer: int) -> tuple[Tensor, Tensor]:
    """Those of `[batch, q_len]` tokens in one layer: no two numbers are equal."""
    numbers = torch.tensor(tokens, dtype=torch.float64)[:, None, :, None]
    heads = layer * KV_HEADS + torch.arange(KV_HEADS)[:, None, None]
    base = numbers * 1000 + heads * 10
    return base + torch.arange(HEAD_DIM), -(base + torch.arange(VALUE_DIM))


@dataclass(frozen=True)
class Prefix:
    """Rows of keys and values that sequences share.

    Attributes:
        stored: number of rows.
        length: tokens of each.
        read: the row that each sequence reads.
        aligned: whether the cache is to know that these are blocks of consecutive sequences.
    """

    stored: int
    length: int
    read: tuple[int, ...]
    aligned: bool = True

    def select(self, indices: Sequence[int], narrow: bool) -> Prefix:
        """Keep the rows of blocks alone where these are consecutive, and all rows otherwise."""
        read = tuple(self.read[i] for i in indices)
        rows = fewest_rows(read)
        first = min(read)
        blocks = read == tuple(first + i // (len(read) // rows) for i in range(len(read)))
        if self.aligned and blocks and (narrow or rows == self.stored):
            return Prefix(rows, self.length, tuple(row - first for row in read))
        return replace(self, read=read, aligned=False)


@dataclass
class Model:
    """A cache of sequences that share prefixes.

    Attributes:
        tokens: of each sequence, padding included.
        padding: of each sequence, which of the first ones are padding; none where it is empty.
        prefixes: what is stored of earlier levels.
        capacity: slots of a suffix; 0 before a fork.
        used: slots of it that are taken.
        frozen: slots of it that children read.
    """

    tokens: list[list[int]]
    padding: list[list[bool]]
    prefixes: list[Prefix] = field(default_factory=list)
    capacity: int = 0
    used: int = 0
    frozen: int = 0

    @property
    def length(self) -> int:
        return len(self.tokens[0])

    @property
    def nbytes(self) -> int:
        """Each prefix once, and every slot of the suffixes."""
        return TOKEN_BYTES * (sum(x.stored * x.length for x in self.prefixes) + len(self.tokens) * self.capacity)

    def is_real(self, sequence: int, place: int) -> bool:
        padding = self.padding[sequence]
        return place >= len(padding) or not padding[place]

    def visible(self, sequence: int, place: int) -> list[int]:
        """The places that the token at `place` attends to: real ones up to its own."""
        return [other for other in range(place + 1) if self.is_real(sequence, other)]

    def add(self, new: Sequence[Sequence[int]]) -> None:
        for tokens, more in zip(self.tokens, new, strict=True):
            tokens.extend(more)
        if self.capacity:
            self.used += len(new[0])
        else:
            self.prefixes = [Prefix(len(self.tokens), self.length, tuple(range(len(self.tokens))))]

    def fork(self, n: int, capacity: int) -> Model:
        self.frozen = max(self.frozen, self.used)
        suffix = [Prefix(len(self.tokens), self.used, tuple(range(len(self.tokens))))] if self.used else []
        children = [i for i in range(len(self.tokens)) for _ in range(n)]
        prefixes = [replace(x, read=tuple(x.read[i] for i in children)) for x in (*self.prefixes, *suffix)]
        return replace(self._of(children), prefixes=prefixes, capacity=capacity, used=0, frozen=0)

    def select(self, indices: Sequence[int], in_place: bool = False) -> Model:
        """Select sequences. Before a fork each has a row of its own; after it no prefix is copied."""
        if not self.capacity:
            rows = tuple(range(len(indices)))
            return replace(self._of(indices), prefixes=[Prefix(len(indices), self.length, rows)])
        narrow = not in_place or len(indices) != len(self.tokens)
        return replace(self._of(indices), prefixes=[x.select(indices, narrow) for x in self.prefixes], frozen=0)

    def crop(self, tokens: int) -> None:
        for text in self.tokens:
            del text[len(text) - tokens :]
        if self.capacity:
            self.used -= tokens
        else:
            self.prefixes = [replace(self.prefixes[0], length=self.length)]

    def _of(self, indices: Sequence[int]) -> Model:
        return replace(self, tokens=[[*self.tokens[i]] for i in indices], padding=[self.padding[i] for i in indices])


def fewest_rows(served_by: Sequence[int]) -> int:
    """Into how few blocks of one size a batch can be cut, each of sequences that one row served."""
    batch = len(served_by)
    for rows in range(1, batch + 1):
        size = batch // rows
        blocks = [served_by[start : start + size] for start in range(0, batch, size)]
        if batch % rows == 0 and all(len(set(block)) == 1 for block in blocks):
            return rows
    raise AssertionError("each sequence is a block of its own")


def assert_step(
    model: Model,
    new: Sequence[Sequence[int]],
    mask: Tensor,
    positions: Tensor | None,
    held: list[tuple[Tensor, Tensor]],
) -> None:
    """Assert that a step's mask, positions and contents are those of `model`, which has the step's tokens by now."""
    q_len, batch = len(new[0]), len(model.tokens)
    total = held[0][0].shape[2]
    mask = mask.expand(batch, 1, q_len, total)
    for sequence in range(batch):
        for query in range(q_len):
            place = model.length - q_len + query
            want = model.visible(sequence, place)
            if positions is not None:
                assert positions.expand(batch, q_len)[sequence, query] == max(len(want) - 1, 0)
            for layer, pair in enumerate(held):
                want_pair = keys_and_values([[model.tokens[sequence][place] for place in want]], layer)
                for got, wanted in zip(pair, want_pair, strict=True):
                    assert torch.equal(got[sequence][:, mask[sequence, 0, query]], wanted[0])


class History(RuleBasedStateMachine):
    """A history of caches whose tokens are all different."""

    def __init__(self) -> None:
        super().__init__()
        self.next_token = 1

    def new_tokens(self, batch: int, q_len: int) -> list[list[int]]:
        first, self.next_token = self.next_token, self.next_token + batch * q_len
        return [[first + row * q_len + i for i in range(q_len)] for row in range(batch)]


def must_raise(fails: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"must|needs"):
        fails()
