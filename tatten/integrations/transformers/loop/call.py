"""A call of `generate`'s loop, and the state of a step at its beginning."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import StaticLayer
from transformers.generation import stopping_criteria as sc

from tatten.integrations.transformers.config import CACHE
from tatten.integrations.transformers.loop.cache import decoder_layers
from tatten.integrations.transformers.loop.capture import FailedPrefillError, NoStepError
from tatten.integrations.transformers.loop.generate_call import (
    TOKEN_TYPES,
    counts_by_mask,
    drafts_of,
    inputs_of_prefill,
    is_users_cache,
    pad_token,
    prefill,
)
from tatten.integrations.transformers.loop.processors import Rule, occurred_tokens
from tatten.integrations.transformers.loop.results import requested_scores
from tatten.integrations.transformers.loop.step import StepState


def longest_text(criteria: Iterable[Any]) -> int | None:
    """Return the largest number of tokens of a text, or None if the criteria set none."""
    return min((int(x.max_length) for x in criteria if isinstance(x, sc.MaxLengthCriteria)), default=None)


def text_length(limit: int, ids: Tensor) -> int:
    """Return the number of tokens of the longest text. A prompt is followed by one token, however long it is."""
    return max(limit, ids.shape[1] + 1)


@dataclass
class GenerateCall:
    """The arguments of a call of `generate`'s loop. `draft` is the draft model, or None."""

    model: PreTrainedModel
    ids: Tensor
    processors: Any
    criteria: Any
    config: GenerationConfig
    inputs: dict[str, Any]
    draft: PreTrainedModel | None = None

    @property
    def max_length(self) -> int:
        """The number of tokens of the longest text."""
        length = longest_text(self.criteria)
        assert length is not None  # else `reasons` declines the call
        return text_length(length, self.ids)

    @property
    def drafts(self) -> int:
        """The number of drafts of a step, by prompt lookup or a draft model; 0 for steps of one token."""
        if self.draft is None:
            return int(self.config.prompt_lookup_num_tokens or 0)
        return drafts_of(self.config, self.draft)

    def _all(self, kind: type) -> list[Any]:
        return [x for x in self.criteria if isinstance(x, kind)]

    def end_tokens(self) -> Tensor | None:
        """Return the tokens of all criteria that end a text, `[n]`, or None if there are none."""
        ends = [x.eos_token_id.to(self.ids.device).reshape(-1) for x in self._all(sc.EosTokenCriteria)]
        return torch.cat(ends) if ends else None

    def time_limit(self) -> float:
        """Return the time after which no step may be launched, in seconds of `time.time`."""
        limits = (x.initial_timestamp + x.max_time for x in self._all(sc.MaxTimeCriteria))
        return min(limits, default=float("inf"))

    def decoder_input(self, name: str) -> Tensor | None:
        """Return the mask or the positions of the decoder's tokens."""
        return self.inputs.get(f"decoder_{name}" if self.model.config.is_encoder_decoder else name)

    def position(self) -> Tensor | None:
        """Return the position of the first token, `[..., batch, 1]`, or None if the model counts it without a mask."""
        positions, mask = self.decoder_input("position_ids"), self.decoder_input("attention_mask")
        if positions is None and mask is not None and counts_by_mask(self.model):
            return mask.long().sum(-1, keepdim=True)
        return None if positions is None else (positions[..., -1:] + 1).contiguous()

    def first_token(self) -> FirstToken:
        """Run the prefill and choose the first token as `generate` does.

        Raises:
            NoStepError: the model did not write the cache that it was given, or can't run with the loop's cache.
        """
        cache = self.inputs[CACHE]  # a prefill in chunks replaces it
        outputs = prefill_static(self.model, self.ids, self.config, self.inputs)
        returned = getattr(outputs, CACHE, None)
        # GPT-2 with cross-attention returns the cache as a part of an EncoderDecoderCache.
        if returned is not None and cache not in (returned, getattr(returned, "self_attention_cache", None)):
            raise NoStepError(f"{type(self.model).__name__} returned another cache than it was given")
        logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
        scores = self.processors(self.ids, logits)
        if self.config.do_sample:
            return FirstToken(torch.multinomial(scores.softmax(-1), num_samples=1), logits, scores)
        return FirstToken(scores.argmax(-1, keepdim=True), logits, scores)

    def constant_inputs(self) -> dict[str, Any]:
        """Return the arguments of the model's forward that are the same at each step."""
        encodes = self.model.config.is_encoder_decoder
        computed = {CACHE, "position_ids", "decoder_position_ids", "decoder_attention_mask"}
        computed |= set() if encodes else {"attention_mask"}
        computed |= {"logits_to_keep"} if self.drafts else set()  # all drafts are checked
        computed |= inputs_of_prefill(self.model)
        constant = {name: x for name, x in self.inputs.items() if name not in computed and not is_missing(x)}
        return constant | {name: _type_of_new_tokens(name, constant[name]) for name in TOKEN_TYPES if name in constant}


