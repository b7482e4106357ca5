"""Read the results of steps that were launched ahead, without waiting for the last step."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from tatten.integrations.transformers.loop.step import StepState


class Reader:
    """A reader of reports. It reads a step's report `ahead` steps after its launch, and passes tokens to a streamer.

    It reads after a fixed number of launches, not when a result is ready, so that all ranks of a sharded cache launch
    the same number of steps. The first token is streamed after the launch of the first step, which may fail to compile.
    """

    def __init__(self, state: StepState, ahead: int, streamer: Any, first: Tensor):
        self._state, self._ahead, self._streamer = state, ahead, streamer
        self._first: Tensor | None = first
        self._on_gpu = state.token.is_cuda
        self.needed_tokens = 0
        self._free = [self._new_host_buffer() for _ in range(ahead + 1)]
        self._launched: deque[tuple[Tensor, Tensor, Any]] = deque()

    def _new_host_buffer(self) -> tuple[Tensor, Tensor, Any]:
        """Allocate pinned memory for a report and for the tokens of a step, and make an event."""
        report, latest = [
            torch.zeros(x.shape, dtype=x.dtype, pin_memory=self._on_gpu)
            for x in (self._state.report, self._state.latest)
        ]
        return report, latest, torch.cuda.Event() if self._on_gpu else None

    def after_launch(self) -> bool:
        """Copy the report of the last step. Return True if the report of an earlier step says that all texts ended.

        Raises:
            RuntimeError: an earlier step could not sample a token. `torch.multinomial` raises one, too.
        """
        self._stream_first()
        report, latest, event = host_buffer = self._free.pop()
        report.copy_(self._state.report, non_blocking=True)
        if self._streamer is not None:
            latest.copy_(self._state.latest, non_blocking=True)
        if event is not None:
            event.record()
        self._launched.append(host_buffer)
        return self._read() if len(self._launched) > self._ahead else False

    def finish(self) -> None:
        """Read the reports of all launched steps, and end the streamer."""
        self._stream_first()
        while self._launched:
            self._read()
        if self._streamer is not None:
            self._streamer.end()

    def _stream_first(self) -> None:
        if self._streamer is not None and self._first is not None:
            self._streamer.put(self._first[:, 0].cpu())
        self._first = None

    def _read(self) -> bool:
        report, latest, event = host_buffer = self._launched.popleft()
        if event is not None:
            event.synchronize()
        before, (self.needed_tokens, ended, failed) = self.needed_tokens, report.tolist()
        if failed:
            raise RuntimeError("scores to sample from must have a finite maximum, got NaN, infinity or -inf alone")
        if self._streamer is not None and self.needed_tokens > before:
            self._streamer.put(latest[:, : self.needed_tokens - before].flatten().clone())
        self._free.append(host_buffer)
        return bool(ended)
