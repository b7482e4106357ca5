"""Logits processors that read the text: they exclude tokens that would complete an n-gram.

A table of n-grams has the shape `[rows or 1, count, n]`. The next token completes an n-gram if the last `n - 1` tokens
of the text begin it. A negative entry before the last matches any token, and a negative last entry excludes none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tatten.integrations.transformers.loop.history import History, mark

COUNTS = 128  # sizes of tables are multiples of it, so that sources of many lengths and lists of words share a step


def no_repeated_ngram(scores: Tensor, history: History, size: Tensor) -> Tensor:
    """Exclude tokens that complete an n-gram of the text. `size` has n elements, since a shape can't be an operand."""
    n = len(size)
    if n > history.text.shape[1]:
        return scores
    ngrams = history.text.unfold(1, n, 1)
    ends = torch.arange(n, history.text.shape[1] + 1, device=scores.device)
    last = torch.where(ends <= history.length.reshape(-1, 1), ngrams[..., -1], -1)
    return scores.masked_fill(_completing(scores, history, ngrams[..., :-1], last), -math.inf)


def no_ngram_of_source(scores: Tensor, history: History, ngrams: Tensor) -> Tensor:
    """Exclude tokens that complete an n-gram of the source, of which each sequence has a table."""
    ngrams = ngrams.repeat_interleave(len(scores) // len(ngrams), 0)
    return scores.masked_fill(_completing(scores, history, ngrams[..., :-1], ngrams[..., -1]), -math.inf)


def no_bad_words(scores: Tensor, history: History, words: Tensor, least: Tensor) -> Tensor:
    """Exclude tokens that complete a word, in texts of at least as many tokens as `least`, `[count]`, has for it."""
    last = torch.where(history.length.reshape(-1, 1) >= least, words[..., -1], -1)
    return scores + torch.where(_completing(scores, history, words[..., :-1], last), -math.inf, 0.0)


def _completing(scores: Tensor, history: History, prefixes: Tensor, last: Tensor) -> Tensor:
    """Return the tokens that complete an n-gram, bool `[rows, vocabulary]`."""
    (rows, vocabulary), before = scores.shape, prefixes.shape[-1]
    places = history.length.reshape(-1, 1) + torch.arange(-before, 0, device=scores.device)
    tail = history.text.expand(rows, -1).gather(1, places.clamp(min=0).expand(rows, -1))
    tail = torch.where(places >= 0, tail, -1)[:, None]
    completes = ((tail == prefixes) | (prefixes < 0)).all(-1) & (last >= 0)
    excluded = torch.zeros(rows, vocabulary + 1, dtype=torch.bool, device=scores.device)
    return mark(torch.where(completes, last, vocabulary), excluded)[:, :vocabulary]


def size_of(processor: Any) -> tuple[Tensor]:
    """Return the operand of `no_repeated_ngram`."""
    return (torch.zeros(processor.ngram_size, dtype=torch.uint8),)


def ngrams_of_source(processor: Any) -> tuple[Tensor]:
    """Return the operand of `no_ngram_of_source`. Its size follows from the number of tokens of the longest source."""
    n, of_sources = processor.ngram_size, processor.generated_ngrams
    tables = [[(*prefix, x) for prefix, last in table.items() for x in last] for table in of_sources]
    tokens = max(map(len, tables)) + n - 1
    count = max(1, -(-tokens // COUNTS)) * COUNTS
    padded = [[*table, *[[-1] * n] * (count - len(table))] for table in tables]
    return (torch.tensor(padded, dtype=torch.int64),)


def bad_words(processor: Any) -> tuple[Tensor, Tensor]:
    """Return the operands of `no_bad_words`, in sizes that many lists have.

    transformers 5.24 excludes a token if the rest of a word is the text; before, the text has to have one more token.
    """
    words: Sequence[Sequence[int]] = [word for word in processor.sequence_bias if word]
    longest = 1 << (max(map(len, words), default=1) - 1).bit_length()
    count = max(1, -(-len(words) // COUNTS)) * COUNTS
    fewer = int(hasattr(processor, "multi_token_biases"))
    table = [[*[-1] * (longest - len(word)), *word] for word in words] + [[-1] * longest] * (count - len(words))
    least = [len(word) - fewer if len(word) > 1 else 0 for word in words] + [0] * (count - len(words))
    return torch.tensor([table], dtype=torch.int64), torch.tensor(least, dtype=torch.int64)
