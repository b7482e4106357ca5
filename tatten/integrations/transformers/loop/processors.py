"""Logits processors of transformers as functions of tensors, so that a captured step can run them.

Each function computes the scores of a processor of transformers, in the same order of operations. Numbers such as a
temperature are operands: 0-d tensors on the device. A new number is copied into the tensor and recompiles nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import logits_process as lp

from tatten.integrations.transformers.loop.history import History, mark
from tatten.integrations.transformers.loop.text_rules import (
    bad_words,
    ngrams_of_source,
    no_bad_words,
    no_ngram_of_source,
    no_repeated_ngram,
    size_of,
)
from tatten.integrations.transformers.loop.timestamps import timestamp_numbers, timestamps, unsupported_timestamps
from tatten.passes.top_k import LEAST_SCORES, MOST_SCORES

# On a GPU Inductor computes a cumsum by a scan with decoupled look-back. The order of its sums depends on timing, and
# PyTorch 2.11 fails to generate it for more than one row. An opaque op calls the kernel of eager mode instead.
_library = torch.library.Library("tatten", "FRAGMENT")
_library.define("cumsum(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("cumsum", lambda x: x.cumsum(-1), "CompositeExplicitAutograd")
torch.library.register_fake("tatten::cumsum", lambda x: x.new_empty(x.shape), lib=_library)

LEAST_FLOAT = -math.inf
BUCKETS = 64, 1024, 1 << 20  # of the k of top-k


Scores = Callable[..., Tensor]  # takes scores, float32 `[rows, vocabulary]`, a History, and operands


class Rule(NamedTuple):
    """One processor in a captured step.

    Attributes:
        apply: the function, at module level, so that Dynamo guards on its identity.
        operands: its operands, on the CPU at first, and in the state of a step on its device.
    """

    apply: Scores
    operands: tuple[Tensor, ...]


def unsupported_processor(processor: Any, prompt_length: int) -> str | None:
    """Return the reason why a captured step can't run a processor after a prompt, or None if it can."""
    name = type(processor).__name__
    if type(processor) in FIRST_TOKEN_ONLY:
        return None
    if type(processor) not in _RULES:
        return f"the logits processor {name} is not known to be free of Python that depends on the text"
    if getattr(processor, "filter_value", LEAST_FLOAT) != LEAST_FLOAT:
        return f"the logits processor {name} has a `filter_value` other than -inf, {processor.filter_value}"
    if type(processor) is lp.TopKLogitsWarper and processor.top_k > BUCKETS[-1]:
        return f"the logits processor {name} keeps {processor.top_k} tokens, more than {BUCKETS[-1]}"
    if type(processor) is lp.MinPLogitsWarper and processor.min_tokens_to_keep != 1:
        # `torch.topk` breaks ties in an order that depends on k, which varies here.
        return f"the logits processor {name} keeps {processor.min_tokens_to_keep} tokens of any probability"
    if type(processor) is lp.WhisperTimeStampLogitsProcessor and (reason := unsupported_timestamps(processor)):
        return reason
    ignored = getattr(processor, "prompt_ignore_length", None)
    if ignored is not None and int(ignored.max() if isinstance(ignored, Tensor) else ignored) > prompt_length:
        return f"the logits processor {name} ignores more tokens than the prompt has"
    return None


def rules(processors: Sequence[Any]) -> tuple[Rule, ...]:
    """Return the rules of supported processors for all tokens but the first, which runs outside the captured step."""
    result: list[Rule] = []
    for processor in processors:
        if type(processor) not in FIRST_TOKEN_ONLY:
            apply, operands = _RULES[type(processor)]
            result.append(Rule(apply, operands(processor)))
    return tuple(result)


def processed(scores: Tensor, history: History, rules: Sequence[Rule]) -> Tensor:
    """Return scores after all rules."""
    for rule in rules:
        scores = rule.apply(scores, history, *rule.operands)
    return scores


def occurred_tokens(processors: Sequence[Any], ids: Tensor, first: Tensor, vocabulary: int) -> Tensor | None:
    """Return the tokens that a repetition penalty counts after the first token; see `History`.

    Args:
        ids: the prompt, `[batch, prompt_length]`.
        first: the first token, `[batch, 1]`.
        vocabulary: the number of tokens.
    """
    penalty = next((x for x in processors if type(x) is lp.RepetitionPenaltyLogitsProcessor), None)
    if penalty is None:
        return None
    ignored = torch.as_tensor(0 if penalty.prompt_ignore_length is None else penalty.prompt_ignore_length)
    positions = torch.arange(ids.shape[1], device=ids.device)
    counted = ids.masked_fill(positions < ignored.to(ids.device).reshape(-1, 1), vocabulary)
    occurred = torch.zeros(len(ids), vocabulary + 1, dtype=torch.bool, device=ids.device)
    return mark(first, mark(counted, occurred))


