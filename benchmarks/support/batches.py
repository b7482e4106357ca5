"""One workload through transformers' `generate_batch`: its time, that of a decode step, and that of the host."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager, input_outputs
from transformers.generation.continuous_batching.utils import WorkloadHints

from support.batch_settings import Setting

# Settings by which transformers compiles decode steps: not at all, with Inductor, and with tatten. Tuning is for one
# row, and takes minutes.
COMPILING: dict[str, dict[str, Any]] = {
    "": {},
    "compiled": {"default_compile_level": 1},
    "decode": {
        "decode_compile_config": CompileConfig(
            backend="tatten",
            mode=None,
            options={"decode": True, "coordinate_descent_tuning": False},
            fullgraph=True,
            dynamic=True,
        )
    },
}


@dataclass
class Batch:
    """Texts of `generate_batch`, in the order of prompts and samples, and their times."""

    tokens: list[list[int]]
    seconds: float  # until the last token
    step_ms: float | None  # of a decode step of all sequences


@dataclass
class HostTimes:
    """Seconds of the host in each step, by part."""

    parts: dict[str, list[float]] = field(default_factory=dict)

    def ms(self, name: str) -> float:
        return statistics.median(self.parts[name]) * 1e3


def make_manager(
    model: PreTrainedModel, setting: Setting, batch_tokens: int | None = None, compiling: str = ""
) -> ContinuousBatchingManager:
    """Create the manager of all later calls of `generate_batch`, with its pool and graphs.

    All settings are those of transformers for this workload, except the pool, which just holds it, and those of
    `COMPILING`.
    """
    several = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "num_return_sequences": setting.samples}
    generation = GenerationConfig(
        max_new_tokens=setting.new,
        eos_token_id=-1,
        pad_token_id=0,
        **(several if setting.samples > 1 else {"do_sample": False}),
    )
    batching = ContinuousBatchingConfig(
        page_size=setting.page,
        num_blocks=setting.blocks,
        max_batch_tokens=batch_tokens,
        auto_switch_to_flash=False,
        seed=0,
        **COMPILING[compiling],
    )
    manager = model.init_continuous_batching(
        generation_config=generation,
        continuous_batching_config=batching,
        workload_hints=WorkloadHints(
            max_prompt_length=setting.longest, max_generated_length=setting.new, num_requests=setting.sequences
        ),
    )
    manager.warmup()
    model._cached_continuous_batching_manager = manager
    return manager


def draw(model: PreTrainedModel, setting: Setting, seed: int) -> Batch:
    """Draw the samples of fresh prompts with the model's manager. Raise RuntimeError if any is missing."""
    inputs = setting.inputs(model.config.vocab_size, seed)
    start = time.perf_counter()
    by_request = model.generate_batch(
        inputs,
        generation_config=model._cached_continuous_batching_manager.generation_config,
        record_timestamps=True,
        persistent_manager=True,
    )
    outputs = list(by_request.values())
    if len(outputs) != setting.sequences or any(len(x.generated_tokens) != setting.new for x in outputs):
        errors = {x.error for x in outputs if x.error}
        raise RuntimeError(f"{len(outputs)} of {setting.sequences} sequences, with errors {errors or 'in its log'}")
    last = max(x.timestamps[-1] for x in outputs)
    return Batch([x.generated_tokens for x in outputs], last - start, _step_ms([x.timestamps for x in outputs]))


def _step_ms(timestamps: list[list[float]]) -> float | None:
    """Return the median time between tokens of one sequence while all decode; None if they hardly ever do."""
    start, stop = max(x[0] for x in timestamps), min(x[-1] for x in timestamps)
    latest = max(timestamps, key=lambda x: x[0])
    between = [b - a for a, b in itertools.pairwise(latest) if start <= a and b <= stop]
    return statistics.median(between) * 1e3 if len(between) >= 3 else None


@contextmanager
def host_times(manager: ContinuousBatchingManager) -> Iterator[HostTimes]:
    """Time the host's part of each step: `prepare`, `launch` and `update`, without waiting for the device."""
    times, waits = HostTimes(), []
    loop = manager.batch_processor
    io = loop.inputs_and_outputs
    waiting = "prepare_batch_update" if isinstance(io, input_outputs.ContinuousBatchingAsyncIOs) else None
    waiting = waiting or "retrieve_device_outputs"

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            waits.clear()
            start = time.perf_counter()
            result = function(*args)
            if result is not False:  # there was something to prepare
                times.parts.setdefault(name, []).append(time.perf_counter() - start - sum(waits))
            return result

        return call

    def apart(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            waits.append(time.perf_counter() - start)
            return result

        return call

    parts = {"prepare_next_batch": "prepare", "_generation_step": "launch", "update_batch": "update"}
    for name, part in parts.items():
        setattr(loop, name, timed(part, getattr(loop, name)))
    setattr(io, waiting, apart(getattr(io, waiting)))
    try:
        yield times
    finally:
        for name in parts:
            delattr(loop, name)
        delattr(io, waiting)


def without_a_forward(model: PreTrainedModel, setting: Setting, batch_tokens: int | None) -> ContinuousBatchingManager:
    """Return a manager whose steps make up tokens, and have no masks, which a GPU would fill."""
    needed = input_outputs.attn_mask_is_needed
    input_outputs.attn_mask_is_needed = lambda _: False
    try:
        manager = make_manager(model, setting, batch_tokens)
    finally:
        input_outputs.attn_mask_is_needed = needed
    manager.batch_processor.model_runner.compute_batch = lambda *_: None
    return manager


def pool_bytes(manager: ContinuousBatchingManager) -> int:
    """Return the bytes of all pages."""
    return int(manager.batch_processor.cache.cache_tensor.nbytes)
