"""`decode_loop`: the tokens of `generate`, greedy, sampled and streamed, by a step that is compiled once."""

from __future__ import annotations

import gc
import logging
import random
import threading
import time
import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from decode_loops import EAGER, Launching
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import CompileConfig, DynamicCache, StaticCache, TextIteratorStreamer
from transformers.generation.logits_process import SuppressTokensAtBeginLogitsProcessor
from transformers.generation.stopping_criteria import MaxLengthCriteria

from tatten.integrations.transformers import DecodeLoop, QuantizedStaticCache, SharedPrefixCache, cache_kwargs
from tatten.integrations.transformers.loop import fingerprint, generate_call, prepared

pytestmark = pytest.mark.drawn(8)

PROMPT = 20
SMALL = tiny_models.GQA | {"vocab_size": 120, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 1}
WINDOW = {**SMALL, "sliding_window": 16}
LATENTS = {
    **{name: x for name, x in SMALL.items() if name != "num_key_value_heads"},
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
ENCODER = {"d_model": 64, "vocab_size": 120, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SMALL),
    "mistral": ("MistralForCausalLM", "MistralConfig", WINDOW),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**WINDOW, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", {**SMALL, "layer_types": ["conv", "full_attention"]}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENTS),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {**ENCODER, "d_ff": 96, "num_layers": 2, "num_heads": 4, "d_kv": 16},
    ),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {**ENCODER, "forced_eos_token_id": None, "encoder_layers": 2, "decoder_layers": 2}
        | {"encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
    ),
}
_built: dict[str, transformers.PreTrainedModel] = {}


def build(name: str) -> transformers.PreTrainedModel:
    if name not in _built:
        kind, config, sizes = MODELS[name]
        torch.manual_seed(0)
        model = getattr(transformers, kind)(getattr(transformers, config)(**sizes)).eval()
        model.get_output_embeddings().weight.data.normal_(0, 0.5)  # some tokens are likelier than others
        _built[name] = model
    return _built[name]