def _number(x: float) -> Tensor:
    return torch.tensor(float(x), dtype=torch.float32)


def _count(x: int) -> Tensor:
    return torch.tensor(int(x), dtype=torch.int64)


def _tokens(x: Tensor) -> Tensor:
    return x.detach().to("cpu", torch.int64).reshape(-1)


def _is_one_of(scores: Tensor, tokens: Tensor) -> Tensor:
    """Return a bool mask `[vocabulary]` of the tokens. Tokens beyond the vocabulary are ignored."""
    vocabulary = torch.arange(scores.shape[-1], device=scores.device)
    return (vocabulary[:, None] == tokens).any(1)


def _rank(k: int) -> tuple[Tensor, Tensor]:
    """Return k as a tensor, and a tensor whose length is the k of `torch.topk`, which can't be a tensor.

    Another k of the same bucket recompiles nothing. Sorting the vocabulary would take several times as long.
    """
    bucket = next(n for n in BUCKETS if k <= n)
    return _count(k), torch.zeros(bucket, dtype=torch.uint8)


def _below_kth(scores: Tensor, k: Tensor, bucket: Tensor) -> Tensor:
    """Return a mask of the scores below the k-th largest of their row; see `_rank`."""
    largest = _largest(scores, min(len(bucket), scores.shape[-1]))
    return scores < largest.gather(1, (k - 1).clamp(max=largest.shape[-1] - 1).expand(len(scores), 1))


def _largest(scores: Tensor, n: int) -> Tensor:
    """Return `scores.topk(n).values`, on a GPU by `top_picks` for as many scores as it was measured for."""
    length = scores.shape[-1]
    picks = scores.device.type == "cuda" and n < length and length >= LEAST_SCORES and scores.numel() <= MOST_SCORES
    return largest_by_picks(scores, n) if picks else scores.topk(n).values


def largest_by_picks(scores: Tensor, n: int) -> Tensor:
    """Return `scores.topk(n).values` for scores of any device, by a selection without a sort and a sort of `n`."""
    picks = torch.ops.tatten.top_picks(scores, n)
    return scores.gather(-1, picks.long()).sort(-1, descending=True).values


def _temperature(scores: Tensor, history: History, temperature: Tensor) -> Tensor:
    return scores / temperature


def _top_k(scores: Tensor, history: History, k: Tensor, bucket: Tensor) -> Tensor:
    return scores.masked_fill(_below_kth(scores, k, bucket), LEAST_FLOAT)


def _top_p(scores: Tensor, history: History, least: Tensor, kept: Tensor) -> Tensor:
    ordered, order = torch.sort(scores, descending=False)
    unlikely = torch.ops.tatten.cumsum(ordered.softmax(-1)) <= least
    n = scores.shape[-1]
    unlikely = unlikely & (torch.arange(n, device=scores.device) < n - kept)
    return scores.masked_fill(unlikely.scatter(1, order, unlikely), LEAST_FLOAT)


def _min_p(scores: Tensor, history: History, min_p: Tensor) -> Tensor:
    probabilities = scores.softmax(-1)
    unlikely = probabilities < min_p * probabilities.amax(-1, keepdim=True)
    unlikely = unlikely.scatter(1, probabilities.topk(1).indices, False)
    return scores.masked_fill(unlikely, LEAST_FLOAT)


def _typical(scores: Tensor, history: History, mass: Tensor, kept: Tensor) -> Tensor:
    logarithms = torch.log_softmax(scores, -1)
    entropy = -(logarithms * logarithms.exp()).nansum(-1, keepdim=True)
    ordered, order = torch.sort((-logarithms - entropy).abs(), descending=False)
    below = torch.ops.tatten.cumsum(scores.gather(-1, order).softmax(-1)) < mass
    last = below.sum(1).clamp(max=scores.shape[-1] - 1)
    unusual = ordered > ordered.gather(1, last[:, None])
    unusual = unusual & (torch.arange(scores.shape[-1], device=scores.device) >= kept)
    return scores.masked_fill(unusual.scatter(1, order, unusual), LEAST_FLOAT)


def _epsilon(scores: Tensor, history: History, epsilon: Tensor, kept: Tensor, bucket: Tensor) -> Tensor:
    unlikely = scores.softmax(-1) < epsilon
    return scores.masked_fill(unlikely & _below_kth(scores, kept, bucket), LEAST_FLOAT)


