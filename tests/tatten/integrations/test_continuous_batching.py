"""`generate_batch` on pages: the tokens of `generate`, and which ops give them."""

from __future__ import annotations

import random
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from slow import slow_but

if not transformers.__version__.startswith("5.24"):
    pytest.skip("no other transformers was tested", allow_module_level=True)

from batched_models import (
    MODELS,
    SHARING,
    WINDOW,
    build,
    expected,
    greedy,
    padded,
    prompts,
    quick,
    run,
)
from batched_models import batching as batching_config
from caused_warnings import no_warnings
from transformers import CompileConfig, GenerationConfig
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

from tatten.integrations.transformers.continuous_batching import layer_pages, steps
from tatten.ops.page_runs import LEADERS

NEW = 12
# Whole prompts, then decode steps; chunks of prompts beside decode steps; and forks, which share pages.
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {"page_size": 16, "max_batch_tokens": 256},
    "chunks": {"page_size": 4, "max_batch_tokens": 16},
    "forks": {"page_size": 4, "max_batch_tokens": 24},
    "large pages": {"page_size": 256, "max_batch_tokens": 32, "num_blocks": 12},
}
CASES = [(name, setting) for name in MODELS for setting in SETTINGS]
FAST = [("llama", "chunks"), ("llama", "forks"), ("mistral", "chunks"), ("gemma2", "forks"), ("gpt_oss", "chunks")]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often attention was which op, and with which pages."""
    counts: Counter[str] = Counter()

    def decode(*args: Any, **kwargs: Any) -> Any:
        shared = kwargs["shared_pages"]
        counts["decode"] += 1
        counts["sharing"] += shared is not None
        counts["shared"] += shared is not None and int(shared.data[LEADERS, -1])
        return original["decode_attention"](*args, **kwargs)

    def paged(*args: Any, **kwargs: Any) -> Any:
        counts["paged"] += 1
        if (shared := kwargs.get("shared_pages")) is not None:
            counts["shared beside chunks"] += int(shared.data[LEADERS, -1])
        return original["paged_attention"](*args, **kwargs)

    def merge(*args: Any) -> Any:
        counts["merged"] += 1
        return original["merge_state"](*args)

    original = {name: getattr(layer_pages, name) for name in ("decode_attention", "paged_attention", "merge_state")}
    for name, counted in zip(original, (decode, paged, merge), strict=True):
        monkeypatch.setattr(layer_pages, name, counted)
    found = steps.shared_pages

    def find(*args: Any, **kwargs: Any) -> Any:
        counts["found"] += 1
        return found(*args, **kwargs)

    monkeypatch.setattr(steps, "shared_pages", find)
    return counts


@pytest.mark.drawn(6)
@pytest.mark.parametrize("name, setting", slow_but(FAST, CASES))
def test_greedy_tokens(name: str, setting: str, calls: Counter[str]) -> None:
    model, ids = build(name), prompts()
    n = 3 if setting == "forks" else 1
    want = expected(model, ids, NEW)
    assert run(model, ids, greedy(NEW, n), **SETTINGS[setting]) == [tokens for tokens in want for _ in range(n)]
    assert calls["decode"] > 0
    assert calls["paged"] > 0
    rings = name not in SHARING
    assert (calls["merged"] > 0) is (rings and setting != "whole")
    assert (calls["found"] > 0) is (name != "mistral")  # all of its layers have rings


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", slow_but(["gemma3", "qwen3"], MODELS))
def test_padded_batches(name: str, calls: Counter[str]) -> None:
    """CUDA graphs need sizes that don't follow the batch: rows of length 0, and tokens that are nobody's."""
    model, ids = build(name), prompts()
    options = {"q_padding_interval_size": 16, "max_requests_per_batch": 8, "max_batch_tokens": 32}
    with padded():
        got = run(model, ids, greedy(NEW), varlen_compile_config=CompileConfig(), **options)
    assert got == expected(model, ids, NEW)
    assert calls["decode"] > 0


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", slow_but(["llama", "gpt_oss"], MODELS))
def test_sampled_forks(name: str) -> None:
    """The same seed draws the same tokens as on transformers' own path, which gathers keys and has no soft caps."""
    drawn, options = [], {"attn_logit_softcapping": None} if name == "gemma2" else {}
    for kind in ("eager", "tatten"):
        config = GenerationConfig(
            max_new_tokens=NEW, do_sample=True, num_return_sequences=4, eos_token_id=-1, pad_token_id=0
        )
        drawn.append(run(build(name, kind, **options), prompts((30, 7)), config, seed=5))
    assert drawn[0] == drawn[1]
    assert len({tuple(tokens) for tokens in drawn[0]}) > 4