def prompts(batch: int, length: int = PROMPT, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Ids and mask of left-padded prompts; one alone has no padding."""
    ids = torch.randint(2, 120, (batch, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[1, : length // 3] = mask[-1, : length // 2] = 0
    return ids * mask, mask


def assert_same_tokens(
    model: transformers.PreTrainedModel,
    loop: DecodeLoop,
    batch: int = 1,
    make_cache: Callable[[], transformers.Cache] | None = None,
    **kwargs: Any,
) -> Tensor:
    """Generate twice by the loop, and compare tokens and the random numbers that come next with those of `generate`."""
    ids, mask = prompts(batch)
    arguments = {"attention_mask": mask, "max_new_tokens": 24, "pad_token_id": 0, "do_sample": False, **kwargs}

    def generate(**more: Any) -> Tensor:
        torch.manual_seed(7)
        cache = {} if make_cache is None else cache_kwargs(make_cache())
        return model.generate(ids, **arguments, **cache, **more)

    expected, state = generate(disable_compile=True), torch.get_rng_state()
    for _ in range(2):
        result = generate(custom_generate=loop, compile_config=EAGER)
        assert loop.reason is None
        assert torch.equal(result, expected)
        assert loop.ahead or torch.equal(torch.get_rng_state(), state)
    return expected


WARPS = {"do_sample": True, "temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.02}
MANY_ENDS = {"eos_token_id": list(range(1, 12)), "max_new_tokens": 60}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 40},
    "greedy, one token": {"max_new_tokens": 1},
    "greedy, two tokens": {"max_new_tokens": 2},
    "min_new_tokens": {"max_new_tokens": 40, "min_new_tokens": 30},
    "min_length": {"max_new_tokens": 40, "min_length": PROMPT + 9, "eos_token_id": list(range(1, 60))},
    "left padding": {"batch": 4, "max_new_tokens": 60},
    "sampled": {"do_sample": True},
    "warped": {**WARPS, "batch": 4},
    "warped, penalty": {**WARPS, "batch": 4, "repetition_penalty": 1.3},
    "greedy, penalty": {"batch": 4, "repetition_penalty": 1.5},
    "typical": {"do_sample": True, "typical_p": 0.9, "epsilon_cutoff": 1e-3, "suppress_tokens": [3, 4]},
    "eta": {"do_sample": True, "eta_cutoff": 2e-3, "renormalize_logits": True, "remove_invalid_values": True},
    "begin and end": {"begin_suppress_tokens": [5], "forced_eos_token_id": 9},
    "samples": {"do_sample": True, "num_return_sequences": 4},
    "ragged ends": {**MANY_ENDS, "batch": 4, "do_sample": True},
    "no end": {"eos_token_id": None, "max_new_tokens": 30},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_of_generate(setting: str) -> None:
    assert_same_tokens(build("llama"), DecodeLoop(), **SETTINGS[setting])


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
@pytest.mark.parametrize("setting", ["greedy", "ragged ends", "left padding"])
def test_steps_that_were_launched_ahead_add_no_tokens(setting: str, ahead: int) -> None:
    assert_same_tokens(build("llama"), Launching(ahead), **SETTINGS[setting])


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", [x for x in MODELS if x != "llama"])
def test_models(name: str, batch: int) -> None:
    """Windows are shorter than the text; encoder-decoders decode under their sources' padding."""
    assert_same_tokens(build(name), DecodeLoop(), batch, max_new_tokens=30, min_new_tokens=12)


def static(room: int = 64) -> StaticCache:
    return StaticCache(build("llama").config, max_cache_len=room)


def quantised(room: int = 64) -> QuantizedStaticCache:
    return QuantizedStaticCache(build("llama").config, max_cache_len=room)


def fork(room: int = PROMPT + 29, n: int = 4) -> SharedPrefixCache:
    model = build("llama")
    cache = SharedPrefixCache(model.config)
    with torch.no_grad():
        model(prompts(1)[0][:, :-1], **cache_kwargs(cache))
    return cache.fork(n, capacity=room - PROMPT + 1)


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("ends", [[1], list(range(1, 50))], ids=["late", "early"])
@pytest.mark.parametrize("make_cache", [static, quantised])
def test_caches_of_the_user(make_cache: Callable[[], transformers.Cache], ends: list[int], ahead: int) -> None:
    assert_same_tokens(build("llama"), Launching(ahead), make_cache=make_cache, eos_token_id=ends)


@pytest.mark.parametrize("ends", [[1], list(range(1, 50))], ids=["late", "early"])
def test_samples_of_a_fork(ends: list[int]) -> None:
    more = {"do_sample": True, "num_return_sequences": 4, "eos_token_id": ends}
    assert_same_tokens(build("llama"), DecodeLoop(), make_cache=fork, **more)


def test_samples_of_forks_of_padded_prompts() -> None:
    model, (ids, mask) = build("llama"), prompts(2)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, :-1]

    def padded_fork() -> SharedPrefixCache:
        cache = SharedPrefixCache(model.config)
        with torch.no_grad():
            arguments = {"attention_mask": mask[:, :-1], "position_ids": positions}
            model(ids[:, :-1], **arguments, **cache_kwargs(cache))
        return cache.fork(2, capacity=30)

    assert_same_tokens(model, DecodeLoop(), 2, padded_fork, do_sample=True, num_return_sequences=2)


def test_a_users_cache_is_not_kept_alive() -> None:
    model, loop, cache = build("llama"), DecodeLoop(), static()
    arguments = {"do_sample": False, "max_new_tokens": 3, "custom_generate": loop, "compile_config": EAGER}
    model.generate(prompts(1)[0], **arguments, **cache_kwargs(cache))
    alive = weakref.ref(cache)
    del cache
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None


