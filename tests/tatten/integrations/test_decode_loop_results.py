"""Results of the decode loop with `return_dict_in_generate`: scores of each token, and a cache of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_loops import EAGER, PROMPT, Launching, build, graphs_of, prompts
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from tatten.integrations.transformers import DecodeLoop, cache_kwargs

pytestmark = pytest.mark.drawn(6)

WARPS = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.3}
SCORES = {"output_scores": True, "output_logits": True}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def both(model: PreTrainedModel, loop: DecodeLoop, ids: Tensor, **arguments: Any) -> tuple[Any, Any]:
    """The results of the loop and of `generate`, from one seed."""
    arguments = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True} | arguments
    pair = []
    for options in ({"custom_generate": loop, "compile_config": EAGER}, {}):
        torch.manual_seed(0)
        pair.append(model.generate(ids, **arguments, **options))
    return pair[0], pair[1]


def cache_of(result: Any) -> Any:
    return result.cache if hasattr(result, "cache") else result.past_key_values


def check(result: Any, expected: Any) -> None:
    assert torch.equal(result.sequences, expected.sequences)
    for name in ("scores", "logits"):
        ours, theirs = getattr(result, name), getattr(expected, name)
        assert type(ours) is type(theirs)
        if theirs is not None:
            assert len(ours) == len(theirs)
            torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("kind", [{}, {"do_sample": True}, WARPS], ids=["greedy", "sampled", "warped"])
@pytest.mark.parametrize("requested", [SCORES, {"output_scores": True}, {"output_logits": True}], ids="+".join)
def test_scores(kind: dict[str, Any], requested: dict[str, bool], ahead: int) -> None:
    """Scores of steps beyond the end of all texts are left out, and later calls leave those of a result alone."""
    model, loop = build("llama"), Launching(ahead)
    kept = []
    for seed in (0, 1):
        ids, mask = prompts(3, seed=seed)
        result, expected = both(model, loop, ids, attention_mask=mask, max_new_tokens=40, **kind, **requested)
        assert loop.reason is None
        kept.append((result, expected))
    for result, expected in kept:
        check(result, expected)
    assert not torch.equal(*(x.sequences for x, _ in kept))


def test_scores_of_a_text_that_ends_early() -> None:
    model, loop = build("llama"), Launching(2)
    ids, _ = prompts(1)
    text = both(model, loop, ids, eos_token_id=None, max_new_tokens=30)[1].sequences[0, PROMPT:].tolist()
    for end in (text[0], next(x for i, x in enumerate(text) if i > 1 and x not in text[:i])):
        result, expected = both(model, loop, ids, eos_token_id=end, max_new_tokens=30, **SCORES)
        assert len(expected.scores) < 30
        check(result, expected)
    check(*both(model, loop, ids, max_new_tokens=1, **SCORES))


def test_probabilities_of_transitions() -> None:
    model, loop = build("llama"), DecodeLoop()
    pair = both(model, loop, prompts(2)[0], output_scores=True, do_sample=True)
    ours, theirs = (model.compute_transition_scores(x.sequences, x.scores, normalize_logits=True) for x in pair)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_scores_without_a_dict_are_not_kept() -> None:
    model, loop = build("llama"), DecodeLoop()
    result, expected = both(model, loop, prompts(1)[0], return_dict_in_generate=False, **SCORES)
    assert torch.equal(result, expected)
    (step,) = loop._steps[model].values()
    assert step.state.scores is None
    assert step.state.logits is None


@pytest.mark.parametrize("inference", [False, True])
def test_later_calls_compile_nothing_and_leave_the_cache_of_a_result_alone(inference: bool) -> None:
    model, loop, ids = build("llama"), Launching(2), prompts(1)[0]
    kept: list[Any] = []

    def run(seed: int) -> None:
        kept.append(both(model, loop, ids + seed, eos_token_id=None)[0])

    with torch.inference_mode(inference):
        assert graphs_of(lambda: run(0)) == 1
        keys = cache_of(kept[0]).layers[0].keys.clone()
        assert graphs_of(lambda: run(1)) == 0
        assert torch.equal(cache_of(kept[0]).layers[0].keys, keys)
        assert int(cache_of(kept[0]).get_seq_length()) == kept[0].sequences.shape[1] - 1
        more = torch.cat((kept[0].sequences, ids[:, :3]), 1)
        arguments = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
        continued = model.generate(more, **arguments, **cache_kwargs(cache_of(kept[0])))
        assert torch.equal(continued, model.generate(more, **arguments))


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_windows_of_a_result(name: str) -> None:
    """A cache that `generate` returns keeps the last tokens of a window. Longer texts go on from both alike."""
    model, loop, ids = build(name), Launching(2), prompts(1)[0]
    result, expected = both(model, loop, ids, eos_token_id=None)
    check(result, expected)
    for ours, theirs in zip(cache_of(result).layers, cache_of(expected).layers, strict=True):
        assert type(ours) is type(theirs)
        torch.testing.assert_close([ours.keys, ours.values], [theirs.keys, theirs.values])
    more = torch.cat((result.sequences, ids[:, :3]), 1)
    texts = [
        model.generate(more, max_new_tokens=30, do_sample=False, eos_token_id=None, **cache_kwargs(cache_of(x)))
        for x in (result, expected)
    ]
    assert torch.equal(*texts)


def test_a_static_cache_of_a_result() -> None:
    model, loop, ids = build("llama"), Launching(2), prompts(1)[0]
    result, _ = both(model, loop, ids, cache_implementation="static")
    assert isinstance(cache_of(result), StaticCache)
    assert int(cache_of(result).get_seq_length()) == result.sequences.shape[1] - 1


def test_without_memory_a_result_has_the_cache_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("test")

    model, loop, ids = build("llama"), Launching(2), prompts(1)[0]
    arguments = {"max_new_tokens": 12, "do_sample": False, "custom_generate": loop, "compile_config": EAGER}
    with monkeypatch.context() as patch:
        patch.setattr(DynamicCache, "update", fail)
        result = model.generate(ids, return_dict_in_generate=True, **arguments)
    assert loop.reason is None
    assert not loop._steps[model]
    assert int(cache_of(result).get_seq_length()) == result.sequences.shape[1] - 1
    keys = cache_of(result).layers[0].keys.clone()
    check(*both(model, loop, ids + 1))
    assert torch.equal(cache_of(result).layers[0].keys, keys)
