"""Prompt lookup inside a step: the last tokens of the text are looked up in it, and drafts are the tokens after them.

Without a match, other tokens become drafts, and the check rejects them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from tatten.integrations.transformers.loop.step import StepState
from tatten.integrations.transformers.loop.verify import verify


def lookup_step(
    model: PreTrainedModel, cache: Cache, state: StepState, drafts: int, ngram: int, inputs: dict[str, Any]
) -> None:
    """Generate up to `drafts + 1` tokens of one sequence. This function is compiled as one graph.

    Args:
        model, cache, state, inputs: as for `verify`.
        drafts: the number of tokens that are checked.
        ngram: the number of last tokens that are looked up in the text.
    """
    verify(model, cache, state, propose(state.sequences[0], state.length, drafts, ngram), inputs)


def propose(row: Tensor, length: Tensor, drafts: int, ngram: int) -> Tensor:
    """Return the tokens after the last earlier occurrence of the text's last `ngram` tokens, `[drafts]`."""
    if ngram > len(row):
        return row[:drafts]
    windows = row.unfold(0, ngram, 1)
    starts = torch.arange(len(windows), device=row.device)
    tail = row.index_select(0, (length - ngram + torch.arange(ngram, device=row.device)).clamp(min=0))
    matches = (windows == tail).all(1) & (starts < length - ngram)
    after = torch.where(matches, starts, -1).amax() + ngram
    return row.index_select(0, (after + torch.arange(drafts, device=row.device)).clamp(max=len(row) - 1))
