"""`benchmarks/soak.py` with 30 requests, and the faults that it must find."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version

if Version(transformers.__version__) < Version("5.24"):
    pytest.skip("it is for the continuous batching of transformers 5.24", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import soak
from support import models
from transformers.generation.continuous_batching.cache import PagedAttentionCache

import tatten.integrations.transformers  # noqa: F401 registers `tatten`

pytestmark = pytest.mark.usefixtures("collections_skip_older_objects")
MODELS = ["llama", "gemma2", "gemma3_text", "gpt_oss"]


def run(name: str, attention: str, n: int, samples: int = 1) -> soak.Soaked:
    model = models.build(models.shape(name, tiny=True), "cpu", torch.float32)
    return soak.soak(model, attention, soak.requests(n, minutes=0.05, seed=n), samples, seed=n)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_thirty_requests(name: str, samples: int) -> None:
    found = run(name, "tatten", 30, samples)
    assert found.faults == []
    assert found.finished >= 10 * samples
    assert found.cancelled > 0
    assert found.streamed > 0


def test_a_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    right = soak.greedy
    monkeypatch.setattr(soak, "greedy", lambda *given: {i: [*x[:-1], -1] for i, x in right(*given).items()})
    monkeypatch.setattr(soak, "requests", lambda *_, **__: [soak.Request(0.0, None, 3, soak.MOST_NEW, False)])
    (fault,) = run("llama", "sdpa", 1).faults
    assert "got [" in fault


def test_a_page_that_is_not_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    free = PagedAttentionCache.free_blocks
    kept = iter([True])
    monkeypatch.setattr(PagedAttentionCache, "free_blocks", lambda *given: next(kept, False) or free(*given))
    (fault,) = run("llama", "sdpa", 2).faults
    assert "sectors are in use" in fault


def test_a_request_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [soak.Request(0.0, None, i, 4, False) for i in range(2)]
    monkeypatch.setattr(soak, "requests", lambda *_, **__: requests)
    monkeypatch.setattr(soak, "PATIENCE", 1.0)
    manager = transformers.generation.continuous_batching.continuous_api.ContinuousBatchingManager
    add = manager.add_request
    monkeypatch.setattr(manager, "add_request", lambda *given, **more: _and_cancel(given[0], add(*given, **more)))
    faults = run("llama", "sdpa", 2).faults
    assert any(x.startswith("lost: ['req_1']") for x in faults)


def _and_cancel(manager: transformers.ContinuousBatchingManager, name: str) -> str:
    if name == "req_1":
        manager.cancel_request(name)
    return name


def test_growth_is_that_of_the_last_two_thirds() -> None:
    mib = [0, 50, 90, 100, 101, 102, 103, 104, 105]
    found = soak.Soaked(seconds=[float(i) for i in range(9)], resident=[x << 20 for x in mib])
    assert found.growth == pytest.approx(5)


def test_requests_of_a_seed() -> None:
    todo = soak.requests(1000, 10, seed=0)
    assert todo == soak.requests(1000, 10, seed=0) != soak.requests(1000, 10, seed=1)
    assert len(todo) == 1000
    assert 0.2 < sum(x.cancelled is not None for x in todo) / 1000 < 0.3
    assert all(0 <= x.arrives < 600 for x in todo)
    assert {f.name for f in dataclasses.fields(soak.Request)} == {"arrives", "cancelled", "text", "new", "streaming"}


@pytest.mark.parametrize(
    "tokens, status, fault",
    [
        ([1, 2], "FINISHED", None),
        ([1], "DECODING", None),
        ([1], "FINISHED", "got 1 tokens of 2"),
        ([2], "DECODING", "got [2], expected [1, 2]"),
    ],
)
def test_faults_of_outputs(tokens: list[int], status: str, fault: str | None) -> None:
    from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

    output = GenerationOutput("x", generated_tokens=tokens, status=RequestStatus[status])
    assert soak.check(output, soak.Request(0.0, None, 0, 2, True), {0: [1, 2, 3]}) == fault
