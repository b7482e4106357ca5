"""Compiled steps with their buffers and caches, which later calls of the same kind reuse."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache

from tatten.caches.static_address import mark_static
from tatten.integrations.transformers.config import CACHE
from tatten.integrations.transformers.loop.assistant import Assistant, first_draft, next_draft
from tatten.integrations.transformers.loop.cache import (
    cache_for_prefill,
    capacity_for,
    decoder_cache,
    decoder_layers,
    static_cache,
)
from tatten.integrations.transformers.loop.call import FirstToken, GenerateCall, initial_state
from tatten.integrations.transformers.loop.capture import Runner
from tatten.integrations.transformers.loop.compiled_function import Calls, CompiledFunction
from tatten.integrations.transformers.loop.compiling import compile_arguments, uses_cudagraph_trees
from tatten.integrations.transformers.loop.fingerprint import leaves, numbers_of, state_of
from tatten.integrations.transformers.loop.generate_call import is_users_cache
from tatten.integrations.transformers.loop.lookup import lookup_step
from tatten.integrations.transformers.loop.processors import rules
from tatten.integrations.transformers.loop.rope_deltas import RopeDeltas
from tatten.integrations.transformers.loop.source import Source, SourceInputs, source_inputs
from tatten.integrations.transformers.loop.step import StepState, decode_step
from tatten.integrations.transformers.loop.verify import verify

MOST_STEPS = 8  # prepared steps that are kept for a model


@dataclass
class PreparedStep:
    """A compiled step with the buffers and the cache that it uses."""

    state: StepState
    cache: weakref.ref[Cache] | Cache  # a user's cache is not kept alive
    runner: Runner
    assistant: Assistant | None = None
    source: Source | None = None
    rope_deltas: RopeDeltas = field(default_factory=RopeDeltas)

    def uses(self, cache: Cache, draft: nn.Module | None) -> bool:
        """Return True if the step uses this cache and this draft model, and did not fail."""
        if self.runner.failed:
            return False
        step_cache = self.cache if isinstance(self.cache, Cache) else self.cache()
        return step_cache is cache and (self.assistant.model() if self.assistant else None) is draft


Steps = OrderedDict[tuple[object, ...], PreparedStep]  # the first part of a key is the key of the cache


@dataclass(frozen=True)
class CallCache:
    """The cache of a call.

    Attributes:
        prefill: the cache that the prefill fills: the user's cache, the cleared cache of an earlier call, or a new one.
        key: the first part of the keys of its steps.
        source: the inputs of an encoder-decoder's steps. It is None without an encoder, and with a user's cache.
        earlier: a step with the same cache, or None.
    """

    prefill: Cache
    key: tuple[object, ...]
    source: SourceInputs | None = None
    earlier: PreparedStep | None = None


def cache_for(call: GenerateCall, steps: Steps) -> CallCache:
    """Return the cache of a call."""
    like, batch, mode = call.inputs[CACHE], len(call.ids), modes(call.ids.device)
    if is_users_cache(like):
        return CallCache(like, ("of the user", id(like), mode))
    requested = getattr(call.config, "max_cache_len", None) or 0
    capacity = max(capacity_for(call.max_length + call.drafts), requested)
    encodes = isinstance(like, EncoderDecoderCache)
    source = source_inputs(call.model, call.constant_inputs()) if encodes else None
    layout = () if source is None else source.layout()
    numbers = tuple(numbers_of(vars(call.model.config)))  # layers, heads and widths are among them
    key = batch, capacity, call.model.dtype, call.ids.device, layout, mode, numbers
    earlier = next((step for step_key, step in steps.items() if step_key[0] == key), None)
    if earlier is None:
        return CallCache(cache_for_prefill(static_cache(call.model, capacity), like), key, source)
    assert isinstance(earlier.cache, Cache)
    return CallCache(cache_for_prefill(decoder_cache(earlier.cache), like), key, source, earlier)


def _source_of(cache: CallCache) -> Source | None:
    """Return the source of a call, whose prefill has run, in the buffers of an earlier call if there is one."""
    if cache.source is None:
        return None
    assert isinstance(cache.prefill, EncoderDecoderCache)
    if cache.earlier is None or cache.earlier.source is None:
        return Source(cache.prefill, cache.source)
    cache.earlier.source.fill(cache.prefill, cache.source)
    return cache.earlier.source


def step_inputs(call: GenerateCall, source: Source | None) -> dict[str, Any]:
    """Return the arguments of the model's forward that are the same at each step of a call."""
    return call.constant_inputs() if source is None else source.inputs


