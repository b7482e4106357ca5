"""Asynchronous batches of continuous batching on a CPU, with streams whose work is done at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from transformers.generation.continuous_batching import (
    continuous_api,
    input_outputs,
    model_runner,
    offloading_manager,
)

from tatten.integrations.transformers.continuous_batching import cache


class Stream:
    """A stream or an event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self, event: Stream) -> None:
        pass

    def wait_event(self, event: Stream) -> None:
        pass


@contextmanager
def asynchronous() -> Iterator[None]:
    """Let transformers prepare a batch before it knows the tokens of the last one, as on a GPU."""
    kinds = input_outputs.ContinuousBatchingAsyncIOs
    with ExitStack() as patches:
        for module in (continuous_api, input_outputs, model_runner, offloading_manager):
            patches.enter_context(mock.patch.object(module, "stream_context", return_value=nullcontext()))
        patches.enter_context(mock.patch.object(input_outputs, "create_device_stream", Stream))
        patches.enter_context(mock.patch.object(torch, "Event", Stream))
        patches.enter_context(mock.patch.object(kinds, "_supported_device_types", ("cpu",)))
        yield


@contextmanager
def late_resets() -> Iterator[list[tuple[str, int]]]:
    """Reset the inputs on the device only when a batch is computed, or when the cache waits for it.

    A GPU that is busy may do so: inputs are reset on the current stream, and copied and read on others. Yields the
    waits, and the batches that had to be reset, with the number of inputs that were.
    """
    late: list[Callable[[], None]] = []
    places: list[tuple[str, int]] = []

    def catch_up(place: str) -> None:
        if late or place == "wait":
            places.append((place, len(late)))
        while late:
            late.pop(0)()

    @functools.wraps(input_outputs.HostDeviceIOPair.reset)  # for the check of transformers' code
    def reset(self: Any) -> None:
        self.host_io.reset()
        late.append(self.device_io.reset)

    stream = Stream()
    stream.synchronize = lambda: catch_up("wait")  # type: ignore[method-assign]
    compute = model_runner.ModelRunner.compute_batch

    @functools.wraps(compute)
    def compute_batch(self: Any, *args: Any) -> None:
        catch_up("batch")
        compute(self, *args)

    with (
        mock.patch.object(input_outputs.HostDeviceIOPair, "reset", reset),
        mock.patch.object(model_runner.ModelRunner, "compute_batch", compute_batch),
        mock.patch.object(cache, "stream_of", return_value=stream),
    ):
        yield places
