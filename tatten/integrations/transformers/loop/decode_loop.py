"""`DecodeLoop`: a loop for `generate` in which the host launches steps ahead and reads their tokens later."""

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

from tatten.integrations.transformers.config import CACHE, cache_kwargs
from tatten.integrations.transformers.loop.cache import decoder_cache
from tatten.integrations.transformers.loop.call import GenerateCall
from tatten.integrations.transformers.loop.capture import (
    FailedPrefillError,
    NoStepError,
    NotCompiledError,
    UnstableStepError,
)
from tatten.integrations.transformers.loop.compiling import compile_arguments
from tatten.integrations.transformers.loop.fingerprint import state_of
from tatten.integrations.transformers.loop.generate_call import (
    Dropped,
    decoding,
    dropped_arguments,
    is_users_cache,
    rng_state,
    run_unmodified,
    set_rng_state,
)
from tatten.integrations.transformers.loop.prepared import Steps, cache_for, prepare, step_inputs
from tatten.integrations.transformers.loop.reader import Reader
from tatten.integrations.transformers.loop.reasons import reason_against
from tatten.integrations.transformers.loop.results import TokenScores, cache_of_result

logger = logging.getLogger(__name__)


class DecodeLoop:
    """A decode loop for `model.generate(..., custom_generate=decode_loop)`.

    One compiled step contains the model, its masks, logits processors, sampling, the end check and all bookkeeping. On
    a GPU it is captured as a CUDA graph. The host launches steps ahead and reads tokens later, so that the GPU never
    waits for it. The tokens are those of `generate`, also with sampling for the same seed.

    A call that a captured step does not support, such as one with beams or a custom logits processor, runs the loop of
    `generate`. It logs a warning with the reason once.

    Args:
        ahead: the number of steps on a GPU that are launched before the first of them is read. Streamers get tokens
            this many steps later, and this many more steps run after the end of a text.

    Attributes:
        reason: the reason why the last call ran the loop of `generate`; None if it ran this loop.
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
        self._steps: weakref.WeakKeyDictionary[nn.Module, Steps] = weakref.WeakKeyDictionary()
        self._declined: weakref.WeakKeyDictionary[nn.Module, dict[object, str]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._running: int | None = None  # the thread whose call has the lock
        self._last_call: torch.cuda.Event | None = None
        self._logged: set[str] = set()

    def reset(self) -> None:
        """Free all compiled steps, CUDA graphs and caches that are kept for later calls."""
        if self._running == threading.get_ident():
            raise RuntimeError("`reset` must not be called by a streamer or a hook of a call that is running")
        with self._lock:
            self._steps.clear()
            self._declined.clear()

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **inputs: Any,
    ) -> Any:
        """Generate tokens. `generate` calls this with the arguments of its loop."""
        dropped = dropped_arguments(model)
        dropped = Dropped(*[inputs.pop(name, None) or x for name, x in dropped._asdict().items()])
        arguments = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria}
        # A local variable: a call of another thread may overwrite the attribute.
        reason = self._reason_against(model, input_ids, generation_config, dropped, inputs, **arguments)
        if reason is None:
            draft = None if generation_config.prompt_lookup_num_tokens else dropped.assistant_model
            call = GenerateCall(
                model, input_ids, logits_processor, stopping_criteria, generation_config, {**inputs}, draft
            )
            state = rng_state(input_ids.device)
            try:
                with self._exclusive(input_ids.device), torch.no_grad():
                    self.reason = None
                    return self._decode(call, dropped.streamer)
            except NoStepError as error:
                if isinstance(error, NotCompiledError) and is_users_cache(inputs[CACHE]):
                    raise  # the cache already holds the prompt
                reason = str(error)
                if not isinstance(error, FailedPrefillError):
                    stable = not isinstance(error, UnstableStepError)
                    key = _compile_key(model, generation_config, input_ids, dropped, stable)
                    self._declined.setdefault(model, {})[key] = reason
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
        declined = self._declined.get(model, {})
        for stable in (True, False) if declined else ():
            if (reason := declined.get(_compile_key(model, config, ids, dropped, stable))) is not None:
                return reason
        return reason_against(
            model, ids, logits_processor, stopping_criteria, config, inputs.get(CACHE), inputs, dropped
        )

    @contextlib.contextmanager
    def _exclusive(self, device: torch.device) -> Iterator[None]:
        """Hold the lock of the loop: calls of other threads may use the same buffers.

        On a GPU, the current stream also waits for the kernels of the last call.
        """
        on_gpu = device.type == "cuda"
        with self._lock, torch.cuda.device(device) if on_gpu else contextlib.nullcontext():
            self._running = threading.get_ident()
            if on_gpu and self._last_call is not None:
                torch.cuda.current_stream().wait_event(self._last_call)
            try:
                yield
            finally:
                self._running = None
                if on_gpu:
                    self._last_call = torch.cuda.Event()
                    self._last_call.record()

    def _decode(self, call: GenerateCall, streamer: Any) -> Any:
        steps = self._steps.setdefault(call.model, Steps())
        like = call.inputs[CACHE]
        owns_cache = not is_users_cache(like)
        call_cache = cache_for(call, steps)
        call.inputs[CACHE] = call_cache.prefill
        first = call.first_token()
        step = prepare(call, steps, call_cache, first)
        returns = call.config.return_dict_in_generate
        cache = call_cache.prefill if step.source is None or returns else step.source.cache
        call.inputs[CACHE], cache_key = cache, call_cache.key
        del call_cache  # with it, the keys and values of a source that the prefill stored
        on_gpu = call.ids.is_cuda
        if step.assistant is not None:
            step.assistant.read_prompt(call)
        reader = Reader(step.state, self._steps_ahead(cache, owns_cache, call, on_gpu), streamer, first.token)
        scores = TokenScores(step.state, {"logits": first.logits, "scores": first.scores})
        inputs, limit = step_inputs(call, step.source), call.time_limit()
        generator = torch.cuda.default_generators[call.ids.device.index] if on_gpu else None
        offset, launched = 0, 0  # local variables: a call by a streamer overwrites the attribute
        with decoding(call.model), step.rope_deltas.in_buffers(call.model):
            step.runner.begin(call.model, inputs)
            ended = time.time() > limit or bool(step.state.eos is not None and step.state.ended.all())
            while not ended and launched < call.max_length - call.ids.shape[1] - 1:
                before = generator.get_offset() if generator is not None else 0
                step.runner.run(call.model, inputs)
                offset = generator.get_offset() - before if generator is not None else 0
                launched += 1
                scores.after_launch()
                ended = reader.after_launch() or time.time() > limit
        reader.finish()
        self.launched_steps, self.not_captured = launched, step.runner.not_captured
        surplus = 0 if call.drafts else launched - reader.needed_tokens
        if surplus and generator is not None and offset:
            generator.set_offset(generator.get_offset() - surplus * offset)
        if surplus and not owns_cache:
            decoder_cache(cache).crop(-surplus)
        sequences = step.state.sequences[:, : call.ids.shape[1] + 1 + reader.needed_tokens].clone()
        if not returns:
            return sequences
        if owns_cache:
            kept = cache_of_result(cache, like, sequences.shape[1] - 1, surplus)
            if kept is None:  # the caller gets the cache itself, so later calls must not write to it
                for key in [key for key in steps if key[0] == cache_key]:
                    del steps[key]
                if surplus:
                    decoder_cache(cache).crop(-surplus)
            cache = cache if kept is None else kept
        encodes = call.model.config.is_encoder_decoder
        output_type = GenerateEncoderDecoderOutput if encodes else GenerateDecoderOnlyOutput
        return output_type(sequences=sequences, **scores.of_first(1 + reader.needed_tokens), **cache_kwargs(cache))

    def _steps_ahead(self, cache: Cache, owns_cache: bool, call: GenerateCall, on_gpu: bool) -> int:
        """Return the number of steps to launch ahead.

        It is 0 on a CPU, which gains nothing, and if the caller keeps a cache from which surplus tokens can't be
        removed.
        """
        caller_keeps = not owns_cache or call.config.return_dict_in_generate
        return self.ahead if on_gpu and (not caller_keeps or decoder_cache(cache).is_croppable) else 0


def _compile_key(model: nn.Module, config: GenerationConfig, ids: Tensor, dropped: Dropped, stable: bool) -> object:
    """Return a key of the call. If a step does not compile, no call with the same key compiles one.

    Without `stable`, the key leaves out the numbers of modules, which a step changes.
    """
    draft = dropped.assistant_model
    states = state_of(model, stable), None if draft is None else state_of(draft, stable)
    return repr(compile_arguments(config.compile_config, ids.device)), *states


decode_loop = DecodeLoop()
