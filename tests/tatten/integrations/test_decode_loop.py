"""`decode_loop`: the tokens of `generate`, greedy and sampled, with all kinds of models and caches."""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from decode_loops import EAGER, MODELS, PROMPT, Launching, both, build, prompts
from torch import Tensor
from transformers import StaticCache
from transformers.generation.logits_process import SuppressTokensAtBeginLogitsProcessor
from transformers.generation.stopping_criteria import MaxLengthCriteria

from tatten.integrations.transformers import DecodeLoop, QuantizedStaticCache, SharedPrefixCache, cache_kwargs

pytestmark = pytest.mark.drawn(8)


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
    "n-grams": {"batch": 4, "no_repeat_ngram_size": 2, "max_new_tokens": 60},
    "single tokens": {"no_repeat_ngram_size": 1, "do_sample": True},
    "bad words": {
        "batch": 4,
        "do_sample": True,
        "bad_words_ids": [[x] for x in range(9, 99)] + [[3, 4], [100, 101, 7]],
    },
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
