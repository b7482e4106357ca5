"""A draft model inside a step: it chooses tokens one by one, and the model checks them all at once."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from tatten.integrations.transformers.loop.call import GenerateCall
from tatten.integrations.transformers.loop.generate_call import prefill
from tatten.integrations.transformers.loop.step import CACHE, StepState
from tatten.integrations.transformers.loop.verify import verify


@dataclass
class Assistant:
    """The draft model of a prepared step, which is not kept alive, and its static cache."""

    model: weakref.ref[PreTrainedModel]
    cache: Cache

    def read_prompt(self, call: GenerateCall) -> None:
        """Fill the cache with the prompt of a call."""
        assert call.draft is not None
        self.cache.reset()
        prefill(call.draft, call.ids, call.config, {CACHE: self.cache, "use_cache": True})


def assisted_step(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    caches: tuple[Cache, Cache],
    state: StepState,
    drafts: int,
    inputs: dict[str, Any],
) -> None:
    """Generate up to `drafts + 1` tokens of one sequence. It is compiled as one graph.

    Args:
        model, state, inputs: as for `verify`.
        draft: the draft model, with the vocabulary of the model.
        caches: the cache of the model and that of the draft model, which holds all tokens but the last two or more.
        drafts: the number of tokens that the draft model chooses.
    """
    cache, draft_cache = caches
    verify(model, cache, state, choose_drafts(draft, draft_cache, state, drafts, inputs), inputs)


def choose_drafts(
    draft: PreTrainedModel, cache: Cache, state: StepState, drafts: int, inputs: dict[str, Any]
) -> Tensor:
    """Return the tokens with which the draft model continues the text greedily, `[drafts]`.

    If all drafts of a step were accepted, the draft model has not read the last of them. So it always reads two tokens
    first, at the cost of one.
    """
    assert state.limit is not None
    row, position = state.sequences[0], state.length - 2 + torch.arange(2, device=state.length.device)
    for layer in cache.layers:
        layer.cumulative_length.copy_(position[0])
    tokens, chosen = row.index_select(0, position), []
    for _ in range(drafts):
        arguments = draft.prepare_inputs_for_generation(
            tokens[None],
            next_sequence_length=len(tokens),
            is_first_iteration=False,
            attention_mask=None,
            position_ids=torch.minimum(position, state.limit - 1)[None],
            **{CACHE: cache},
            **inputs,
        )
        tokens = draft(**arguments, return_dict=True).logits[:, -1].float().argmax(-1)
        position = position[-1:] + 1
        chosen.append(tokens)
    return torch.cat(chosen)