def test_a_users_cache_holds_the_text_without_surplus_steps() -> None:
    """Its length is that after `generate`, so that the next call continues from it."""
    model, (ids, _), caches = build("llama"), prompts(1), [static(), static()]
    arguments = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": list(range(1, 50))}
    model.generate(ids, **cache_kwargs(caches[0]), **arguments, disable_compile=True)
    loop = Launching(3)
    model.generate(ids, **cache_kwargs(caches[1]), **arguments, custom_generate=loop, compile_config=EAGER)
    assert loop.launched_steps > 0
    assert int(caches[0].get_seq_length()) == int(caches[1].get_seq_length())


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["greedy", "warped, penalty"])
def test_under_inductor(setting: str) -> None:
    model, (ids, mask) = build("llama"), prompts(SETTINGS[setting].get("batch", 1))
    arguments = {k: x for k, x in SETTINGS[setting].items() if k != "batch"}
    arguments = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **arguments, "attention_mask": mask}
    torch.manual_seed(7)
    expected = model.generate(ids, **arguments)
    torch.manual_seed(7)
    assert torch.equal(model.generate(ids, **arguments, custom_generate=DecodeLoop()), expected)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300))
def test_drawn_settings(seed: int) -> None:
    r = random.Random(seed)
    draw: dict[str, list[Any]] = {
        "temperature": [0.3, 1.4],
        "top_k": [1, 5, 50, 1000],
        "top_p": [0.2, 0.95],
        "min_p": [0.01, 0.3],
        "typical_p": [0.5, 0.95],
        "epsilon_cutoff": [0.01],
        "eta_cutoff": [0.01],
        "renormalize_logits": [True],
        "repetition_penalty": [0.8, 1.2, 2.0],
        "min_new_tokens": [0, 5, 20],
        "suppress_tokens": [[3, 4, 5]],
        "begin_suppress_tokens": [[6, 7]],
        "forced_eos_token_id": [8],
        "eos_token_id": [1, list(range(1, 12)), list(range(1, 60)), None],
        "num_return_sequences": [1, 2],
        "max_new_tokens": [1, 3, 25, 40],
    }
    kwargs = {name: r.choice(values) for name, values in draw.items() if r.random() < 0.3}
    sampled = r.random() < 0.7 or kwargs.get("num_return_sequences", 1) > 1
    if kwargs.get("eos_token_id", 1) is None:
        kwargs = {name: x for name, x in kwargs.items() if name not in ("min_new_tokens", "forced_eos_token_id")}
    name = r.choice([*MODELS, "llama", "llama", "llama"])
    loop = Launching(r.choice([0, 1, 3]))
    assert_same_tokens(build(name), loop, r.choice([1, 2, 4]), do_sample=sampled, **kwargs)


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("ends", [[1], list(range(1, 20)), None], ids=["one", "many", "none"])
@pytest.mark.parametrize("drafts, ngram", [(1, None), (3, 1), (7, 3)])
def test_prompt_lookup(drafts: int, ngram: int | None, ends: list[int] | None, ahead: int) -> None:
    """Tokens are those of greedy decoding, whatever is looked up; texts that repeat take fewer steps."""
    loop, model = Launching(ahead), build("llama")
    repeating = torch.randint(2, 120, (1, 6), generator=torch.Generator().manual_seed(drafts)).repeat(1, 4)
    for ids, new in ((prompts(1)[0], 60), (repeating, 60), (repeating[:, :1], 25), (repeating, 1), (repeating, 2)):
        arguments = {"max_new_tokens": new, "do_sample": False, "eos_token_id": ends}
        expected, streamer, plain = model.generate(ids, **arguments), Kept(), Kept()
        lookup = {"prompt_lookup_num_tokens": drafts, "max_matching_ngram_size": ngram}
        more = {"custom_generate": loop, "compile_config": EAGER, "streamer": streamer}
        result = model.generate(ids, **arguments, **lookup, **more)
        assert loop.reason is None
        assert torch.equal(result, expected)
        model.generate(ids, **arguments, streamer=plain)
        assert [*chain(*streamer.tokens)] == [*chain(*plain.tokens)]
        if new == 60 and ends is None:
            assert loop.launched_steps < 55


def graphs_of(call: Callable[[], object]) -> int:
    counters.clear()
    call()
    return counters["stats"]["unique_graphs"]


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