def test_forks_read_shared_pages_once(calls: Counter[str]) -> None:
    """The pages are found once a step, and each layer gets them."""
    model, ids = build("llama"), prompts((140,))
    layers = model.config.num_hidden_layers
    run(model, ids, greedy(NEW, 4), page_size=8, max_batch_tokens=256)
    assert calls["found"] == NEW
    assert calls["sharing"] == calls["decode"] == NEW * layers
    assert calls["shared"] == NEW * layers  # one group of 4, which share 128 keys


def test_forks_beside_a_chunk_read_shared_pages_once(calls: Counter[str]) -> None:
    """The chunks of the second prompt are in steps with the forks of the first."""
    model, ids = build("llama"), prompts((140, 200))
    want = expected(model, ids, NEW)
    got = run(model, ids, greedy(NEW, 4), page_size=8, max_batch_tokens=64)
    assert got == [tokens for tokens in want for _ in range(4)]
    assert calls["shared beside chunks"] > 0


def test_nothing_is_sought_where_nothing_can_be_shared(calls: Counter[str]) -> None:
    run(build("llama"), prompts((70,)), greedy(NEW, 4), max_batch_tokens=256, allow_block_sharing=False)
    assert calls["decode"] > 0
    assert calls["found"] == calls["sharing"] == 0


def test_a_cached_prefix_is_shared(calls: Counter[str]) -> None:
    """The second batch finds the prompt of the first in the cache, and its requests share the pages."""
    model, ids = build("qwen3"), prompts((140, 141, 145), common=139)
    want = expected(model, ids, NEW)
    options = {"generation_config": greedy(NEW), "continuous_batching_config": batching_config(max_batch_tokens=256)}
    with quick(), model.continuous_batching_context_manager(**options) as manager:
        manager.add_request(ids[0], request_id="first")
        assert manager.get_result(timeout=60).generated_tokens == want[0]
        calls.clear()
        for i in (1, 2):
            manager.add_request(ids[i], request_id=str(i))
        results = {x.request_id: x for x in (manager.get_result(timeout=60) for _ in range(2))}
        cache = manager.batch_processor.cache
        assert [results[str(i)].generated_tokens for i in (1, 2)] == want[1:]
        assert cache.use_prefix_sharing
    assert calls["shared"] > 0


@pytest.mark.parametrize("name", slow_but(["gemma3"], ["llama", "gemma3", "mistral"]))
def test_cancelled_requests(name: str) -> None:
    """Blocks of a cancelled request go to others, whose tokens stay right; all come back."""
    model, ids = build(name), prompts((30, 41, 20, 33, 9, 26))
    want = expected(model, ids, NEW)
    options = {"generation_config": greedy(NEW), "continuous_batching_config": batching_config(num_blocks=24)}
    with quick(), model.continuous_batching_context_manager(**options) as manager:
        for i, tokens in enumerate(ids):
            manager.add_request(tokens, request_id=str(i), max_new_tokens=100 if i % 2 else NEW, streaming=bool(i % 2))
        left = {"0", "2", "4"}
        while left:
            result = manager.get_result(timeout=60)
            if int(result.request_id) % 2:
                manager.cancel_request(result.request_id)
            elif result.is_finished():
                assert result.generated_tokens == want[int(result.request_id)]
                left.remove(result.request_id)
        cache = manager.batch_processor.cache
        while manager.batch_processor.has_pending_requests():
            manager.get_result(timeout=0.05)
        cache.evict_cached_blocks()
        assert not any(x.block_table for x in cache.cache_allocators.values())
        cache.pool.try_to_free_sectors()
        assert cache.compute_free_capacity() == 1


