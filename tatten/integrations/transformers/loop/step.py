"""The decode step: model, logits processors, choice of the token, end check and bookkeeping, all on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from tatten.integrations.transformers.config import CACHE
from tatten.integrations.transformers.loop.argmax import argmax
from tatten.integrations.transformers.loop.generate_call import TOKEN_TYPES
from tatten.integrations.transformers.loop.history import History, mark
from tatten.integrations.transformers.loop.processors import Rule, processed


@dataclass
class StepState:
    """The buffers of a step, which writes them in place, so that a CUDA graph can be replayed.

    Attributes:
        token: int64 `[batch, 1]`, the last token.
        position: its position, `[..., batch, 1]`; None if the model counts positions itself.
        mask: 2-D mask of the cache's slots, `[batch, capacity]`, or None if all tokens count. Slots of future tokens
            are 1, as causality excludes them.
        sequences: int64 `[batch, n]`, the prompt and the new tokens, with room for all tokens of the cache, one more,
            and the drafts of a step.
        length: int64 `[1]`, the number of tokens in `sequences`.
        latest: int64 `[batch, n]`, the tokens of the last step. Only the accepted ones, at the front, count.
        report: int64 `[3]`: the number of tokens after the first that any sequence needed, 1 if all have ended, and 1
            if a needed token could not be sampled.
        ended: bool `[batch]`.
        eos: the tokens that end a text, `[n]`, or None.
        pad: the token that follows the end of a text, 0-d; None without `eos`.
        noise: float32 `[batch, vocabulary]`, drawn from an exponential distribution; None for greedy decoding.
        occurred: see `tatten.integrations.transformers.loop.history.History`.
        limit: int64 `[1]`, the length at which a text ends; None for a step of one token.
        logits, scores: float32 `[batch, vocabulary]`, the scores of the last token before and after the logits
            processors; None if the call does not return them.
        rules: the logits processors, with their operands on the device.
    """

    token: Tensor
    position: Tensor | None
    mask: Tensor | None
    sequences: Tensor
    length: Tensor
    latest: Tensor
    report: Tensor
    ended: Tensor
    eos: Tensor | None
    pad: Tensor | None
    noise: Tensor | None
    occurred: Tensor | None
    limit: Tensor | None
    logits: Tensor | None
    scores: Tensor | None
    rules: tuple[Rule, ...]

    def tensors(self) -> list[Tensor]:
        """Return all buffers, in the order of the fields."""
        fields = [x for name, x in vars(self).items() if name != "rules" and x is not None]
        return fields + [x for rule in self.rules for x in rule.operands]


def with_token_types(inputs: dict[str, Any], tokens: Tensor) -> dict[str, Any]:
    """Return the inputs of a step, with tensors in place of the types of new tokens."""
    return {name: torch.full_like(tokens, x) if name in TOKEN_TYPES else x for name, x in inputs.items()}


def decode_step(model: PreTrainedModel, cache: Cache, state: StepState, inputs: dict[str, Any]) -> None:
    """Generate a token of each sequence, as the loop body of `generate` does. This function is compiled as one graph.

    Args:
        model: the model, whose `prepare_inputs_for_generation` makes masks and positions.
        cache: a static cache, which holds all tokens but the last.
        state: the buffers.
        inputs: other arguments of the model's forward, the same for each step.
    """
    encodes = model.config.is_encoder_decoder
    position = {} if state.position is None else {"decoder_position_ids" if encodes else "position_ids": state.position}
    masks = {"decoder_attention_mask": state.mask} if encodes else {"attention_mask": state.mask}
    arguments = model.prepare_inputs_for_generation(
        state.token,
        next_sequence_length=1,
        is_first_iteration=False,
        **{CACHE: cache},
        **{name: x for name, x in masks.items() if x is not None or not encodes},
        **position,
        **with_token_types(inputs, state.token),
    )
    logits = model(**arguments, return_dict=True).logits[:, -1].to(copy=True, dtype=torch.float32)
    scores = processed(logits, History(state.length, state.sequences, state.occurred), state.rules)
    if state.logits is not None:
        state.logits.copy_(logits)
    if state.scores is not None:
        state.scores.copy_(scores)
    # As `torch.multinomial` of one sample divides by exponential noise, the same seed gives the same tokens.
    token = argmax(scores if state.noise is None else scores.softmax(-1) / state.noise)
    needed, failed = ~state.ended.all(), state.report[2]
    if state.noise is not None:
        # If the maximum is not finite, all probabilities are NaN, and `torch.multinomial` raises an error.
        failed = failed | (needed & ~scores.amax(-1).isfinite().all())
    if state.eos is not None:
        assert state.pad is not None
        token = torch.where(state.ended, state.pad, token)
        state.ended.logical_or_((token[:, None] == state.eos).any(1))
    state.sequences.index_copy_(1, state.length, token[:, None])
    state.length.add_(1)
    state.report.copy_(torch.stack([state.report[0] + needed, state.ended.all().long(), failed]))
    if state.occurred is not None:
        mark(token[:, None], state.occurred)
    if state.position is not None:
        state.position.add_(1)
    state.token.copy_(token[:, None])
    state.latest.copy_(token[:, None])