class Kept:
    """A streamer that keeps its tokens."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.tokens.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


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
    "ngrams": ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor"),
    "sampled lookup": ({"prompt_lookup_num_tokens": 3, "do_sample": True}, "prompt lookup in one step is greedy"),
    "assistant": ({"assistant_model": "llama", "do_sample": True}, "an assistant in one step is greedy"),
    "custom": ({"logits_processor": [lambda ids, scores: scores]}, "the logits processor function"),
    "criterion": ({"stopping_criteria": [lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)]}, "criterion"),
    "scores": ({"output_scores": True, "return_dict_in_generate": True}, "`output_scores`"),
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


def test_a_result_has_a_cache_that_later_calls_leave_alone() -> None:
    model, (ids, _), loop = build("llama"), prompts(1), Launching(2)
    arguments = {"do_sample": False, "custom_generate": loop, "compile_config": EAGER, "return_dict_in_generate": True}
    result = model.generate(ids, max_new_tokens=6, **arguments)
    cache = result.cache if hasattr(result, "cache") else result.past_key_values
    length, keys = int(cache.get_seq_length()), cache.layers[0].keys.clone()
    assert length == result.sequences.shape[1] - 1
    model.generate(ids + 1, max_new_tokens=9, **arguments)
    assert torch.equal(cache.layers[0].keys, keys)
    assert int(cache.get_seq_length()) == length


def test_a_time_limit_ends_the_text() -> None:
    model, (ids, _), loop = build("llama"), prompts(1), DecodeLoop()
    arguments = {"do_sample": False, "eos_token_id": None, "custom_generate": loop, "compile_config": EAGER}
    model.generate(ids, max_new_tokens=4, **arguments)
    start = time.time()
    result = model.generate(ids, max_new_tokens=480, max_time=0.2, **arguments)
    assert time.time() - start < 20
    assert PROMPT < result.shape[1] < PROMPT + 480


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


@pytest.mark.parametrize(
    "make_cache", [static, quantised, lambda room: fork(room, 1)], ids=["static", "8 bits", "fork"]
)
def test_a_cache_that_is_too_small_behaves_as_in_generate(make_cache: Callable[[int], transformers.Cache]) -> None:
    """It raises the same error, which names what to change, unless the text ends before."""
    model, (ids, _), loop = build("llama"), prompts(1), DecodeLoop()

    def generate(room: int, **more: Any) -> Tensor | tuple[type[Exception], str]:
        arguments = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **more}
        try:
            return model.generate(ids, **arguments, **cache_kwargs(make_cache(room)), compile_config=EAGER)
        except Exception as error:
            return type(error), str(error)

    expected = generate(PROMPT + 4)
    assert isinstance(expected, tuple)
    assert generate(PROMPT + 4, custom_generate=loop) == expected
    assert f"has room for {PROMPT + 4} tokens" in str(loop.reason)
    text = generate(PROMPT + 19)  # the last token is not stored
    assert isinstance(text, Tensor)
    assert torch.equal(generate(PROMPT + 19, custom_generate=loop), text)
    assert loop.reason is None
    ends = {"eos_token_id": int(text[0, PROMPT + 2])}
    assert torch.equal(generate(PROMPT + 4, custom_generate=loop, **ends), generate(PROMPT + 4, **ends))


class Holder:
    pass


def test_numbers_of_a_cache_are_seen_through_its_layers() -> None:
    """A captured graph would not see a number that a cache changes on the host."""
    cache = static()
    before = fingerprint.numbers_of(cache)
    cache.layers[0].max_cache_len += 1
    assert fingerprint.numbers_of(cache) != before
    assert list(fingerprint.leaves(Holder())) == []


# Calls that once gave other tokens than `generate`, raised, or hung.


def both(model: transformers.PreTrainedModel, loop: DecodeLoop, ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The tokens of `generate` and of the loop, from the same seed."""
    arguments = {"max_new_tokens": 16, "do_sample": False, **kwargs}
    torch.manual_seed(0)
    expected = model.generate(ids, **arguments)
    torch.manual_seed(0)
    return model.generate(ids, **arguments, custom_generate=loop, compile_config=EAGER), expected


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