def _eta(scores: Tensor, history: History, epsilon: Tensor, kept: Tensor, bucket: Tensor) -> Tensor:
    probabilities = scores.softmax(-1)
    # The same operations as `torch.distributions.Categorical(logits=scores).entropy()`.
    logarithms = scores - scores.logsumexp(-1, keepdim=True)
    entropy = -(logarithms.clamp(min=torch.finfo(scores.dtype).min) * logarithms.softmax(-1)).sum(-1)
    eta = torch.min(epsilon, torch.sqrt(epsilon) * torch.exp(-entropy))[..., None]
    return scores.masked_fill((probabilities < eta) & _below_kth(scores, kept, bucket), LEAST_FLOAT)


def _repetition(scores: Tensor, history: History, penalty: Tensor) -> Tensor:
    assert history.occurred is not None
    occurred = history.occurred[:, : scores.shape[1]]
    return torch.where(occurred, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def _suppress(scores: Tensor, history: History, tokens: Tensor) -> Tensor:
    return torch.where(_is_one_of(scores, tokens), LEAST_FLOAT, scores)


def _suppress_before(scores: Tensor, history: History, length: Tensor, tokens: Tensor) -> Tensor:
    return torch.where(_is_one_of(scores, tokens) & (history.length < length), LEAST_FLOAT, scores)


def _suppress_at(scores: Tensor, history: History, length: Tensor, tokens: Tensor) -> Tensor:
    return torch.where(_is_one_of(scores, tokens) & (history.length == length), LEAST_FLOAT, scores)


def _force_at(scores: Tensor, history: History, length: Tensor, tokens: Tensor) -> Tensor:
    only = torch.where(_is_one_of(scores, tokens), 0.0, LEAST_FLOAT)
    return torch.where(history.length == length, only, scores)


def _finite(scores: Tensor, history: History) -> Tensor:
    limits = torch.finfo(scores.dtype)
    finite = torch.where(scores != scores, 0.0, scores)
    finite = torch.where(scores == math.inf, limits.max, finite)
    return torch.where(scores == LEAST_FLOAT, limits.min, finite)


def _normalise(scores: Tensor, history: History) -> Tensor:
    return scores.log_softmax(-1)


FIRST_TOKEN_ONLY = (lp.ForcedBOSTokenLogitsProcessor,)
_RULES: dict[type, tuple[Scores, Callable[[Any], tuple[Tensor, ...]]]] = {
    lp.TemperatureLogitsWarper: (_temperature, lambda x: (_number(x.temperature),)),
    lp.TopKLogitsWarper: (_top_k, lambda x: _rank(x.top_k)),
    lp.TopPLogitsWarper: (_top_p, lambda x: (_number(1 - x.top_p), _count(x.min_tokens_to_keep))),
    lp.MinPLogitsWarper: (_min_p, lambda x: (_number(x.min_p),)),
    lp.TypicalLogitsWarper: (_typical, lambda x: (_number(x.mass), _count(x.min_tokens_to_keep))),
    lp.EpsilonLogitsWarper: (_epsilon, lambda x: (_number(x.epsilon), *_rank(x.min_tokens_to_keep))),
    lp.EtaLogitsWarper: (_eta, lambda x: (_number(x.epsilon), *_rank(x.min_tokens_to_keep))),
    lp.RepetitionPenaltyLogitsProcessor: (_repetition, lambda x: (_number(x.penalty),)),
    lp.NoRepeatNGramLogitsProcessor: (no_repeated_ngram, size_of),
    lp.EncoderNoRepeatNGramLogitsProcessor: (no_ngram_of_source, ngrams_of_source),
    lp.NoBadWordsLogitsProcessor: (no_bad_words, bad_words),
    lp.SuppressTokensLogitsProcessor: (_suppress, lambda x: (_tokens(x.suppress_tokens),)),
    lp.SuppressTokensAtBeginLogitsProcessor: (
        _suppress_at,
        lambda x: (_count(x.begin_index), _tokens(x.begin_suppress_tokens)),
    ),
    lp.MinLengthLogitsProcessor: (_suppress_before, lambda x: (_count(x.min_length), _tokens(x.eos_token_id))),
    lp.MinNewTokensLengthLogitsProcessor: (
        _suppress_before,
        lambda x: (_count(x.prompt_length_to_skip + x.min_new_tokens), _tokens(x.eos_token_id)),
    ),
    lp.ForcedEOSTokenLogitsProcessor: (_force_at, lambda x: (_count(x.max_length - 1), _tokens(x.eos_token_id))),
    lp.WhisperTimeStampLogitsProcessor: (timestamps, timestamp_numbers),
    lp.InfNanRemoveLogitsProcessor: (_finite, lambda x: ()),
    lp.LogitNormalization: (_normalise, lambda x: ()),
}