@pytest.mark.parametrize("name", slow_but(["llama", "gemma2"], MODELS))
def test_more_requests_than_memory(name: str) -> None:
    model, ids = build(name), prompts((30, 41, 20, 33, 9, 26, 38, 12))
    want = expected(model, ids, 20)
    assert run(model, ids, greedy(20), page_size=4, num_blocks=30, max_batch_tokens=32) == want


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_a_request_that_fills_the_memory(name: str) -> None:
    """It ends if it has no more tokens than `room`, though the pages of its ring were taken beside those of others."""
    layers: dict[str, Any] = {}
    if name == "gemma3":  # a sector has two pages of rings or three others
        layers = {"num_hidden_layers": 5, "layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 2}
    model, ids = build(name, **layers), prompts((3, 4, 3, 2))
    config = batching_config(page_size=4, num_blocks=24, max_batch_tokens=32)
    options = {"generation_config": greedy(14), "continuous_batching_config": config}
    with quick(), model.continuous_batching_context_manager(**options) as manager:
        room = manager.batch_processor.cache.room
        lengths = {"0": room - 3, "1": 14, "2": 14, "3": 14}
        for request, new in lengths.items():
            manager.add_request(ids[int(request)], request_id=request, max_new_tokens=new)
        results = [manager.get_result(timeout=60) for _ in lengths]
    assert {x.request_id: (len(x.generated_tokens), x.error) for x in results} == {
        request: (new, None) for request, new in lengths.items()
    }


@pytest.fixture
def offloaded(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many requests went to the host's memory, and came back. It is pinned only where there is a GPU."""
    counts: Counter[str] = Counter()
    offload, restore = OffloadingManager._offload_to_cpu, OffloadingManager.restore_scheduled_requests

    def counted_offload(self: OffloadingManager, *args: Any) -> set[str]:
        names = offload(self, *args)
        counts["offloaded"] += len(names)
        return names

    def counted_restore(self: OffloadingManager, requests: list[Any]) -> None:
        counts["restored"] += sum(x.state.is_cpu_offloaded for x in requests)
        restore(self, requests)

    monkeypatch.setattr(OffloadingManager, "_offload_to_cpu", counted_offload)
    monkeypatch.setattr(OffloadingManager, "restore_scheduled_requests", counted_restore)
    if not torch.cuda.is_available():
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **options: empty(*args, **options))
    return counts


@pytest.mark.drawn(2)
@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
@pytest.mark.parametrize("name", slow_but(["llama", "gemma3"], MODELS))
def test_offloaded_requests(name: str, scheduler: str, offloaded: Counter[str]) -> None:
    """Pages go to the host's memory and come back to other places: those of rings, and those that forks share."""
    lengths, n_pages = ((30, 41, 20, 33, 9, 26, 38, 12), 30)
    if name == "mistral":  # a request whose rings are full needs no more pages
        lengths, n_pages = ((3, 2, 4, 3, 2, 4, 3, 2), 8)
    model, ids = build(name), prompts(lengths)
    want = expected(model, ids, 20)
    options = {"page_size": 4, "num_blocks": n_pages, "max_batch_tokens": 32, "scheduler_type": scheduler}
    for n in (1, 3):
        offloaded.clear()
        got = run(model, ids, greedy(20, n), cpu_offload_space=0.01, **options)
        assert got == [tokens for tokens in want for _ in range(n)]
        assert offloaded["restored"] == offloaded["offloaded"] > 0


def test_a_cancelled_request_that_is_offloaded(offloaded: Counter[str]) -> None:
    """Its pages in the host's memory are free again."""
    model, ids = build("llama"), prompts((30, 41, 20, 33))
    config = batching_config(page_size=4, num_blocks=30, max_batch_tokens=32, cpu_offload_space=0.01)
    options = {"generation_config": greedy(40), "continuous_batching_config": config}
    with quick(), model.continuous_batching_context_manager(**options) as manager:
        for i, tokens in enumerate(ids):
            manager.add_request(tokens, request_id=f"{i}", streaming=True)
        processor = manager.batch_processor
        while not offloaded["offloaded"]:
            manager.get_result(timeout=60)
        for i in range(4):
            manager.cancel_request(f"{i}")
        while processor.has_pending_requests():
            manager.get_result(timeout=0.05)
        pool, end = processor.offloading_manager._cpu_pool, time.monotonic() + 60
        pool.try_to_free_sectors()
        while pool.num_free_sectors != pool.num_sectors and time.monotonic() < end:  # copies may be under way
            manager.get_result(timeout=0.05)
            pool.try_to_free_sectors()
        assert pool.num_free_sectors == pool.num_sectors


@pytest.mark.parametrize("name", slow_but(["gemma3"], ["llama", "gemma3"]))
def test_requests_too_long_for_the_table(name: str, calls: Counter[str]) -> None:
    """Longer requests, and all beside them, take the path of chunks. Without a table, all requests do."""
    model, ids = build(name), prompts((30, 5))
    want = expected(model, ids, NEW)
    assert run(model, ids, greedy(NEW), max_blocks_per_request=4) == want
    assert calls["decode"] > 0
    calls.clear()
    for none in (0, -3):
        assert run(model, ids, greedy(NEW), max_blocks_per_request=none) == want
    assert calls["decode"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_requests_that_come_and_go(name: str) -> None:
    """Requests arrive and are cancelled at random, in a cache that is too small for all: no page is lost."""
    draw = random.Random(0)
    model, ids = build(name), prompts([draw.randint(2, 60) for _ in range(30)])
    want = expected(model, ids, NEW)
    options = {
        "generation_config": greedy(NEW),
        "continuous_batching_config": batching_config(page_size=4, num_blocks=60, max_batch_tokens=32),
    }
    with quick(), model.continuous_batching_context_manager(**options) as manager:
        waiting: dict[str, int] = {}
        finished = 0
        for i in range(150):
            request = manager.add_request(ids[i % 30], request_id=f"{i}", streaming=draw.random() < 0.5)
            waiting[request] = i % 30
            if draw.random() < 0.3:
                cancelled = draw.choice(list(waiting))
                manager.cancel_request(cancelled)
                del waiting[cancelled]
            while len(waiting) > draw.randint(1, 12):
                result = manager.get_result(timeout=60)
                if result.is_finished() and result.request_id in waiting:
                    assert result.generated_tokens == want[waiting.pop(result.request_id)]
                    finished += 1
        while manager.batch_processor.has_pending_requests():
            manager.get_result(timeout=0.1)
        cache = manager.batch_processor.cache
        cache.evict_cached_blocks()
        cache.pool.try_to_free_sectors()
        assert cache.compute_free_capacity() == 1
    assert finished > 50


@pytest.mark.parametrize("page_size", [4, 64, 256])
def test_a_large_window(page_size: int, calls: Counter[str]) -> None:
    """A step in which no key leaves the window yet is one of full attention; later ones are not."""
    model, ids = build("mistral", sliding_window=46), prompts((24, 28, 70, 3, 31, 44))
    assert run(model, ids, greedy(24), page_size=page_size, max_batch_tokens=32) == expected(model, ids, 24)
    merged = calls["merged"]
    assert merged > 0
    calls.clear()
    assert run(model, ids[:2], greedy(4), page_size=page_size, max_batch_tokens=32) == expected(model, ids[:2], 4)
    assert calls["paged"] > 0
    assert calls["merged"] == 0


def test_a_persistent_manager() -> None:
    model, ids = build("gemma2"), prompts()
    want = expected(model, ids, NEW)
    with quick():
        for _ in range(2):
            results = model.generate_batch(
                ids,
                generation_config=greedy(NEW),
                continuous_batching_config=batching_config(),
                persistent_manager=True,
            )
            assert [x.generated_tokens for x in results.values()] == want
        model.destroy_cached_continuous_batching_manager()


def test_flash_attention_does_not_take_over(monkeypatch: pytest.MonkeyPatch, calls: Counter[str]) -> None:
    """transformers replaces names without "flash" where a package of FlashAttention is installed."""
    for version in (2, 3):
        monkeypatch.setattr(continuous_api, f"is_flash_attn_{version}_available", lambda **kwargs: True)
    model, ids = build("llama"), prompts()
    assert model._supports_flash_attn
    assert run(model, ids, greedy(4), auto_switch_to_flash=True) == expected(model, ids, 4)
    assert calls["decode"] > 0


def test_the_code_of_the_page() -> None:
    page = Path(__file__).parents[3] / "docs/continuous_batching.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    *complete, grpo = blocks  # the last one loads a model that is not here
    assert "ForkedRollouts" in grpo
    answers = []
    for code in complete:
        names: dict[str, Any] = {}
        with no_warnings(), quick():
            exec(code.replace('backend="tatten"', 'backend="eager"'), names)  # Inductor takes most of a minute
        answers.append([len(x) > 0 for x in names.get("tokens", [])])
    assert answers == [[True] * 12, [True] * 2, []]


def test_the_model_still_generates() -> None:
    model, ids = build("gemma3"), prompts((30,))
    want = expected(model, ids, NEW)
    run(model, ids, greedy(NEW))
    out = model.generate(torch.tensor(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    assert out[0, 30:].tolist() == want[0]


@pytest.mark.parametrize("name, columns", [("llama", 64), ("gemma3", 64), ("mistral", 3)])
def test_tables_without_hints(name: str, columns: int) -> None:
    """A request may have all positions of a model, and a ring has no more pages than its window."""
    options = {"generation_config": greedy(NEW), "continuous_batching_config": batching_config(page_size=4)}
    with quick(), build(name).continuous_batching_context_manager(**options) as manager:
        cache = manager.batch_processor.cache
        assert cache.max_blocks_per_request == columns + 2
        assert cache.max_decode_fast_path_length == (sys.maxsize if name == "mistral" else 4 * columns)
        assert {x.window for x in cache.groups.values()} <= {None, WINDOW}
