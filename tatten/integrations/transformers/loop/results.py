"""The results of a call besides its tokens, if it asks for them: scores of each token, and the cache."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationConfig
from transformers.cache_utils import StaticLayer

from tatten.integrations.transformers.loop.cache import decoder_cache
from tatten.integrations.transformers.loop.step import StepState


class TokenScores:
    """Copies of the scores and logits of each token, float32 `[batch, vocabulary]`, which the next step overwrites.

    Args:
        state: the state of the step.
        first: the scores and logits of the first token, by their names in the state.
    """

    def __init__(self, state: StepState, first: dict[str, Tensor]):
        self._buffers = {name: x for name in first if (x := getattr(state, name)) is not None}
        self._kept = {name: [first[name]] for name in self._buffers}

    def after_launch(self) -> None:
        """Copy the scores of the last step, on the device."""
        for name, buffer in self._buffers.items():
            self._kept[name].append(buffer.clone())

    def of_first(self, count: int) -> dict[str, tuple[Tensor, ...]]:
        """Return the fields of `generate`'s output, with the scores of the first `count` tokens."""
        return {name: tuple(kept[:count]) for name, kept in self._kept.items()}


def requested_scores(config: GenerationConfig) -> set[str]:
    """Return the names of the fields with scores in the output of a call."""
    requested = {"scores": config.output_scores, "logits": config.output_logits}
    return {name for name, x in requested.items() if x and config.return_dict_in_generate}


def cache_of_result(cache: Cache, like: Cache, tokens: int, surplus: int) -> Cache | None:
    """Return a cache that later calls leave alone, or None if the GPU has no memory for it.

    Args:
        cache: the cache of the steps. The result shares its keys and values of a source.
        like: the cache that `generate` made, which is empty. If it grows, the result has its kind, and no free slots.
        tokens: the number of tokens that the result holds.
        surplus: the number of tokens behind them.
    """
    steps, empty = decoder_cache(cache), decoder_cache(like)
    try:
        if type(empty) is DynamicCache and all(type(x) is StaticLayer for x in steps.layers):
            for index, layer in enumerate(steps.layers):
                empty.update(layer.keys[:, :, :tokens], layer.values[:, :, :tokens], index)
            kept: Cache = empty
        else:
            kept = copy.deepcopy(steps)
            if surplus:
                kept.crop(-surplus)
    except torch.OutOfMemoryError:
        return None
    return EncoderDecoderCache(kept, cache.cross_attention_cache) if isinstance(cache, EncoderDecoderCache) else kept
