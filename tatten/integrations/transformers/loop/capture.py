"""Run a compiled step, directly or as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tatten.integrations.transformers.loop.compiled_function import Calls
from tatten.integrations.transformers.loop.fingerprint import leaves, numbers_of


class NoStepError(RuntimeError):
    """A call can't be continued by steps, and no step's token was streamed. The message is the reason."""


class FailedPrefillError(NoStepError):
    """A prefill with a static cache raised an error. A bad input may be the cause, so later calls try again."""


class NotCompiledError(NoStepError):
    """Dynamo or the backend could not compile a step."""


class UnstableStepError(NotCompiledError):
    """A step ran, but the next one would be compiled anew, as each step changes numbers of the model."""


WARM_UP = 2  # steps that compile, tune and allocate workspaces before the capture


class Runner:
    """A step that is run repeatedly.

    On a GPU it is captured as a CUDA graph after two ordinary steps. A capture executes nothing, so no step is lost or
    computed twice. Before the first step of a call, `begin` compares the addresses of weights, buffers and the cache,
    and the numbers of the cache, with those of the capture, and asks Dynamo whether the compiled code still holds. If
    anything has changed, the step is captured again.

    Args:
        calls: a function of the model and the arguments of its forward, which returns the calls that compute a step.
        before_step: runs before the calls of each step, in eager mode.
        caches: returns the caches that the step writes.
        not_captured: the reason why the step must not be captured, or None.
        draft: returns the draft model that the step also runs, or None.
    """

    def __init__(
        self,
        calls: Callable[[nn.Module, dict[str, Any]], Calls],
        before_step: Callable[[], None],
        caches: Callable[[], object],
        not_captured: str | None,
        draft: Callable[[], nn.Module | None] = lambda: None,
    ):
        self._calls, self._before_step, self._caches, self._draft = calls, before_step, caches, draft
        self.not_captured = not_captured
        self._steps = 0
        self._may_compile = True
        self.failed = False  # the first step of a call did not end, or changed what it was compiled for
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured: tuple[object, ...] = ()

    def begin(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        """Drop the graph if the weights or the cache have moved since the capture, or the code no longer holds."""
        self._may_compile = True
        if self._graph is None:
            return
        moved = self._captured != self._fingerprint(model)
        if moved or not all(function.still_captured(args) for function, args in self._calls(model, inputs)):
            self._graph, self._steps = None, WARM_UP - 1  # one ordinary step, which may compile again

    def run(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        """Run a step. The first one of a call may compile.

        Raises:
            NotCompiledError: it did not compile, or the next one would be compiled anew.
        """
        if self._graph is not None:
            self._graph.replay()
            return
        if self._may_compile or self._steps < WARM_UP or self.not_captured is not None:
            self._run_uncaptured(model, inputs)
            return
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream(), capture_error_mode="thread_local"):
            self._step(model, inputs)
        self._graph, self._captured = graph, self._fingerprint(model)
        for function, args in self._calls(model, inputs):
            function.note_captured(args)
        graph.replay()

    def _step(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        self._before_step()
        for function, args in self._calls(model, inputs):
            function(*args)

    def _stream(self) -> torch.cuda.Stream:
        """Make a stream for the capture: workspaces of cuBLAS belong to a stream, and so to one graph."""
        return torch.cuda.Stream()

    def _run_uncaptured(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        checks_numbers = self._steps > 0 and self.not_captured is None
        before = numbers_of(self._caches()) if checks_numbers else []
        if self._may_compile:
            self._may_compile = False
            self._compile_and_run(model, inputs)
        else:
            self._step(model, inputs)
        self._steps += 1
        if checks_numbers and numbers_of(self._caches()) != before:
            self.not_captured = "the cache counts steps by numbers of the host"

    def _compile_and_run(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        self.failed = True
        try:
            self._step(model, inputs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            first, *more = str(error).strip().split("\n")
            # A backend's failure has only "backend='tatten' raised:" in its first line.
            cause = f"{first} {more[0]}" if first.endswith(":") and more else first
            raise NotCompiledError(f"the step does not compile as one graph: {cause}") from error
        if any(function.would_compile(args) for function, args in self._calls(model, inputs)):
            raise UnstableStepError(
                "a step changes values that it was compiled for, as a hook does that counts its calls"
            )
        self.failed = False

    def _fingerprint(self, model: nn.Module) -> tuple[object, ...]:
        models = [x for x in (model, self._draft()) if x is not None]
        attributes = (x for y in models for z in y.modules() for x in vars(z).values() if isinstance(x, Tensor))
        weights = (x for y in models for x in (*y.parameters(), *y.buffers()))
        addresses = (x.data_ptr() for x in (*weights, *attributes))
        return (*addresses, *(x.data_ptr() if isinstance(x, Tensor) else x for x in leaves(self._caches())))