def modes(device: torch.device) -> tuple[object, ...]:
    """Return the modes of PyTorch. Calls in different modes can't share buffers."""
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return torch.is_inference_mode_enabled(), autocast


def prepare(call: GenerateCall, steps: Steps, call_cache: CallCache, first: FirstToken) -> PreparedStep:
    """Return a step with the state of this call, in the buffers of an earlier call of the same kind if there is one.

    Args:
        call: the call, whose prefill has run.
        steps: the prepared steps of the model.
        call_cache: its cache.
        first: the first token.
    """
    source = _source_of(call_cache)
    cache = call_cache.prefill if source is None else source.cache
    state = initial_state(call, cache, first, rules(call.processors))
    compiling = compile_arguments(call.config.compile_config, call.ids.device)
    inputs = step_inputs(call, source)
    drafts, ngram = call.drafts, call.config.max_matching_ngram_size or 2 if call.drafts else 0
    key = (
        call_cache.key,
        tuple([rule.apply for rule in state.rules]),
        tuple([name for name, x in vars(state).items() if x is None]),
        tuple([(x.shape, x.dtype) for x in state.tensors()]),
        repr(compiling),
        ngram,
        state_of(call.model),
        () if call.draft is None else (id(call.draft), drafts, call.draft.dtype, state_of(call.draft)),
        tuple([(name, x) for name, x in sorted(inputs.items()) if isinstance(x, (int, float, str))]),
    )
    step = steps.get(key)
    if step is not None and step.uses(cache, call.draft):
        steps.move_to_end(key)
        for buffer, x in zip(step.state.tensors(), state.tensors(), strict=True):
            buffer.copy_(x)
        return step
    for x in state.tensors():
        mark_static(x)

    function = verify if call.draft is not None else lookup_step if drafts else decode_step
    compute = CompiledFunction(function, compiling)
    cache_of, assistant = weakref.ref(cache), assistant_of(call, cache, compiling)

    def draw_noise() -> None:
        if state.noise is not None:
            state.noise.exponential_(1)  # eager mode draws the numbers of `torch.multinomial`

    def calls(model: nn.Module, inputs: dict[str, Any]) -> Calls:
        if assistant is not None:
            choices = assistant.calls(state, inputs)
            return [*choices, (compute, (model, cache_of(), state, assistant.drafts, inputs))]
        lookup = (drafts, ngram) if drafts else ()
        return [(compute, (model, cache_of(), state, *lookup, inputs))]

    runner = Runner(
        calls,
        before_step=draw_noise,
        caches=lambda: (cache_of(), None if assistant is None else assistant.cache),
        not_captured=_not_captured(call, compiling, source, inputs),
        draft=lambda: None if assistant is None else assistant.model(),
    )
    step = steps[key] = PreparedStep(state, cache_of if is_users_cache(cache) else cache, runner, assistant, source)
    while len(steps) > MOST_STEPS:
        steps.popitem(last=False)
    return step


def assistant_of(call: GenerateCall, cache: Cache, compiling: dict[str, Any]) -> Assistant | None:
    """Make the buffers of a call's draft model, with a cache as long as that of the model, and compile its code."""
    if call.draft is None:
        return None
    capacity = decoder_layers(cache)[0].max_cache_len
    drafts = torch.zeros(call.drafts, dtype=torch.int64, device=call.ids.device)
    mark_static(drafts)
    draft_cache = static_cache(call.draft, capacity)
    first, following = CompiledFunction(first_draft, compiling), CompiledFunction(next_draft, compiling)
    return Assistant(weakref.ref(call.draft), draft_cache, drafts, first, following)


def _not_captured(
    call: GenerateCall, compiling: dict[str, Any], source: Source | None, inputs: dict[str, Any]
) -> str | None:
    """Return the reason why a step is not captured as a CUDA graph, or None if it is."""
    if not call.ids.is_cuda:
        return f"the device {call.ids.device} has no CUDA graphs"
    if uses_cudagraph_trees(compiling):
        return "the options ask for CUDA graphs of Inductor"
    if source is None and any(map(_holds_tensors, inputs.values())):
        return "inputs of the model, such as an encoder's output, are other tensors in each call"
    return None


def _holds_tensors(x: object) -> bool:
    return any(isinstance(y, Tensor) for y in leaves(x))