@pytest.mark.parametrize("ahead", [0, 2])
def test_scores_without_a_token_to_sample_raise_as_in_generate(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeLoop, "_steps_ahead", lambda *_: ahead)
    model, ids = build("llama"), prompts(1)[0]
    none_left = SuppressTokensAtBeginLogitsProcessor(list(range(model.config.vocab_size)), PROMPT + 4)
    arguments = {"max_new_tokens": 12, "do_sample": True, "eos_token_id": None, "logits_processor": [none_left]}
    for more in ({}, {"custom_generate": DecodeLoop(), "compile_config": EAGER}):
        with pytest.raises(RuntimeError, match="inf"):
            model.generate(ids, **arguments, **more)
    torch.manual_seed(0)  # the next call works again, and may end before the scores fail
    loop = DecodeLoop()
    assert torch.equal(*both(model, loop, ids, do_sample=True, max_new_tokens=4, logits_processor=[none_left]))
    assert loop.reason is None


@pytest.mark.parametrize("kwargs", [{}, {"do_sample": True}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_a_prompt_longer_than_the_text_may_be(kwargs: dict[str, Any]) -> None:
    """The cache has room for the prompt, which one token follows."""
    model, loop, ids = build("llama"), DecodeLoop(), prompts(1, 1500)[0]
    tokens, expected = both(model, loop, ids, stopping_criteria=[MaxLengthCriteria(10)], **kwargs)
    assert loop.reason is None
    assert torch.equal(tokens, expected)
    assert tokens.shape == (1, 1501)


def test_the_first_of_several_criteria_ends_the_text() -> None:
    from transformers.generation import stopping_criteria as sc

    model, ids = build("llama"), prompts(1)[0]
    for criterion in (
        sc.EosTokenCriteria(torch.arange(2, 40)),
        sc.MaxLengthCriteria(PROMPT + 5),
        sc.MaxTimeCriteria(0.0),
    ):
        more = {"stopping_criteria": sc.StoppingCriteriaList([criterion])}
        result, expected = both(model, DecodeLoop(), ids, eos_token_id=1, **more)
        assert torch.equal(result, expected)
        assert expected.shape[1] < PROMPT + 16
    assert torch.equal(*both(model, DecodeLoop(), ids, max_time=0.0))


def test_a_call_after_one_that_continued_from_a_result() -> None:
    model, loop, ids = build("llama"), DecodeLoop(), prompts(1)[0]
    arguments = {"do_sample": False, "custom_generate": loop, "compile_config": EAGER, "eos_token_id": None}
    result = model.generate(ids, max_new_tokens=6, **arguments, return_dict_in_generate=True)
    cache = result.cache if hasattr(result, "cache") else result.past_key_values
    longer = torch.cat((result.sequences, ids[:, :3]), 1)
    continued = model.generate(longer, max_new_tokens=6, **arguments, **cache_kwargs(cache))
    assert torch.equal(continued, model.generate(longer, max_new_tokens=6, do_sample=False, eos_token_id=None))
    assert torch.equal(*both(model, loop, ids))


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_calls_inside_and_outside_of_a_mode(mode: Callable[[], Any]) -> None:
    model, loop, ids = build("llama"), DecodeLoop(), prompts(1)[0]
    for inside in (True, False, True, False):
        with mode() if inside else torch.no_grad():
            result, expected = both(model, loop, ids, max_new_tokens=4)
        assert torch.equal(result, expected)


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
    call: Any = Holder()
    call.ids = OnGpu()
    source = transformers.modeling_outputs.BaseModelOutput(torch.zeros(1, 3, 8))
    assert prepared._not_captured(call, {"options": None}, None, {"use_cache": True}) is None
    inputs = {"encoder_outputs": source}
    assert "an encoder's output" in str(prepared._not_captured(call, {"options": None}, None, inputs))
    assert "of Inductor" in str(prepared._not_captured(call, {"options": {"triton.cudagraphs": True}}, None, {}))
    loop = DecodeLoop()
    assert torch.equal(*both(build("t5"), loop, prompts(1)[0], min_new_tokens=4, max_new_tokens=5))
    assert loop.reason is None
    assert loop.not_captured == "the device cpu has no CUDA graphs"


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
