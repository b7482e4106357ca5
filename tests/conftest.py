"""Settings for the whole run, made before anything imports Triton."""

from __future__ import annotations

import gc
import logging
import os
import zlib
from collections.abc import Iterator

import pytest
import torch
from interpreted import make_fast
from slow import is_drawn, left_undrawn

from tatten.ops import moved
from tatten.passes import cost, internal

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Dynamo empties the processor's caches after each graph to time the graph's guards: 30 ms for a line in a log.
torch._C._dynamo.guards.profile_guard_manager = lambda *_: 0.0
# pytest 9.2 attaches its handlers to each logger that does not propagate. With a handler, PyTorch writes its structured
# trace: a tenth of the time of Dynamo.
logging.getLogger("torch.__trace").propagate = True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--draw", type=int, help="run only this many times n tests of each kind marked drawn(n)")
    parser.addoption("--slow-share", type=float, default=1.0, help="the share of the slow tests that runs")
    parser.addoption("--seed", default="", help="another seed draws other tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share, seed = config.getoption("--slow-share"), config.getoption("--seed")
    slow = [x for x in items if x.get_closest_marker("slow")]
    no_gpu = [] if torch.cuda.is_available() else [x for x in items if x.get_closest_marker("gpu")]
    left_out = {x for x in slow if not is_drawn(x.nodeid, share, seed)}
    if times := config.getoption("--draw"):
        left_out |= {*no_gpu}
        apart = {*slow, *no_gpu}
        left_out |= {*left_undrawn((x for x in items if x not in apart), times, seed)}
    if left_out:
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [x for x in items if x not in left_out]
    for item in no_gpu:
        item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_configure(config: pytest.Config) -> None:
    """Refuse the name of a cache that transformers 5.24 replaced: users copy what they see."""
    config.addinivalue_line("filterwarnings", "error:`past_key_values` is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def numbers_follow_from_the_test(request: pytest.FixtureRequest) -> None:
    """A test draws the same numbers alone, in any order and in any process."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def extra_kernels_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most graphs of the tests are too small for a rewrite to pay; those about the cost itself put the price back."""
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(cost.RATES, device, cost.Rates(bytes_per_us=1.0, segment_us=0.0))


@pytest.fixture(autouse=True)
def errors_of_passes_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users get a report of an error inside a pass; here it fails the test."""
    monkeypatch.setattr(internal, "RAISES", True)


@pytest.fixture(autouse=True)
def moved_notes_end_with_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop the notes on moved APIs that a test makes: reports of later tests would have them."""
    monkeypatch.setattr(moved, "_notes", dict(moved._notes))


@pytest.fixture
def collections_skip_older_objects() -> Iterator[None]:
    """transformers and accelerate collect garbage several times in a test: 3 s each for the objects of all tests."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def unused_gpu_memory_is_returned() -> Iterator[None]:
    """Processes of `make test-gpu` share a GPU, and the allocator of each keeps the peak of its largest test."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2 << 30:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TRITON_INTERPRET") == "1":
            make_fast(patch)
        yield
