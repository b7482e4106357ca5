"""The replacements in transformers for continuous batching: undone, moved, and asked for more than they do."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import batched_models
import pytest
import tiny_models
import torch
import transformers
from batched_models import batching, build, greedy, prompts, quick
from transformers.generation.continuous_batching import cache as cb_cache
from transformers.generation.continuous_batching import continuous_api, initialization, input_outputs

from tatten.integrations.transformers import continuous_batching
from tatten.integrations.transformers.continuous_batching import contract, replaced, supported

TESTED = transformers.__version__.startswith("5.24")
needs_tested = pytest.mark.skipif(not TESTED, reason="no other transformers was tested")


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    contract.digest.cache_clear()
    continuous_batching.install()  # other tests run code that undoes it
    yield
    contract.digest.cache_clear()
    continuous_batching.uninstall()
    continuous_batching.install()


def generate(model: Any, **options: Any) -> list[list[int]]:
    with quick():
        results = model.generate_batch(
            prompts((5,)), generation_config=greedy(3), continuous_batching_config=batching(**options)
        )
    return [x.generated_tokens for x in results.values()]


def names() -> list[Any]:
    return [
        continuous_api.ContinuousBatchingManager.switch_to_cb_friendly_attn,
        continuous_api.PagedAttentionCache,
        continuous_api.is_flash_attention_requested,
        initialization.ensure_decode_fast_path_is_available,
        initialization.is_flash_attention_requested,
        cb_cache.is_flash_attention_requested,
    ]


@needs_tested
def test_undone() -> None:
    """transformers is as it was, to the object, and refuses the name; then it takes it again."""
    ours = names()
    continuous_batching.uninstall()
    own = names()
    assert own[1] is cb_cache.PagedAttentionCache
    assert own[4] is own[5] is own[2]
    assert [a is b for a, b in zip(ours, own, strict=True)] == [False, False, True, False, False, False]
    assert all(not hasattr(x, "__wrapped__") for x in own)
    continuous_batching.uninstall()  # a second call does nothing
    model = build("llama")
    with pytest.raises(ValueError, match="tatten is not supported for continuous batching"):
        generate(model)
    continuous_batching.install()
    continuous_batching.install()
    assert len(generate(model)[0]) == 3
    continuous_batching.uninstall()
    assert names() == own


def test_another_replacement_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *args: None)
    with pytest.raises(RuntimeError, match=r"ensure_decode_fast_path_is_available must be as `install` left it"):
        continuous_batching.uninstall()
    assert continuous_api.PagedAttentionCache is not cb_cache.PagedAttentionCache
    monkeypatch.undo()


@needs_tested
def test_other_attention_is_that_of_transformers() -> None:
    """Installed or not, "sdpa" has transformers' own cache, masks and tokens."""
    got = []
    for install in (continuous_batching.install, continuous_batching.uninstall):
        install()
        model = build("gemma3", "sdpa")
        options = {"generation_config": greedy(3), "continuous_batching_config": batching(auto_switch_to_flash=False)}
        with quick(), model.continuous_batching_context_manager(**options) as manager:
            processor = manager.batch_processor
            assert type(processor.cache) is cb_cache.PagedAttentionCache
            assert processor.inputs_and_outputs.attention_mask is not None
            assert processor.cache.max_blocks_per_request == 0
        got.append(generate(model, auto_switch_to_flash=False))
    assert got[0] == got[1]


def test_a_version_that_was_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither FlashAttention in place of "tatten" nor a wrong token: an error before anything runs."""
    monkeypatch.setattr(supported.transformers, "__version__", "5.31.0")
    monkeypatch.setattr(continuous_api, "is_flash_attn_3_available", lambda **kwargs: True)
    model = build("llama")
    with pytest.raises(NotImplementedError, match=re.escape("transformers 5.31.0 was not tested with it, but 5.24; ")):
        model.generate_batch(prompts(), generation_config=greedy(3))
    assert model.config._attn_implementation == "tatten"


@pytest.mark.skipif(TESTED, reason="this transformers was tested")
def test_the_installed_version_was_not_tested() -> None:
    with pytest.raises(NotImplementedError, match=f"transformers {transformers.__version__} was not tested with it"):
        build("llama").generate_batch(prompts(), generation_config=greedy(3))


@needs_tested
@pytest.mark.parametrize(
    "owner, name, other",
    [
        (cb_cache.PagedAttentionCache, "update", lambda self, key, value, layer, pages: (key, value)),
        (input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors", lambda self, requests: None),
        (input_outputs.ContinuousBatchingIOs, "get_model_kwargs", None),
    ],
    ids=["signature", "body", "gone"],
)
def test_moved_code(owner: Any, name: str, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that differs from the tested one may give tables another meaning."""
    if other is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, other)
    with pytest.raises(NotImplementedError, match=rf"has other code than was tested: \w+:{owner.__name__}\.{name}"):
        build("llama").generate_batch(prompts(), generation_config=greedy(3))


@needs_tested
def test_a_moved_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are compared with those of transformers for each cache, whatever its code says."""
    monkeypatch.setattr(contract, "TESTED", {})
    kind = next(iter(cb_cache.ATTN_TYPE_TO_ALLOCATOR.values()))
    monkeypatch.setattr(kind, "get_write_indices", lambda self, *args: [7] * args[2])
    with pytest.raises(RuntimeError, match=r"tokens 0 to 0 must have slots \[\d+\], got \[7\] from FullAttention"):
        generate(build("llama"))


@needs_tested
def test_a_name_that_is_gone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An import does not fail: the log names it."""
    continuous_batching.uninstall()
    gone = replaced.Replacement(initialization, "no_such_function", replaced._like_flash)
    monkeypatch.setattr(replaced, "REPLACEMENTS", (*replaced.REPLACEMENTS, gone))
    with caplog.at_level(logging.WARNING, "tatten"):
        continuous_batching.install()
    assert "continuous_batching.initialization.no_such_function is not as in the versions" in caplog.text
    assert len(generate(build("llama"))[0]) == 3


