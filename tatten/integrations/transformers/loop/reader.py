"""Reading the results of steps that were launched ahead, without waiting for the last one."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from tatten.integrations.transformers.loop.step import StepState


class Reader:
    """Reads the report of a step `ahead` steps after its launch, and passes tokens to a streamer.

    It reads after a fixed number of launches, not when a result is ready, so that all ranks of a sharded cache launch
    equally many steps. The first token is streamed after the launch of the first step, which may fail to compile.
    """

    def __init__(self, state: StepState, ahead: int, streamer: Any, first: Tensor):
        self._state, self._ahead, self._streamer = state, ahead, streamer
        self._first: Tensor | None = first
        self._on_gpu = state.token.is_cuda
        self.needed_tokens = 0
        self._free = [self._slot() for _ in range(ahead + 1)]
        self._launched: deque[tuple[Tensor, Tensor, Any]] = deque()

    def _slot(self) -> tuple[Tensor, Tensor, Any]:
        """Make pinned memory for a report and for the tokens of a step, and an event."""
        report, latest = [
            torch.zeros(x.shape, dtype=x.dtype, pin_memory=self._on_gpu)
            for x in (self._state.report, self._state.latest)
        ]
        return report, latest, torch.cuda.Event() if self._on_gpu else None

    def after_launch(self) -> bool:
        """Copy the report of the last step. Return True if a report of an earlier step says that all texts ended."""
        self._stream_first()
        report, latest, event = slot = self._free.pop()
        report.copy_(self._state.report, non_blocking=True)
        if self._streamer is not None:
            latest.copy_(self._state.latest, non_blocking=True)
        if event is not None:
            event.record()
        self._launched.append(slot)
        return self._read() if len(self._launched) > self._ahead else False

    def finish(self) -> None:
        """Read all that was launched, and end the streamer."""
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
        report, latest, event = slot = self._launched.popleft()
        if event is not None:
            event.synchronize()
        before, (self.needed_tokens, ended) = self.needed_tokens, report.tolist()
        if self._streamer is not None and self.needed_tokens > before:
            self._streamer.put(latest[:, : self.needed_tokens - before].flatten().clone())
        self._free.append(slot)
        return bool(ended)
