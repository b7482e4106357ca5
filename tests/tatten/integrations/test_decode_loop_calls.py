"""Calls of `decode_loop`: streamers, threads, resets, and calls that run the loop of `generate` for a reason."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from decode_loops import EAGER, MODELS, Kept, Launching, both, build, prompts
from torch import Tensor
from transformers import CompileConfig, DynamicCache, TextIteratorStreamer

from tatten.integrations.transformers import DecodeLoop, cache_kwargs
from tatten.integrations.transformers.loop import generate_call, prepared

pytestmark = pytest.mark.drawn(8)


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("more", [{}, {"num_beams": 1, "no_repeat_ngram_size": 2}], ids=["loop", "generate"])
def test_streamers_get_all_tokens_and_the_end(more: dict[str, Any], ahead: int) -> None:
    model, (ids, _) = build("llama"), prompts(1)
    arguments = {"max_new_tokens": 12, "do_sample": False, **more}
    expected, result = Kept(), Kept()
    model.generate(ids, **arguments, streamer=expected)
    model.generate(ids, **arguments, streamer=result, custom_generate=Launching(ahead), compile_config=EAGER)
    assert result.tokens == expected.tokens
    assert result.ended == 1


def test_a_text_streamer_in_a_thread_and_a_pipeline() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 120)}}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")
    model, arguments = build("llama"), {"max_new_tokens": 12, "do_sample": False}
    ids = tokenizer("w5 w6 w7", return_tensors="pt").input_ids

    def text(**more: Any) -> str:
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=120.0)
        keywords = {"inputs": ids, **arguments, **more, "streamer": streamer}
        thread = threading.Thread(target=model.generate, kwargs=keywords)
        thread.start()
        pieces = list(streamer)
        thread.join()
        return "".join(pieces)

    looped = {"custom_generate": DecodeLoop(), "compile_config": EAGER}
    assert text(**looped) == text()
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert pipe("w5 w6 w7", **arguments, **looped) == pipe("w5 w6 w7", **arguments)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 3}, "beams"),
    "bias": ({"sequence_bias": [[[3], 2.0]]}, "SequenceBiasLogitsProcessor"),
    "sampled lookup": ({"prompt_lookup_num_tokens": 3, "do_sample": True}, "prompt lookup in one step is greedy"),
    "assistant": ({"assistant_model": "llama", "do_sample": True}, "an assistant in one step is greedy"),
    "custom": ({"logits_processor": [lambda ids, scores: scores]}, "the logits processor function"),
    "criterion": ({"stopping_criteria": [lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)]}, "criterion"),
    "hidden states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "`output_hidden_states`"),
    "dynamic": ({"cache": DynamicCache}, "DynamicCache"),
    "no cache": ({"use_cache": False}, "`use_cache` is False"),
    "uncompiled": ({"disable_compile": True}, "`disable_compile` is True"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_calls_run_the_loop_of_generate_with_a_reason(case: str, caplog: pytest.LogCaptureFixture) -> None:
    kwargs, reason = OTHERS[case]
    model, (ids, _), loop = build("llama"), prompts(1), DecodeLoop()

    def generate(**more: Any) -> Any:
        arguments = {"max_new_tokens": 12, "do_sample": False, **kwargs, **more}
        if arguments.get("assistant_model"):
            arguments["assistant_model"] = model
        if "cache" in arguments:
            arguments |= cache_kwargs(arguments.pop("cache")(config=model.config))
        torch.manual_seed(0)
        result = model.generate(ids, **arguments)
        return result if isinstance(result, Tensor) else result.sequences

    expected = generate()
    for _ in range(2):
        assert torch.equal(generate(custom_generate=loop), expected)
        assert reason in str(loop.reason)
    assert sum(reason in x.getMessage() for x in caplog.records if "tatten" in x.getMessage()) == 1


def test_the_reason_names_the_error_of_a_backend_that_fails() -> None:
    def fails(graph: Any, inputs: Any) -> Any:
        raise TypeError("list indices must be integers")

    model, (ids, _), loop = build("llama"), prompts(1), DecodeLoop()
    config = CompileConfig(backend=fails, mode=None)
    model.generate(ids, max_new_tokens=9, custom_generate=loop, compile_config=config)
    assert "backend='fails' raised: TypeError: list indices must be integers" in str(loop.reason)


def test_a_model_that_does_not_compile_as_one_graph_runs_the_loop_of_generate() -> None:
    """Tokens, random numbers and the streamer are as if the loop had not been asked."""
    model, (ids, _), loop = build("llama"), prompts(1), DecodeLoop()
    streamers = Kept(), Kept()
    arguments = {"max_new_tokens": 9, "do_sample": True}
    torch.manual_seed(0)
    expected = model.generate(ids, **arguments, streamer=streamers[0])
    breaks = model.lm_head.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    torch.manual_seed(0)
    result = model.generate(ids, **arguments, streamer=streamers[1], custom_generate=loop, compile_config=EAGER)
    breaks.remove()
    assert torch.equal(result, expected)
    assert streamers[0].tokens == streamers[1].tokens
    assert "the step does not compile as one graph" in str(loop.reason)


def test_calls_from_threads_take_turns() -> None:
    model, loop = build("llama"), DecodeLoop()
    arguments = {"max_new_tokens": 12, "do_sample": False}
    expected = [model.generate(prompts(1, seed=seed)[0], **arguments) for seed in range(4)]
    results: list[Tensor | None] = [None] * 4

    def generate(seed: int) -> None:
        ids = prompts(1, seed=seed)[0]
        results[seed] = model.generate(ids, **arguments, custom_generate=loop, compile_config=EAGER)

    threads = [threading.Thread(target=generate, args=(seed,)) for seed in range(4)]
    for x in threads:
        x.start()
    for x in threads:
        x.join()
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


def test_reset_frees_caches_and_a_model_is_not_kept_alive() -> None:
    kind, config, sizes = MODELS["llama"]
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes)).eval()
    loop = DecodeLoop()
    arguments = {"do_sample": False, "max_new_tokens": 3, "custom_generate": loop, "compile_config": EAGER}
    model.generate(prompts(1)[0], **arguments)
    cache = weakref.ref(next(iter(loop._steps[model].values())).cache)
    assert cache() is not None
    loop.reset()
    gc.collect()
    assert cache() is None
    model.generate(prompts(1)[0], **arguments)
    alive = weakref.ref(model)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("ahead", [-1, 1.0, True])
def test_ahead_must_be_a_count(ahead: object) -> None:
    with pytest.raises(ValueError, match="`ahead` must be an int of at least 0, got"):
        DecodeLoop(ahead)  # type: ignore[arg-type]


def test_a_streamer_that_calls_the_loop_gets_the_loop_of_generate() -> None:
    model, loop, ids, texts = build("llama"), DecodeLoop(), prompts(1)[0], []

    class Calling(Kept):
        def put(self, value: Tensor) -> None:
            super().put(value)
            if len(self.tokens) == 3:
                texts.append(both(model, loop, ids[:, :7], max_new_tokens=4))

    expected = model.generate(ids, max_new_tokens=16, do_sample=False)
    arguments = {"custom_generate": loop, "compile_config": EAGER, "streamer": Calling()}
    assert torch.equal(model.generate(ids, max_new_tokens=16, do_sample=False, **arguments), expected)
    assert torch.equal(*texts[0])


def test_a_reason_of_another_thread_does_not_choose_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loop, ids = build("llama"), DecodeLoop(), prompts(1)[0]
    original = DecodeLoop._reason_against

    def interrupted(self: DecodeLoop, *args: Any, **kwargs: Any) -> str | None:
        reason = original(self, *args, **kwargs)
        self.reason = None  # as another thread's call would set it
        return reason

    monkeypatch.setattr(DecodeLoop, "_reason_against", interrupted)
    result, expected = both(model, loop, ids, num_beams=3)
    assert torch.equal(result, expected)


DECLINED: dict[str, tuple[str, Callable[[Any], Any], dict[str, Any]]] = {
    "training": ("training mode", lambda model: model.train(), {"do_sample": True}),
    "two penalties": (
        "two repetition penalties",
        lambda model: None,
        {
            "logits_processor": [transformers.RepetitionPenaltyLogitsProcessor(x) for x in (1.3, 1.2)],
        },
    ),
    "attentions": ("`output_attentions`", lambda model: None, {"output_attentions": True}),
}


@pytest.mark.parametrize("case", DECLINED)
def test_more_calls_that_run_the_loop_of_generate(case: str) -> None:
    reason, change, kwargs = DECLINED[case]
    model, loop, ids = build("llama"), DecodeLoop(), prompts(1)[0]
    try:
        change(model)
        result, expected = both(model, loop, ids, **kwargs)
    finally:
        model.eval()
    assert torch.equal(result, expected)
    assert reason in str(loop.reason)
    assert torch.equal(*both(model, loop, ids))
    assert loop.reason is None


def test_a_call_that_does_not_compile_leaves_others_alone() -> None:
    model, loop, ids = build("llama"), DecodeLoop(), prompts(1)[0]
    assert torch.equal(*both(model, loop, ids))
    breaks = model.lm_head.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    for _ in range(2):
        assert torch.equal(*both(model, loop, ids))
        assert "does not compile" in str(loop.reason)
    breaks.remove()
    assert torch.equal(*both(model, loop, ids))
    assert loop.reason is None


def test_reset_during_a_call_is_an_error() -> None:
    model, loop, ids = build("llama"), DecodeLoop(), prompts(1)[0]

    class Resetting(Kept):
        def put(self, value: Tensor) -> None:
            if self.tokens:
                loop.reset()
            super().put(value)

    arguments = {"custom_generate": loop, "compile_config": EAGER, "streamer": Resetting(), "do_sample": False}
    with pytest.raises(RuntimeError, match="`reset` must not be called by a streamer"):
        model.generate(ids, max_new_tokens=6, **arguments)
    assert torch.equal(*both(model, loop, ids))


def test_sharded_models_synchronise_as_generate_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loop, ids = build("llama"), DecodeLoop(), prompts(1)[0]
    monkeypatch.setattr("transformers.generation.utils.is_fsdp_managed_module", lambda module: True)
    monkeypatch.setattr("transformers.generation.utils._get_torch_distributed_world_size", lambda: 2, raising=False)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda *_: 2)
    arguments = generate_call.dropped_arguments(model)
    assert arguments == generate_call.Dropped()  # outside of a call of `generate`
    seen: list[object] = []
    monkeypatch.setattr(
        "tatten.integrations.transformers.loop.decode_loop.run_unmodified",
        lambda model, ids, config, dropped, arguments: seen.append(dropped.synced_gpus) or ids,
    )
    model.generate(ids, max_new_tokens=4, do_sample=False, custom_generate=loop, compile_config=EAGER)
    assert seen == [True]
    assert "`synced_gpus`" in str(loop.reason)


class OnGpu:
    """Stands for ids on a GPU, which no test on a CPU has."""

    is_cuda, device = True, torch.device("cuda")


def test_the_reason_why_steps_are_not_captured() -> None:
    """With a user's cache, the steps of an encoder-decoder read another encoder's output in each call."""
    call: Any = SimpleNamespace(ids=OnGpu())
    source = transformers.modeling_outputs.BaseModelOutput(torch.zeros(1, 3, 8))
    assert prepared._not_captured(call, {"options": None}, None, {"use_cache": True}) is None
    inputs = {"encoder_outputs": source}
    assert "an encoder's output" in str(prepared._not_captured(call, {"options": None}, None, inputs))
    assert "of Inductor" in str(prepared._not_captured(call, {"options": {"triton.cudagraphs": True}}, None, {}))
    loop = DecodeLoop()
    assert torch.equal(*both(build("t5"), loop, prompts(1)[0], min_new_tokens=4, max_new_tokens=5))
    assert loop.reason is None
    assert loop.not_captured == "the device cpu has no CUDA graphs"


def test_an_attention_without_masks() -> None:
    """transformers makes no mask for a static cache, so that attention would read its empty slots."""

    def unmasked(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **more: Any) -> Any:
        return transformers.AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **more)

    transformers.AttentionInterface.register("unmasked", unmasked)
    model, loop = copy.deepcopy(build("llama")), DecodeLoop()
    model.set_attn_implementation("unmasked")
    assert torch.equal(*both(model, loop, prompts(1)[0]))
    assert loop.reason == "transformers makes no masks for the attention 'unmasked' of LlamaForCausalLM"


@pytest.mark.parametrize("more", [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {}], ids=str)
def test_more_tokens_than_scores(more: dict[str, Any]) -> None:
    """The token after the end of a text has no score, as in models that embed more tokens than they generate."""
    model, loop = copy.deepcopy(build("llama")), DecodeLoop()
    model.lm_head = torch.nn.Linear(64, 100, bias=False)
    ids, mask = prompts(3)
    ids = ids.clamp(max=99)  # transformers 5.17 raises an error for others
    arguments = {"attention_mask": mask, "pad_token_id": 115, "eos_token_id": list(range(1, 15)), "do_sample": True}
    assert torch.equal(*both(model, loop, ids, **arguments, **more, max_new_tokens=40))
    assert loop.reason is None
