"""Check and accept drafts inside a step, in fixed shapes.

A step has one query for the last token and one for each draft, so that keys and weights are read once for several
tokens. A draft is accepted if the model would have chosen it, so the tokens are those of greedy decoding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from tatten.integrations.transformers.config import CACHE
from tatten.integrations.transformers.loop.argmax import argmax
from tatten.integrations.transformers.loop.history import History, mark
from tatten.integrations.transformers.loop.processors import processed
from tatten.integrations.transformers.loop.step import StepState, with_token_types


def verify(model: PreTrainedModel, cache: Cache, state: StepState, proposed: Tensor, inputs: dict[str, Any]) -> None:
    """Accept the drafts that the model would have chosen, and generate one more token. Part of a compiled step.

    Args:
        model, cache, inputs: as for `tatten.integrations.transformers.loop.step.decode_step`; all layers of the cache
            are static, and have room for all drafts after the text.
        state: the buffers. `limit` is the length at which the text ends.
        proposed: the drafts, `[drafts]`.
    """
    assert state.limit is not None
    row, length, drafts = state.sequences[0], state.length, len(proposed)
    offsets = torch.arange(drafts + 1, device=row.device)
    tokens = torch.cat([row.index_select(0, length - 1), proposed])[None]
    arguments = model.prepare_inputs_for_generation(
        tokens,
        next_sequence_length=drafts + 1,
        is_first_iteration=False,
        attention_mask=None,
        # Drafts past the end of the text are not accepted, and a table of positions may have no entries for them.
        position_ids=torch.minimum(length - 1 + offsets, state.limit - 1)[None],
        **{CACHE: cache},
        **with_token_types(inputs, tokens),
    )
    scores = model(**arguments, return_dict=True).logits[0].float()
    text = state.sequences.index_copy(1, length + offsets[:-1], proposed[None])
    history = History(length + offsets[:, None], text, _occurred_before(state.occurred, proposed))
    chosen = argmax(processed(scores, history, state.rules))
    accepted = (proposed == chosen[:-1]).long().cumprod(0).sum()
    new = accepted + 1
    if state.eos is not None:
        ends = (chosen[:, None] == state.eos).any(1) & (offsets < new)
        new = torch.where(ends.any(), torch.where(ends, offsets, drafts).amin() + 1, new)
    else:
        ends = torch.zeros_like(offsets, dtype=torch.bool)
    # A text that has ended does not grow: steps may have been launched ahead.
    new = torch.where(state.ended[0], 0, torch.minimum(new, state.limit[0] - length[0]))
    row.index_copy_(0, length + offsets, torch.where(offsets < new, chosen, row.index_select(0, length + offsets)))
    state.latest.copy_(chosen[None])
    length.add_(new)
    if state.occurred is not None:
        mark(torch.where(offsets < new, chosen, chosen[:1])[None], state.occurred)
    for layer in cache.layers:
        layer.cumulative_length.sub_(drafts + 1 - new)
    state.ended.logical_or_((ends & (offsets < new)).any() | (length >= state.limit))
    state.report.copy_(torch.stack([state.report[0] + new, state.ended[0].long(), state.report[2]]))


def _occurred_before(occurred: Tensor | None, proposed: Tensor) -> Tensor | None:
    """Return the tokens that occurred in the text or in the drafts before each row of scores; see `History`."""
    if occurred is None:
        return None
    drafts, columns = len(proposed), occurred.shape[1]
    places = torch.arange(drafts + 1, device=proposed.device)
    earlier = torch.where(places[:drafts] < places[:, None], proposed, columns)
    return occurred | mark(earlier, occurred.new_zeros(drafts + 1, columns))