class FirstToken(NamedTuple):
    """The token after a prompt.

    Attributes:
        token: `[batch, 1]`.
        logits, scores: float32 `[batch, vocabulary]`, the scores before and after the logits processors.
    """

    token: Tensor
    logits: Tensor
    scores: Tensor


def _type_of_new_tokens(name: str, types: Tensor) -> int:
    """Return the type that `generate` gives to new tokens, which is one for all sequences."""
    return 0 if name == "mm_token_type_ids" else int(types[0, -1])


def prefill_static(model: PreTrainedModel, ids: Tensor, config: GenerationConfig, inputs: dict[str, Any]) -> Any:
    """Run the prefill of `generate` with a static cache, and return the model's output.

    Raises:
        FailedPrefillError: the model raised an error, and the cache is not the user's.
    """
    users = is_users_cache(inputs[CACHE])
    try:
        return prefill(model, ids, config, inputs)
    except Exception as error:
        if users:
            raise
        what = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise FailedPrefillError(f"the prefill of {type(model).__name__} with a static cache raised {what}") from error


def is_missing(x: object) -> bool:
    """Return True for the value of an input that has none: None, or the empty dict of a call without images."""
    return x is None or (isinstance(x, dict) and not x)


def initial_state(call: GenerateCall, cache: Cache, first: FirstToken, rules: tuple[Rule, ...]) -> StepState:
    """Make the state before the first step.

    Args:
        call: the call, whose prefill has run.
        cache: the cache, which holds the prompt.
        first: the first token.
        rules: the rules of the call's processors.
    """
    (batch, prompt), device, token = call.ids.shape, call.ids.device, first.token
    vocabulary, requested = first.scores.shape[-1], requested_scores(call.config)
    lengths = [x.max_cache_len for x in decoder_layers(cache) if isinstance(x, StaticLayer)]
    capacity = max([call.max_length, *lengths])
    mask = call.decoder_input("attention_mask")
    if mask is not None:
        slots = lengths[0] if lengths else decoder_layers(cache)[0].get_mask_sizes(1)[0]
        mask = nn.functional.pad(mask, (0, max(0, slots - mask.shape[1])), value=1).contiguous()
    drafts = call.drafts
    sequences = torch.zeros(batch, capacity + 1 + drafts, dtype=torch.int64, device=device)
    sequences[:, :prompt], sequences[:, prompt] = call.ids, token[:, 0]
    eos = call.end_tokens()
    ended = torch.zeros(batch, dtype=torch.bool, device=device) if eos is None else (token == eos).any(1)
    return StepState(
        token=token.clone(),
        position=call.position(),
        mask=mask,
        sequences=sequences,
        length=torch.tensor([prompt + 1], device=device),
        latest=torch.zeros(batch, 1 + drafts, dtype=torch.int64, device=device),
        report=torch.zeros(3, dtype=torch.int64, device=device),
        ended=ended,
        eos=eos,
        pad=None if eos is None else pad_token(call.config, device),
        noise=torch.ones(batch, vocabulary, device=device, dtype=torch.float32) if call.config.do_sample else None,
        occurred=occurred_tokens(call.processors, call.ids, token, vocabulary),
        limit=torch.tensor([call.max_length], device=device) if drafts else None,
        logits=torch.zeros_like(first.logits) if "logits" in requested else None,
        scores=torch.zeros_like(first.scores) if "scores" in requested else None,
        rules=tuple([Rule(rule.apply, tuple([x.to(device) for x in rule.operands])) for rule in rules]),
    )
