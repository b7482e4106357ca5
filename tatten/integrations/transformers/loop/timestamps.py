"""The logits processor of Whisper's timestamps: pairs of them, in order, and one where they are likely together."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tatten.integrations.transformers.loop.history import History
from tatten.ops.moved import moved

DETECTS = "_detect_timestamp_from_logprob"  # a private attribute of the processor


def timestamps(
    scores: Tensor, history: History, first: Tensor, end: Tensor, begin: Tensor, last_to_begin: Tensor, detects: Tensor
) -> Tensor:
    """Return the scores of `WhisperTimeStampLogitsProcessor`.

    Args:
        scores: `[rows, vocabulary]`.
        history: the text.
        first: the token of the first timestamp. The token before it, which asks for none, is excluded.
        end: the token that ends a text. All tokens before it are words. A negative one counts from the last token.
        begin: the number of tokens before the first one that counts.
        last_to_begin: the last timestamp that may begin a text.
        detects: 1 to exclude words where all timestamps together are more likely than the likeliest word, else 0.
    """
    rows, vocabulary = scores.shape
    tokens = torch.arange(vocabulary, device=scores.device)
    is_timestamp = tokens >= first
    text, length = history.text.expand(rows, -1), history.length.reshape(-1, 1).expand(rows, 1)
    places = torch.arange(text.shape[1], device=scores.device)

    def is_at(place: Tensor) -> Tensor:
        return text.gather(1, place.clamp(min=0)) >= first

    end = torch.where(end < 0, end + vocabulary, end)
    after = (length - begin >= 1) & is_at(length - 1)
    after_two = (length - begin < 2) | is_at(length - 2)
    earlier = (text >= first) & (places >= begin) & (places < length)
    latest = torch.where(earlier, places, -1).amax(1, keepdim=True)
    # A timestamp that ends a segment may be repeated as the start of the next one. Any other has to be later.
    repeats = after & ~after_two
    least = torch.where(latest >= 0, text.gather(1, latest.clamp(min=0)) + (~repeats).long(), first)

    excluded = (tokens == first - 1) | (is_timestamp & (tokens < least))
    excluded = excluded | (after & after_two & is_timestamp) | (repeats & (tokens < end))
    excluded = excluded | ((length == begin) & (~is_timestamp | (tokens > last_to_begin)))
    scores = scores.masked_fill(excluded, -math.inf)
    logarithms = scores.log_softmax(-1)
    together = logarithms.masked_fill(~is_timestamp, -math.inf).logsumexp(-1, keepdim=True)
    likeliest = logarithms.masked_fill(is_timestamp, -math.inf).amax(-1, keepdim=True)
    return scores.masked_fill((together > likeliest) & (detects > 0) & ~is_timestamp, -math.inf)


def unsupported_timestamps(processor: Any) -> str | None:
    """Return the reason why a captured step can't choose the timestamps of a processor, or None."""
    if not hasattr(processor, DETECTS):
        name = f"transformers.WhisperTimeStampLogitsProcessor.{DETECTS}"
        return moved(name, AttributeError(DETECTS), "`generate` runs its own loop for timestamps")
    if type(processor.eos_token_id) is not int:
        return f"timestamps need one token that ends a text, got {processor.eos_token_id}"
    return None


def timestamp_numbers(processor: Any) -> tuple[Tensor, ...]:
    """Return the operands of `timestamps`."""
    first, largest_index = processor.timestamp_begin, processor.max_initial_timestamp_index
    last_to_begin = torch.iinfo(torch.int64).max if largest_index is None else first + largest_index
    numbers = first, processor.eos_token_id, processor.begin_index, last_to_begin, bool(getattr(processor, DETECTS))
    return tuple([torch.tensor(int(x), dtype=torch.int64) for x in numbers])
