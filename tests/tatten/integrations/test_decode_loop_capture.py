"""The graph of a step is kept as long as its code holds, and dropped otherwise. No GPU: a graph repeats a step."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tatten.integrations.transformers.loop import capture
from tatten.integrations.transformers.loop.capture import NotCompiledError, Runner
from tatten.integrations.transformers.loop.compiled_function import CompiledFunction

FACTOR = 1.0


class Numbers:
    """An object of a class that `fingerprint` does not know."""

    def __init__(self) -> None:
        self.factor = 1.0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.weight = Numbers(), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.numbers.factor * FACTOR


def compute(model: nn.Module, out: Tensor, inputs: dict[str, Any]) -> None:
    out.copy_(model(inputs["x"]))


class Graphs:
    """Stands for CUDA graphs: a capture runs nothing, and a replay repeats the results of the time of the capture."""

    def __init__(self, patch: pytest.MonkeyPatch, out: Tensor) -> None:
        self.captures = self.replays = 0
        self.out, self.recording = out, False
        patch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        patch.setattr(torch.cuda, "graph", self.graph)
        patch.setattr(capture.Runner, "_stream", lambda _: None)

    @contextlib.contextmanager
    def graph(self, graph: Any, **_: Any) -> Iterator[None]:
        self.captures += 1
        before = self.out.clone()
        yield
        self.result = self.out.clone()
        self.out.copy_(before)

    def replay(self) -> None:
        self.replays += 1
        self.out.copy_(self.result)


def runner_of(model: nn.Module, out: Tensor) -> Runner:
    function = CompiledFunction(compute, {"backend": "eager"})
    return Runner(lambda model, inputs: [(function, (model, out, inputs))], lambda: None, lambda: None, None)


def call(runner: Runner, model: nn.Module, out: Tensor, steps: int = 4) -> float:
    """Run the steps of a call, and return the result of the last one."""
    inputs = {"x": torch.tensor(3.0)}
    with torch.no_grad():
        runner.begin(model, inputs)
        for _ in range(steps):
            out.zero_()
            runner.run(model, inputs)
    return out.item()


def change_object(model: Model) -> None:
    model.numbers.factor = 2.0


def change_global(model: Model) -> None:
    global FACTOR
    FACTOR = 2.0


@pytest.mark.parametrize("change", [change_object, change_global])
def test_a_graph_is_captured_anew_if_its_code_no_longer_holds(
    change: Callable[[Model], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "FACTOR", 1.0)  # restored at the end
    model, out = Model(), torch.zeros(())
    runner, graphs = runner_of(model, out), Graphs(monkeypatch, out)
    assert call(runner, model, out) == 3.0
    assert call(runner, model, out) == 3.0
    assert (graphs.captures, graphs.replays) == (1, 2 + 4)
    change(model)
    assert call(runner, model, out) == 6.0
    assert graphs.captures == 2
    assert call(runner, model, out, 1) == 6.0
    assert graphs.captures == 2


def test_code_that_dynamo_had_compiled_before_is_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo runs the code of an earlier call without compiling, so compilations are not a sign of a change."""
    model, out = Model(), torch.zeros(())
    runner, graphs = runner_of(model, out), Graphs(monkeypatch, out)
    for n, factor in enumerate((1.0, 2.0, 1.0, 2.0)):
        model.numbers.factor = factor
        assert call(runner, model, out) == 3.0 * factor
        assert graphs.captures == n + 1


def test_a_call_that_ends_before_the_capture_is_followed_by_an_ordinary_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture must not compile."""
    model, out = Model(), torch.zeros(())
    runner, graphs = runner_of(model, out), Graphs(monkeypatch, out)
    assert call(runner, model, out, 2) == 3.0
    model.numbers.factor = 2.0
    assert call(runner, model, out, 1) == 6.0
    assert graphs.captures == 0
    assert call(runner, model, out, 2) == 6.0
    assert graphs.captures == 1


def test_a_later_call_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = Model(), torch.zeros(())
    runner = runner_of(model, out)
    monkeypatch.setattr(runner, "not_captured", "there is no GPU")
    for i in range(8):
        model.numbers.factor = float(i)
        assert call(runner, model, out, 1) == 3.0 * i
    model.numbers.factor = 8.0
    with pytest.raises(NotCompiledError, match="the step does not compile as one graph"):
        call(runner, model, out, 1)


def test_each_call_captures_its_graph_if_dynamo_has_moved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, out = Model(), torch.zeros(())
    runner, graphs = runner_of(model, out), Graphs(monkeypatch, out)
    monkeypatch.delattr(torch._dynamo.eval_frame, "_debug_get_cache_entry_list")
    caplog.set_level(logging.WARNING, "tatten")
    for n in range(3):
        model.numbers.factor = float(n)
        assert call(runner, model, out) == 3.0 * n
        assert graphs.captures == n + 1
    assert "torch._dynamo.eval_frame is not as in the versions" in caplog.text
