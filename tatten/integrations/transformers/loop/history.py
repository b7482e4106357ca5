"""The text so far, as logits processors read it inside a step."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class History(NamedTuple):
    """The state of the text that processors read. With drafts, a row of scores follows each of them.

    Attributes:
        length: int64 `[1]` or `[rows, 1]`, the number of tokens before a row of scores, the prompt included.
        text: int64 `[rows or 1, capacity]`, the tokens. Those from `length` on do not count.
        occurred: bool `[rows, vocabulary]`, the tokens that a repetition penalty counts; None without a penalty.
    """

    length: Tensor
    text: Tensor
    occurred: Tensor | None
