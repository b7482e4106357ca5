"""The text so far, as logits processors read it inside a step."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class History(NamedTuple):
    """The state of the text that processors read. With drafts, a row of scores follows each of them.

    Attributes:
        length: int64 `[1]` or `[rows, 1]`, the number of tokens before a row of scores, the prompt included.
        text: int64 `[rows or 1, capacity]`, the tokens. Those from `length` on do not count.
        occurred: bool `[rows, vocabulary + 1]`, the tokens that a repetition penalty counts, with a column for all
            tokens without a score; None without a penalty.
    """

    length: Tensor
    text: Tensor
    occurred: Tensor | None


def mark(tokens: Tensor, among: Tensor) -> Tensor:
    """Mark tokens, `[rows, count]`, in a bool mask `[rows, vocabulary + 1]`, which is returned.

    The last column is that of all tokens beyond the vocabulary. A text may have some: a model may embed more tokens,
    such as those of images or of padding, than it has scores for.
    """
    return among.scatter_(1, tokens.clamp(max=among.shape[1] - 1), True)
