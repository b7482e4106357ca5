"""Asynchronous batches on a CPU give the tokens of `generate`. transformers itself makes them on accelerators alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import transformers
from slow import slow_but

if not transformers.__version__.startswith("5.24"):
    pytest.skip("no other transformers was tested", allow_module_level=True)

from asynchronous import asynchronous, late_resets
from batched_models import MODELS, batching, build, expected, greedy, padded, prompts, run, run_session
from transformers import CompileConfig

NEW = 12
COMPILED = CompileConfig(backend="eager", mode="default")
PADDED = {"varlen_compile_config": COMPILED, "decode_compile_config": COMPILED}  # sizes of batches as in CUDA graphs
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {"page_size": 16, "max_batch_tokens": 256},
    "chunks": {"page_size": 4, "max_batch_tokens": 16},
    "padded": {"page_size": 4, "max_batch_tokens": 24} | PADDED,
}
# With nothing but forks in the first batch, the second one has no tokens. Models fail on it unless it is padded.
CASES = [(name, setting, n) for name in MODELS for setting in SETTINGS for n in (1, 3) if setting == "padded" or n == 1]
FAST = [("llama", "chunks", 1), ("llama", "padded", 3), ("gemma3", "padded", 3)]


@pytest.fixture(autouse=True)
def _asynchronous() -> Iterator[None]:
    with asynchronous(), padded():
        yield


@pytest.mark.parametrize("name, setting, samples", slow_but(FAST, CASES))
def test_tokens(name: str, setting: str, samples: int) -> None:
    model, ids = build(name), prompts()
    got = run(model, ids, greedy(NEW, samples), use_async_batching=True, **SETTINGS[setting])
    assert got == [tokens for tokens in expected(model, ids, NEW) for _ in range(samples)]


@pytest.mark.parametrize("setting", ["whole", "padded"])
def test_a_late_reset_of_the_inputs(setting: str) -> None:
    """The cache waits once for each start of a manager. From the second start on, transformers resets both inputs."""
    model, ids = build("llama"), prompts()
    want = expected(model, ids, NEW)
    options = batching(use_async_batching=True, **SETTINGS[setting])
    manager = model.init_continuous_batching(greedy(NEW), continuous_batching_config=options)
    with late_resets() as places:
        for _ in range(2):
            assert run_session(manager, ids, NEW) == want
    assert places == [("wait", 0), ("wait", 2)]
