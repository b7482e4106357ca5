"""Models that change between calls or during a call, and models that decode by code of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from broken_api import WAYS, break_import
from decode_loops import EAGER, SMALL, Launching, with_weights
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    FalconConfig,
    FalconForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

from tatten.integrations.transformers import DecodeLoop, cache_kwargs
from tatten.integrations.transformers.loop import compiled_function
from tatten.integrations.transformers.loop.capture import NotCompiledError
from tatten.ops import moved


class Chunks:
    """A streamer that keeps its tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, tokens: Tensor) -> None:
        self.tokens += tokens.flatten().tolist()

    def end(self) -> None:
        pass


def llama(kind: type[PreTrainedModel] = LlamaForCausalLM, **changes: Any) -> Any:
    return with_weights(kind, LlamaConfig(**SMALL | changes))


def generated(model: Any, loop: DecodeLoop | None = None, **more: Any) -> Tensor:
    """Generate with the loop, or without one."""
    ids = torch.randint(3, 64, (1, 10), generator=torch.Generator().manual_seed(3))
    looped = {} if loop is None else {"custom_generate": loop, "compile_config": EAGER}
    torch.manual_seed(0)
    result = model.generate(ids, **{"do_sample": False, "max_new_tokens": 20, **more, **looped})
    return result if isinstance(result, Tensor) else result.sequences


def assert_same(model: Any, loop: DecodeLoop, reason: str | None, **more: Any) -> None:
    result = generated(model, loop, **more)
    assert torch.equal(result, generated(model, **more))
    if reason is None:
        assert loop.reason is None
    else:
        assert reason in str(loop.reason)


class OnlyThree(LlamaForCausalLM):
    def _sample(self, ids: Tensor, **arguments: Any) -> Tensor:
        return ids[:, :3]


def test_a_model_with_its_own_method_of_sampling() -> None:
    assert_same(llama(OnlyThree), DecodeLoop(), "OnlyThree samples tokens by code of its own")


def test_a_method_of_an_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends_soon(finished: Any, synced: Any, device: Any, *args: Any, **kwargs: Any) -> bool:
        return False

    model, loop = llama(), DecodeLoop()
    assert_same(model, loop, None)
    monkeypatch.setattr(model, "_has_unfinished_sequences", ends_soon)
    assert_same(model, loop, "LlamaForCausalLM ends texts by code of its own")