@needs_tested
def test_the_table_of_tested_code() -> None:
    """Update it with `python -m tatten.integrations.transformers.continuous_batching.contract`, and the tests."""
    assert contract.moved_code() == []
    assert len(contract.TESTED) > 30
    assert len(set(contract.TESTED.values())) == len(contract.TESTED)


@needs_tested
@pytest.mark.parametrize(
    "name, error",
    [
        ("deepseek_v3", r"must cache keys and values .*, got DeepseekV3ForCausalLM, which has latents \(MLA\)"),
        ("gemma4", "must have separate keys in each layer .*, in which 2 layers share the keys of others"),
        ("llama4", r"must have layers of full or sliding attention .* with \['chunked_attention'\]"),
    ],
)
def test_models_that_do_not_fit(name: str, error: str) -> None:
    with pytest.raises(NotImplementedError, match=error):
        tiny_models.build(name, "tatten").generate_batch(prompts(), generation_config=greedy(3))


@needs_tested
def test_widths_that_differ_between_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny_models.ZOO["gemma4"][1], "num_kv_shared_layers", 0)
    model = tiny_models.build("gemma4", "tatten")
    with pytest.raises(NotImplementedError, match=r"keys of one width in all layers .* with \[32, 64\]"):
        model.generate_batch(prompts(), generation_config=greedy(3))


@needs_tested
def test_keys_of_another_width_than_the_cache() -> None:
    """The cache looks at the keys that it gets, whatever the configuration says."""
    model = build("llama")
    options = {"generation_config": greedy(3), "continuous_batching_config": batching()}
    with quick(), model.continuous_batching_context_manager(**options) as manager:
        cache = manager.batch_processor.cache
        good, bad = torch.zeros(1, 2, 5, 16), torch.zeros(1, 2, 5, 24)
        tables = {"block_table": torch.zeros(1, 5, 3, dtype=torch.int32)}
        for key, value in ((bad, good), (good, bad), (good[:, :1], good)):
            with pytest.raises(NotImplementedError, match="as the cache has one width for all layers, got"):
                cache.update(key, value, 0, tables)


@needs_tested
@pytest.mark.parametrize("page_size", [12, 512, 8.0])
def test_page_sizes(page_size: float) -> None:
    wanted = rf"`page_size` must be a power of two up to 256 on attention \"tatten\", got {page_size}"
    with pytest.raises(ValueError, match=wanted):
        generate(build("llama"), page_size=page_size)


@needs_tested
def test_a_request_longer_than_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    """transformers fails its requests; the log says why."""
    with caplog.at_level(logging.WARNING, "tatten"), quick():
        results = build("llama").generate_batch(
            prompts((100,)),
            generation_config=greedy(3),
            continuous_batching_config=batching(num_blocks=6, max_batch_tokens=128),
        )
    assert [x.generated_tokens for x in results.values()] == [[]]
    assert re.search(
        r"request req_0 has 100 tokens, more than the cache .* can hold: \d+ pages of 8 tokens", caplog.text
    )


@needs_tested
def test_requests_longer_than_the_memory_are_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    """The log names each one once, and nothing of those that are cancelled stays."""
    config = batching(num_blocks=24, max_batch_tokens=256)
    options = {"generation_config": greedy(3), "continuous_batching_config": config}
    short, too_long = prompts((5, 200))
    with caplog.at_level(logging.WARNING, "tatten"), quick():
        with build("llama").continuous_batching_context_manager(**options) as manager:
            cache = manager.batch_processor.cache
            manager.add_request(short, request_id="short", max_new_tokens=180, streaming=True)
            for i in range(50):
                manager.add_request(too_long, request_id=f"long {i}")
            while len(cache._too_long) < 50:
                assert manager.get_result(timeout=60).request_id == "short"
            for i in range(50):
                manager.cancel_request(f"long {i}")
            while manager.batch_processor.has_pending_requests():
                manager.get_result(timeout=0.05)
        assert manager.background_thread_status.fatal_error is None
    assert cache._too_long == set()
    named = re.findall(r"request (long \d+) has 200 tokens", caplog.text)
    assert sorted(named) == sorted(f"long {i}" for i in range(50))


@needs_tested
def test_layers_out_of_order() -> None:
    """The first layer of a group makes the tables: a layer must not get those of an earlier step."""
    model = build("llama")
    model.model.layers = model.model.layers[::-1]
    with quick():
        results = model.generate_batch(
            prompts((5,)), generation_config=greedy(3), continuous_batching_config=batching()
        )
    assert re.search("layer 1 must follow its predecessors among .0, 1.", next(iter(results.values())).error)


@needs_tested
@pytest.mark.parametrize("argument", ["position_bias", "output_attentions"])
def test_attention_that_asks_for_more(argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    layer = model.model.layers[0].self_attn
    called = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *args, **kwargs: called(*args, **kwargs, **{argument: True}))
    with quick():
        results = model.generate_batch(
            prompts((5,)), generation_config=greedy(3), continuous_batching_config=batching()
        )
    wanted = (
        "neither dropout nor attention weights" if argument == "output_attentions" else f"`{argument}` must be None"
    )
    assert re.search(wanted, next(iter(results.values())).error)


def test_batched_models_have_the_kinds_of_layers_that_transformers_has() -> None:
    kinds = {kind for _, config in batched_models.MODELS.values() for kind in config.get("layer_types", ())}
    assert kinds == {"full_attention", "sliding_attention"}
