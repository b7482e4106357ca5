"""`DecodeLoop`: a loop for `generate` in which the host launches steps ahead, and reads their tokens later."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from tatten.integrations.transformers.config import cache_kwargs
from tatten.integrations.transformers.loop.call import GenerateCall
from tatten.integrations.transformers.loop.capture import NotCompiledError
from tatten.integrations.transformers.loop.compiling import compile_arguments
from tatten.integrations.transformers.loop.fingerprint import state_of
from tatten.integrations.transformers.loop.generate_call import (
    Dropped,
    decoding,
    dropped_arguments,
    of_the_user,
    rng_state,
    run_unmodified,
    set_rng_state,
)
from tatten.integrations.transformers.loop.prepared import Steps, cache_for, prepare
from tatten.integrations.transformers.loop.reader import Reader
from tatten.integrations.transformers.loop.reasons import reason_against
from tatten.integrations.transformers.loop.step import CACHE

logger = logging.getLogger(__name__)


class DecodeLoop:
    """Decodes for `model.generate(..., custom_generate=decode_loop)`.

    One compiled step holds the model, its masks, logits processors, sampling, the end check and all bookkeeping. On a
    GPU it is captured as a CUDA graph. The host launches steps ahead and reads tokens later, so that it never delays
    the GPU. Tokens are those of `generate`, sampled ones too, for the same seed.

    A call that asks for more than a captured step can do (beams, a custom logits processor) runs the loop of
    `generate`, and logs a warning with the reason once.

    Args:
        ahead: the number of steps on a GPU that are launched before the first of them is read. Streamers get a token
            this much later, and a text that ends takes this many steps more.

    Attributes:
        reason: the reason why the last call ran the loop of `generate`; None if it did not.
        not_captured: the reason why the steps of the last call in this loop were compiled and launched ahead, but not
            captured as a CUDA graph; None if they were.
        launched_steps: the number of steps that the last call in this loop launched, after its prefill.
    """

    def __init__(self, ahead: int = 2):
        if not isinstance(ahead, int) or isinstance(ahead, bool) or ahead < 0:
            raise ValueError(f"`ahead` must be an int of at least 0, got {ahead!r}")
        self.ahead = ahead
        self.reason: str | None = None
        self.not_captured: str | None = None
        self.launched_steps = 0
        self._steps: weakref.WeakKeyDictionary[nn.Module, Steps]
        self._steps = weakref.WeakKeyDictionary()
        self._uncompiled: weakref.WeakKeyDictionary[nn.Module, dict[object, str]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._running: int | None = None  # the thread whose call has the lock
        self._last_turn: torch.cuda.Event | None = None
        self._logged: set[str] = set()

    def reset(self) -> None:
        """Free all compiled steps, CUDA graphs and caches that calls left for later calls."""
        if self._running == threading.get_ident():
            raise RuntimeError("`reset` must not be called by a streamer or a hook of a call that is running")
        with self._lock:
            self._steps.clear()
            self._uncompiled.clear()

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **inputs: Any,
    ) -> Any:
        """Generate: `generate` calls this with all that it has prepared."""
        dropped = dropped_arguments(model)
        dropped = Dropped(*[inputs.pop(name, None) or x for name, x in dropped._asdict().items()])
        arguments = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria}
        # A local variable: another thread's call may set the attribute in between.
        reason = self._reason_against(model, input_ids, generation_config, dropped, inputs, **arguments)
        if reason is None:
            draft = None if generation_config.prompt_lookup_num_tokens else dropped.assistant_model
            call = GenerateCall(
                model, input_ids, logits_processor, stopping_criteria, generation_config, {**inputs}, draft
            )
            state = rng_state(input_ids.device)
            try:
                with self._turn(input_ids.device), torch.no_grad():
                    self.reason = None
                    return self._decode(call, dropped.streamer)
            except NotCompiledError as error:
                if of_the_user(inputs[CACHE]):  # it holds the prompt by now
                    raise
                reason = f"the step does not compile as one graph: {error}"
                self._uncompiled.setdefault(model, {})[_kind(model, generation_config, input_ids, dropped)] = reason
                set_rng_state(input_ids.device, state)
        self.reason, self.not_captured, self.launched_steps = reason, None, 0
        if reason not in self._logged:
            self._logged.add(reason)
            logger.warning("tatten: `generate` runs its own loop, because %s", reason)
        return run_unmodified(model, input_ids, generation_config, dropped, {**arguments, **inputs})

    def _reason_against(
        self,
        model: PreTrainedModel,
        ids: Tensor,
        config: GenerationConfig,
        dropped: Dropped,
        inputs: dict[str, Any],
        logits_processor: Any,
        stopping_criteria: Any,
    ) -> str | None:
        if self._running == threading.get_ident():
            return "this loop is running in this thread, and a streamer or a hook called it"
        uncompiled = self._uncompiled.get(model, {})
        if uncompiled and (reason := uncompiled.get(_kind(model, config, ids, dropped))) is not None:
            return reason
        return reason_against(
            model, ids, logits_processor, stopping_criteria, config, inputs.get(CACHE), inputs, dropped
        )

    @contextlib.contextmanager
    def _turn(self, device: torch.device) -> Iterator[None]:
        """Wait for calls of other threads, whose buffers this call may use. On a GPU, also wait for their kernels."""
        on_gpu = device.type == "cuda"
        with self._lock, torch.cuda.device(device) if on_gpu else contextlib.nullcontext():
            self._running = threading.get_ident()
            if on_gpu and self._last_turn is not None:
                torch.cuda.current_stream().wait_event(self._last_turn)
            try:
                yield
            finally:
                self._running = None
                if on_gpu:
                    self._last_turn = torch.cuda.Event()
                    self._last_turn.record()

    def _decode(self, call: GenerateCall, streamer: Any) -> Any:
        steps = self._steps.setdefault(call.model, Steps())
        ours = not of_the_user(call.inputs[CACHE])
        cache, cache_key = cache_for(call, steps)
        call.inputs[CACHE] = cache
        first, vocabulary = call.first_token()
        step = prepare(call, steps, (cache, cache_key), first, vocabulary)
        on_gpu = call.ids.is_cuda
        if step.assistant is not None:
            step.assistant.read_prompt(call)
        reader = Reader(step.state, self._steps_ahead(cache, ours, call, on_gpu), streamer, first)
        inputs, limit = call.constant_inputs(), call.time_limit()
        generator = torch.cuda.default_generators[call.ids.device.index] if on_gpu else None
        offset, launched = 0, 0  # not the attribute, which a call by a streamer sets
        with decoding(call.model):
            step.runner.begin(call.model)
            ended = time.time() > limit or bool(step.state.eos is not None and step.state.ended.all())
            while not ended and launched < call.max_length - call.ids.shape[1] - 1:
                before = generator.get_offset() if generator is not None else 0
                step.runner.run(call.model, inputs)
                offset = generator.get_offset() - before if generator is not None else 0
                launched += 1
                ended = reader.after_launch() or time.time() > limit
        reader.finish()
        self.launched_steps, self.not_captured = launched, step.runner.not_captured
        surplus = 0 if call.drafts else launched - reader.needed_tokens
        if surplus and generator is not None and offset:
            generator.set_offset(generator.get_offset() - surplus * offset)
        if surplus and not ours:
            cache.crop(-surplus)
        sequences = step.state.sequences[:, : call.ids.shape[1] + 1 + reader.needed_tokens].clone()
        if not call.config.return_dict_in_generate:
            return sequences
        if ours:  # the caller owns the cache now: another call must not write to it
            for key in [key for key, x in steps.items() if x.cache is cache]:
                del steps[key]
            if surplus:
                cache.crop(-surplus)
        kind = GenerateEncoderDecoderOutput if call.model.config.is_encoder_decoder else GenerateDecoderOnlyOutput
        return kind(sequences=sequences, **cache_kwargs(cache))

    def _steps_ahead(self, cache: Cache, ours: bool, call: GenerateCall, on_gpu: bool) -> int:
        """Return 0 where surplus steps gain nothing, or can't be taken back from a cache that is used again."""
        kept = not ours or call.config.return_dict_in_generate
        return self.ahead if on_gpu and (not kept or cache.is_croppable) else 0


def _kind(model: nn.Module, config: GenerationConfig, ids: Tensor, dropped: Dropped) -> object:
    """The calls that do not compile if one of them does not."""
    draft = dropped.assistant_model
    states = state_of(model), None if draft is None else state_of(draft)
    return repr(compile_arguments(config.compile_config, ids.device)), *states


decode_loop = DecodeLoop()