def counting(calls: list[int]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        calls[0] += 1

    return hook


def keeping(outputs: list[Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        outputs.append(output)

    return hook


def numbering(_: list[int]) -> Callable[..., None]:
    def hook(module: Any, inputs: Any, output: Tensor) -> None:
        module.calls = getattr(module, "calls", 0) + 1

    return hook


@pytest.mark.parametrize("hook", [counting([0]), keeping([]), numbering([])], ids=["counts", "keeps", "attribute"])
def test_a_hook_with_side_effects(hook: Callable[..., None]) -> None:
    """A captured step would not call it, and a compiled one would be compiled anew for each token."""
    model, loop, streamer = llama(), DecodeLoop(), Chunks()
    model.model.layers[1].mlp.register_forward_hook(hook)
    steps = []
    for _ in range(3):
        assert_same(model, loop, "a step changes values that it was compiled for")
        steps.append([*loop._steps[model].values()])
    assert steps[0] == steps[1] == steps[2]  # only the first call compiles
    assert len(loop._declined[model]) == 1
    assert generated(model, loop, streamer=streamer)[0].tolist() == streamer.tokens


def test_a_hook_with_side_effects_and_a_cache_of_the_user() -> None:
    """The cache holds the prompt when the hook is noticed, so `generate` can't begin anew."""
    model, loop = llama(), DecodeLoop()
    model.model.layers[1].mlp.register_forward_hook(counting([0]))
    cache = cache_kwargs(StaticCache(model.config, max_cache_len=64))
    with pytest.raises(NotCompiledError, match="a step changes values that it was compiled for"):
        generated(model, loop, **cache)


@pytest.mark.parametrize("passes_cache", [False, True])
def test_code_that_is_not_compiled(passes_cache: bool) -> None:
    model, loop = llama(), DecodeLoop()
    cache = cache_kwargs(StaticCache(model.config, max_cache_len=64)) if passes_cache else {}
    with torch.compiler.set_stance("force_eager"):
        result = generated(model, loop, **cache)
    assert loop.reason is None
    assert torch.equal(result, generated(model))


class Tag:
    """Its text has its address."""


@pytest.mark.parametrize("note", [Tag, threading.Lock], ids=["object", "lock"])
def test_a_config_with_objects(note: Callable[[], object]) -> None:
    model, loop = llama(), DecodeLoop()
    model.config.note = note()
    for _ in range(2):
        assert generated(model, loop).shape == (1, 30)
        assert loop.reason is None
        assert len(loop._steps[model]) == 1


def test_layers_that_are_removed_and_added() -> None:
    model, loop = llama(num_hidden_layers=3), DecodeLoop()
    layers = model.model.layers
    for n in (1, 3, 1):
        model.model.layers, model.config.num_hidden_layers = layers[:n], n
        assert_same(model, loop, None)


def test_heads_that_change() -> None:
    model, loop = llama(), DecodeLoop()
    assert_same(model, loop, None)
    other = llama(num_key_value_heads=SMALL["num_attention_heads"])
    model.model, model.config = other.model, other.config
    assert_same(model, loop, None)


def test_a_method_of_a_class_of_modules_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loop = llama(), DecodeLoop()
    assert_same(model, loop, None)
    kind = type(model.model.layers[0].mlp)
    monkeypatch.setattr(kind, "forward", lambda self, x: self.down_proj(self.up_proj(x)))
    assert_same(model, loop, None)


@pytest.mark.parametrize("part", ["model.layers.0.self_attn", "model.layers.1"])
def test_a_part_in_training_mode(part: str) -> None:
    model, loop = llama(attention_dropout=0.3), DecodeLoop()
    model.get_submodule(part).train()
    assert_same(model, loop, f"`{part}` of the model is in training mode")


def test_replaced_layers_without_dropout_may_be_in_training_mode() -> None:
    model = llama()
    model.model.norm = nn.RMSNorm(model.config.hidden_size)
    weight = model.lm_head.weight
    model.lm_head = nn.Linear(*weight.shape[::-1], bias=False)
    model.lm_head.weight = weight
    assert model.lm_head.training
    assert_same(model, DecodeLoop(), None)


@pytest.mark.parametrize("kept", ["result", "cache"])
@pytest.mark.parametrize("ahead", [0, 2])
def test_an_encoder_decoder_whose_text_ends_early(ahead: int, kept: str) -> None:
    """The steps that were launched behind the end are removed from the decoder's cache."""
    sizes = {"d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 64}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    model, loop = with_weights(T5ForConditionalGeneration, T5Config(**sizes, **tokens)), Launching(ahead)
    for weight in model.parameters():
        weight.data.mul_(1.5 if weight.dim() > 1 else 1)  # else one token repeats
    text = generated(model, eos_token_id=None)[0].tolist()
    end = next(token for i, token in enumerate(text) if i > 3 and token not in text[:i])
    more: dict[str, Any] = {"eos_token_id": end, "return_dict_in_generate": True}
    caches = [EncoderDecoderCache(StaticCache(model.config, max_cache_len=64), DynamicCache()) for _ in range(2)]
    results = [
        generated(model, used, **more, **(cache_kwargs(cache) if kept == "cache" else {}))
        for used, cache in zip((loop, None), caches, strict=True)
    ]
    assert loop.reason is None
    assert torch.equal(*results)
    if kept == "cache":
        assert int(caches[0].get_seq_length()) == int(caches[1].get_seq_length())


def test_an_assistant_whose_dtype_changes() -> None:
    model, draft, loop = llama(), llama(num_hidden_layers=1), DecodeLoop()
    draft.generation_config.num_assistant_tokens = 3
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        draft.to(dtype)
        result = generated(model, loop, assistant_model=draft)
        assert loop.reason is None
        assert torch.equal(result, generated(model))


def test_a_model_that_can_not_run_with_a_static_cache() -> None:
    """transformers' Falcon with alibi can't; `generate` chooses a dynamic cache."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "alibi": True}
    config = FalconConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    model, loop = with_weights(FalconForCausalLM, config), DecodeLoop()
    for _ in range(2):
        assert_same(model, loop, "the prefill of FalconForCausalLM with a static cache raised RuntimeError: The size")
    llm, loop = llama(), DecodeLoop()
    model.generation_config.num_assistant_tokens = 3
    result = generated(llm, loop, assistant_model=model)
    assert "the prefill of FalconForCausalLM with a static cache raised" in str(loop.reason)
    assert torch.equal(result, generated(llm))


def test_an_error_of_a_prefill_is_that_of_generate() -> None:
    model, loop = llama(), DecodeLoop()
    with pytest.raises(IndexError):
        model.generate(torch.tensor([[3, 99]]), max_new_tokens=3, custom_generate=loop, compile_config=EAGER)
    assert_same(model, loop, None)


def test_text_alone_in_a_model_of_images() -> None:
    """transformers (5.24) passes an empty `mm_encoder_outputs`."""
    text = {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=SMALL | text | {"model_type": "gemma3_text", "num_hidden_layers": 2},
        vision_config=vision | {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_id=60,
        boi_token_id=61,
        eoi_token_id=62,
    )
    assert_same(with_weights(Gemma3ForConditionalGeneration, config), DecodeLoop(), None)


def test_sampling_under_another_default_dtype() -> None:
    model, loop = llama(), DecodeLoop()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert_same(model, loop, None, do_sample=True, max_new_tokens=60, num_return_sequences=8)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_call_under_a_dispatch_mode() -> None:
    """PyTorch compiles nothing under a mode. If a compiled call raises an error for it, a setting of Dynamo leaks."""
    model, loop = llama(), DecodeLoop()
    with FlopCounterMode(display=False) as counter:
        assert_same(model, loop, "a dispatch mode, such as FlopCounterMode, is active")
    assert counter.get_total_flops() > 0
    assert torch._dynamo.config.automatic_dynamic_shapes
    assert_same(model, loop, None)


@pytest.mark.parametrize("way", WAYS)
def test_a_loop_if_the_search_for_modes_has_moved(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_import(
        monkeypatch, compiled_function.__name__, "torch.utils._python_dispatch", "is_in_torch_dispatch_mode", way
    )
    monkeypatch.setattr(moved, "_notes", {})
    assert_same(llama(), DecodeLoop(), None)
    (note,) = moved.moved_notes()
    assert note.startswith("torch.utils._python_dispatch.is_in_torch_dispatch_mode is not as in the versions")
