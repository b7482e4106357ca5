"""Steps of `decode_loop` that are compiled once, and anew if the model or the mode has changed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decode_loops import EAGER, both, build, graphs_of, prompts
from transformers import StaticCache

from tatten.integrations.transformers import DecodeLoop
from tatten.integrations.transformers.loop import fingerprint

pytestmark = pytest.mark.drawn(8)


def test_another_prompt_length_and_temperature_compile_nothing() -> None:
    model, loop = build("llama"), DecodeLoop()

    def generate(length: int, **kwargs: Any) -> Callable[[], object]:
        ids, _ = prompts(1, length)
        arguments = {"do_sample": True, "max_new_tokens": 9, "custom_generate": loop, "compile_config": EAGER}
        return lambda: model.generate(ids, **{**arguments, **kwargs})

    torch._dynamo.reset()
    warped = {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2}
    assert graphs_of(generate(20, **warped)) == 1
    others = {"temperature": 1.1, "top_k": 5, "top_p": 0.5, "repetition_penalty": 1.7, "max_new_tokens": 30}
    for length in (5, 33, 20):
        assert graphs_of(generate(length, **{**warped, **others})) == 0
    assert graphs_of(generate(20, **warped, min_p=0.1)) == 1
    model.generation_config.temperature = 0.4  # bookkeeping of `generate`, as are the lengths of its static caches
    try:
        for length in (7, 20):
            assert graphs_of(generate(length, **{**warped, "cache_implementation": "static"})) == 0
    finally:
        model.generation_config.temperature = None


def test_attention_of_the_step_is_rewritten(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="tatten"):
        torch._dynamo.reset()
        model, (ids, _) = build("llama"), prompts(1)
        model.generate(ids, max_new_tokens=3, do_sample=False, custom_generate=DecodeLoop(), compile_config=EAGER)
    assert "2 of 2" in caplog.text or "rewrote 2" in caplog.text, caplog.text


def test_numbers_of_a_cache_are_seen_through_its_layers() -> None:
    """A captured graph would not see a number that a cache changes on the host."""
    cache = StaticCache(build("llama").config, max_cache_len=64)
    before = fingerprint.numbers_of(cache)
    cache.layers[0].max_cache_len += 1
    assert fingerprint.numbers_of(cache) != before
    assert list(fingerprint.leaves(SimpleNamespace(x=1))) == []


def test_a_hook_that_is_added_later_changes_the_tokens() -> None:
    """Dynamo guards on no hooks."""
    model, loop, ids = build("llama"), DecodeLoop(), prompts(1)[0]
    assert torch.equal(*both(model, loop, ids))
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: -output)
    try:
        assert torch.equal(*both(model, loop, ids))
    finally:
        hook.remove()
    assert torch.equal(*both(model, loop, ids))


def test_what_a_graph_would_not_notice_is_in_the_state_of_a_model() -> None:
    model = build("llama")
    states = [fingerprint.state_of(model), fingerprint.state_of(model)]
    attention = model.model.layers[1].self_attn
    scaling = attention.scaling
    attention.scaling = scaling * 2
    states.append(fingerprint.state_of(model))
    attention.scaling = scaling
    model.train()
    states.append(fingerprint.state_of(model))
    model.eval()
    model.config.rms_norm_eps *= 2
    states.append(fingerprint.state_of(model))
    model.config.rms_norm_eps /= 2
    assert states[0] == states[1] == fingerprint.state_of(model)
    assert len(set(states)) == 4


def test_more_changes_of_a_model_than_dynamo_recompiles_for() -> None:
    model, loop, ids = build("llama"), DecodeLoop(), prompts(1)[0]
    attention = model.model.layers[0].self_attn
    scaling = attention.scaling
    for factor in range(1, 11):
        attention.scaling = scaling * factor
        assert torch.equal(*both(model, loop, ids, max_new_tokens=4))
    attention.scaling = scaling


def test_a_number_in_a_closure_that_changes_more_often_than_dynamo_recompiles() -> None:
    """Dynamo compiles for each value. When it refuses to, the loop of `generate` runs."""
    model, loop, ids, scale = build("llama"), DecodeLoop(), prompts(1)[0], [0.0]
    hook = model.model.layers[0].register_forward_hook(lambda module, inputs, output: output + scale[0])
    try:
        for i in range(10):
            scale[0] = 0.1 * i
            assert torch.equal(*both(model, loop, ids, max_new_tokens=6))
    finally:
        hook.remove()
    assert "the step does not compile as one graph" in str(loop.reason)


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_calls_inside_and_outside_of_a_mode(mode: Callable[[], Any]) -> None:
    model, loop, ids = build("llama"), DecodeLoop(), prompts(1)[0]
    for inside in (True, False, True, False):
        with mode() if inside else torch.no_grad():
            result, expected = both(model, loop, ids, max_new_tokens=4)
        assert torch.equal(result, expected)


def test_an_encoder_decoder_compiles_once_and_falls_back_with_an_empty_cache() -> None:
    model, loop, (ids, mask) = build("t5"), DecodeLoop(), prompts(4)
    arguments = {"attention_mask": mask, "min_new_tokens": 6}
    torch._dynamo.reset()
    assert graphs_of(lambda: both(model, loop, ids, **arguments)) == 1
    assert graphs_of(lambda: both(model, loop, ids.flip(0) + 1, attention_mask=mask.flip(0), min_new_tokens=6)) == 0
    assert torch.equal(*both(model, loop, ids.flip(0) + 1, attention_mask=mask.flip(0), min_new_tokens=6))
    breaks = model.lm_head.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    try:
        assert torch.equal(*both(model, DecodeLoop(), ids, **arguments))
    finally:
        breaks.remove()
