"""`decode_loop` with prompt lookup: the tokens of greedy decoding, in fewer steps."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from decode_loops import EAGER, PROCESSORS, Kept, Launching, both, build, graphs_of, prompts
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from tatten.integrations.transformers import DecodeLoop
from tatten.integrations.transformers.loop.verify import _occurred_before

pytestmark = pytest.mark.drawn(8)


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("ends", [[1], list(range(1, 20)), None], ids=["one", "many", "none"])
@pytest.mark.parametrize("drafts, ngram", [(1, None), (3, 1), (7, 3)])
def test_prompt_lookup(drafts: int, ngram: int | None, ends: list[int] | None, ahead: int) -> None:
    """Tokens are those of greedy decoding, whatever is looked up; texts that repeat take fewer steps."""
    loop, model = Launching(ahead), build("llama")
    again = repeating(drafts)
    for ids, new in ((prompts(1)[0], 60), (again, 60), (again[:, :1], 25), (again, 1), (again, 2)):
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


def repeating(seed: int) -> Tensor:
    """A prompt of 24 tokens that repeats itself, so that drafts are accepted."""
    return torch.randint(2, 120, (1, 6), generator=torch.Generator().manual_seed(seed)).repeat(1, 4)


@pytest.mark.parametrize("drafts", [2, 7])
@pytest.mark.parametrize("setting", PROCESSORS)
def test_processors_of_greedy_decoding(setting: str, drafts: int) -> None:
    """Each draft is checked by the scores that greedy decoding would have after it."""
    loop, model = Launching(2), build("llama")
    more = {"prompt_lookup_num_tokens": drafts, "max_new_tokens": 50, "eos_token_id": None, **PROCESSORS[setting]}
    for ids in (prompts(1)[0], *(repeating(seed) for seed in range(4))):
        assert torch.equal(*both(model, loop, ids, **more))
        assert loop.reason is None


def test_drafts_that_complete_an_n_gram_are_refused() -> None:
    """The prompt repeats itself, and a step checks whether its own drafts do."""
    loop, model = DecodeLoop(), build("llama")
    for size in (1, 2, 4):
        more = {"prompt_lookup_num_tokens": 7, "max_new_tokens": 50, "eos_token_id": None, "repetition_penalty": 0.6}
        assert torch.equal(*both(model, loop, repeating(0), **more, no_repeat_ngram_size=size))
        assert loop.reason is None


def test_drafts_are_accepted_with_a_penalty() -> None:
    loop, model = DecodeLoop(), build("llama")
    more = {"prompt_lookup_num_tokens": 7, "max_new_tokens": 50, "eos_token_id": None}
    assert torch.equal(*both(model, loop, repeating(0), **more, repetition_penalty=0.6))
    assert loop.launched_steps < 30


def test_another_penalty_compiles_nothing() -> None:
    loop, model, more = DecodeLoop(), build("llama"), {"prompt_lookup_num_tokens": 3}
    torch._dynamo.reset()
    assert graphs_of(lambda: both(model, loop, repeating(0), repetition_penalty=1.4, **more)) == 1
    assert graphs_of(lambda: both(model, loop, repeating(1), repetition_penalty=1.2, **more)) == 0
    assert torch.equal(*both(model, loop, repeating(1), repetition_penalty=1.2, **more))


@pytest.mark.parametrize("penalty", [1.8, 0.5])
def test_a_penalty_that_ignores_the_prompt(penalty: float) -> None:
    """Drafts from the prompt count once they are accepted, which scores after them in the same step show, too."""
    loop, model = DecodeLoop(), build("llama")
    for ignored in (None, 0, 24):
        processor = RepetitionPenaltyLogitsProcessor(penalty, prompt_ignore_length=ignored)
        more = {"logits_processor": [processor], "max_new_tokens": 40, "eos_token_id": None}
        expected = model.generate(repeating(2), do_sample=False, **more)
        looped = {"prompt_lookup_num_tokens": 5, "custom_generate": loop, "compile_config": EAGER}
        assert torch.equal(model.generate(repeating(2), do_sample=False, **more, **looped), expected)
        assert loop.reason is None


def test_more_tokens_to_look_up_than_the_text_may_have() -> None:
    loop, model = DecodeLoop(), build("llama")
    more = {"prompt_lookup_num_tokens": 2, "max_matching_ngram_size": 3000}
    assert torch.equal(*both(model, loop, repeating(0), **more))
    assert loop.reason is None


def test_tokens_that_occurred_before_each_draft() -> None:
    occurred = torch.tensor([[False, True, False, False, False]])
    before = _occurred_before(occurred, torch.tensor([3, 1, 9, 0]))  # 9 is not in the vocabulary of 4 tokens
    assert before is not None
    assert before[:, :4].int().tolist() == [[0, 1, 0, 0], [0, 1, 0, 1], [0, 1, 0, 1], [0, 1, 0, 1], [1, 1, 0, 1]]
    assert _occurred_before(None, torch.tensor([3])) is None
