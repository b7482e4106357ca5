"""A draft model inside a step: it chooses tokens one by one, and the model checks them all at once."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from tatten.integrations.transformers.config import CACHE
from tatten.integrations.transformers.loop.argmax import argmax
from tatten.integrations.transformers.loop.call import GenerateCall, prefill_static
from tatten.integrations.transformers.loop.compiled_function import Calls, CompiledFunction
from tatten.integrations.transformers.loop.history import History
from tatten.integrations.transformers.loop.processors import processed
from tatten.integrations.transformers.loop.step import StepState


@dataclass
class Assistant:
    """The draft model of a prepared step, which holds only a weak reference to it.

    The same compiled code chooses each draft except the first. One graph for all drafts would contain the model once
    for each draft, which multiplies the time to compile and to tune.

    Attributes:
        model: the draft model, with the vocabulary of the model.
        cache: its static cache.
        drafts: int64 `[drafts]`, the tokens that it chose in the last step.
        first, following: `first_draft` and `next_draft`, compiled.
    """

    model: weakref.ref[PreTrainedModel]
    cache: Cache
    drafts: Tensor
    first: CompiledFunction
    following: CompiledFunction

    def read_prompt(self, call: GenerateCall) -> None:
        """Fill the cache with the prompt of a call."""
        assert call.draft is not None
        self.cache.reset()
        prefill_static(call.draft, call.ids, call.config, {CACHE: self.cache, "use_cache": True})

    def calls(self, state: StepState, inputs: dict[str, Any]) -> Calls:
        """Return the calls that choose the tokens with which the draft model continues the text greedily."""
        functions = [self.first] + [self.following] * (len(self.drafts) - 1)
        return [(function, (self.model(), self.cache, state, self.drafts, inputs)) for function in functions]


def first_draft(draft: PreTrainedModel, cache: Cache, state: StepState, drafts: Tensor, inputs: dict[str, Any]) -> None:
    """Choose the token after the text, and append it to the drafts. This function is compiled as one graph.

    If all drafts of a step were accepted, the draft model has not read the last of them. So it always reads the last
    two tokens of the text, which costs no more time than one.

    Args:
        draft: the draft model.
        cache: its cache, which may lack the last two tokens of the text.
        state, inputs: as for `verify`. Its rules do not read the drafts of the step.
        drafts: the drafts, which are shifted by one place.
    """
    position = state.length - 2 + torch.arange(2, device=state.length.device)
    for layer in cache.layers:
        layer.cumulative_length.copy_(position[0])
    _choose(draft, cache, state, drafts, state.sequences[0].index_select(0, position), position, inputs)


def next_draft(draft: PreTrainedModel, cache: Cache, state: StepState, drafts: Tensor, inputs: dict[str, Any]) -> None:
    """Choose the token after the last draft, and append it to the drafts. This function is compiled as one graph.

    Args:
        draft, cache, state, drafts, inputs: as for `first_draft`. The cache holds all tokens but the last draft.
    """
    position = cache.layers[0].cumulative_length.reshape(1).clone()
    _choose(draft, cache, state, drafts, drafts[-1:], position, inputs)


def _choose(
    draft: PreTrainedModel,
    cache: Cache,
    state: StepState,
    drafts: Tensor,
    tokens: Tensor,
    position: Tensor,
    inputs: dict[str, Any],
) -> None:
    assert state.limit is not None
    arguments = draft.prepare_inputs_for_generation(
        tokens[None],
        next_sequence_length=len(tokens),
        is_first_iteration=False,
        attention_mask=None,
        position_ids=torch.minimum(position, state.limit - 1)[None],
        **{CACHE: cache},
        **inputs,
    )
    scores = draft(**arguments, return_dict=True).logits[:, -1].float()
    history = History(position[-1:] + 1, state.sequences, state.occurred)
    token = argmax(processed(scores, history, state.rules))
    drafts.copy_(torch.cat([drafts[1:], token]))
